"""Tests blocking calls: each thread has an event loop, which is closed with the thread or the process."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
from asyncio import AbstractEventLoop

import pytest

from relax_core.bus.ray_bus import blocking


async def current_loop() -> AbstractEventLoop:
    return asyncio.get_running_loop()


async def refuse() -> None:
    raise ValueError("refused")


def loop_of_another_thread() -> tuple[AbstractEventLoop, bool]:
    """Returns the event loop of an ended thread, and whether the loop was closed while the thread was alive."""
    found: list[tuple[AbstractEventLoop, bool]] = []

    def call() -> None:
        loop = blocking(current_loop())
        found.append((loop, loop.is_closed()))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return found[0]


def test_the_calls_of_a_thread_share_one_loop() -> None:
    first = blocking(current_loop())
    with pytest.raises(ValueError, match="refused"):
        blocking(refuse())
    assert blocking(current_loop()) is first, "also after a call that failed"


def test_each_thread_has_a_loop_that_ends_with_it() -> None:
    own = blocking(current_loop())
    foreign_loop, closed_early = loop_of_another_thread()
    assert foreign_loop is not own
    assert not closed_early
    assert foreign_loop.is_closed(), "the thread has ended"
    assert not own.is_closed()


def test_a_call_sees_the_context_of_its_caller() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    async def read() -> int:
        return variable.get()

    for value in (1, 2):
        variable.set(value)
        assert blocking(read()) == value


def test_a_loop_refuses_a_blocking_call() -> None:
    async def scene() -> None:
        call = current_loop()
        try:
            blocking(call)
        finally:
            call.close()

    with pytest.raises(RuntimeError, match="running event loop"):
        blocking(scene())


ENDING = """
import asyncio, threading, time
from relax_core.bus.ray_bus import blocking
from asyncio import get_running_loop

async def loop():
    return get_running_loop()

own = blocking(loop())
close = own.close
own.close = lambda: (close(), print("closed", flush=True))
started = threading.Event()

async def wait():
    started.set()
    await asyncio.sleep(600)

threading.Thread(target=lambda: blocking(wait()), daemon=True).start()
assert started.wait(30)
"""


def test_the_process_closes_the_main_threads_loop_and_waits_for_no_other() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "closed\n", "")
