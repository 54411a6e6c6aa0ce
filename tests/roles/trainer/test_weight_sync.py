"""Tests the trainer's calls to stopped engines: the calls that it waits for, and the order of their arrival."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.trainer.weight_sync import WeightSync
from relax_core.weights.transports import SharedMemoryTransport
from tests.contracts.engine.conftest import launch, model_folder, start_engine
from tests.contracts.engine.harness import Engine, hf_weights, make_model, prompts_of
from tests.roles.test_engine_owner import context_of

__all__ = ["launch", "model_folder", "start_engine"]


class Waits:
    """A fake of `Worker.waiting` that holds the current waits."""

    def __init__(self) -> None:
        self.now: list[str] = []

    @contextmanager
    def __call__(self, what: str, *, on: str) -> Iterator[None]:
        self.now.append(what)
        try:
            yield
        finally:
            self.now.remove(what)


class Engines:
    """Holds the clients of some engines."""

    def __init__(self, *engines: Engine) -> None:
        self.clients = [engine.client for engine in engines]

    def reachable(self) -> list[EngineClient]:
        return self.clients

    def left(self) -> list[str]:
        return []

    def forget(self, url: str) -> None:
        raise AssertionError(f"{url} was forgotten")


@pytest.fixture
def stopped() -> Iterator[Callable[[Engine], None]]:
    """Stops engines. They continue at the test's end or earlier."""
    pids: list[int] = []

    def stop(engine: Engine) -> None:
        pids.append(engine.process.pid)
        os.kill(engine.process.pid, signal.SIGSTOP)

    yield stop
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def has_memory(engine: Engine) -> bool:
    """Returns True if the engine starts a sample. Without memory an engine leaves the sample in its queue."""
    with ThreadPoolExecutor() as pool:
        tokens = pool.submit(engine.generate, prompts_of([5, 6]), SamplingParams(max_new_tokens=2))
        deadline = time.monotonic() + 60.0
        while not tokens.done() and engine.client.loads()["queued"] == 0:
            assert time.monotonic() < deadline, "it was not called"
        engine.client.loads()
        if engine.client.loads()["queued"] == 0:
            return len(tokens.result(60.0)) == 1
        engine.client.abort()
        return False


def test_in_time_sharing_a_stopped_engine_holds_nobody_up_and_gets_its_calls_in_order(
    start_engine: Callable[..., Engine], stopped: Callable[[Engine], None], tmp_path: Path
) -> None:
    """The engine is stopped after it released its memory. It loads the weights before it takes back the memory."""
    lives, slow = start_engine(), start_engine()
    context = context_of(load_config(), tmp_path)
    waits = Waits()
    sync = WeightSync(context, Engines(lives, slow), SharedMemoryTransport(), waiting=waits)
    sync.release_memory()
    assert not has_memory(lives) and not has_memory(slow)
    stopped(slow)
    sync.publish(1, hf_weights(make_model(None, seed=1)))
    report = sync.end_push()
    assert report is not None and report.behind == {slow.process.url} and not report.refused
    sync.resume_memory()  # this call returns although the engine is stopped
    assert has_memory(lives) and lives.version == 1
    with ThreadPoolExecutor() as pool:
        releasing = pool.submit(sync.release_memory)
        with pytest.raises(TimeoutError):  # otherwise the trainer would use memory that the engine may still have
            releasing.result(1.5)
        assert waits.now == ["the engines to release their memory"]
        os.kill(slow.process.pid, signal.SIGCONT)
        releasing.result(60.0)
    assert slow.version == 1 and not has_memory(slow), "its memory was resumed after the release"
    sync.publish(2, hf_weights(make_model(None, seed=2)))
    sync.end_push()
    sync.resume_memory()
    assert has_memory(lives)
    sync.close()


def test_an_engine_that_keeps_its_memory_is_told_also_when_it_says_so_late(
    start_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = start_engine()
    sync = WeightSync(context_of(load_config(), tmp_path), Engines(engine), SharedMemoryTransport(), waiting=Waits())
    sync.release_memory()
    engine.client._authorization = "Bearer wrong"
    with pytest.raises(EngineError, match="401"):
        sync.resume_memory()
    sync.close()
