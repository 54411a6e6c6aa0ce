"""Tests /health_generate with the engine's parts in this process."""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.engines.asgi_server import HttpError
from relax_core.engines.embedded import application as health_generate
from relax_core.engines.embedded.application import HealthGenerate
from relax_core.engines.embedded.assembly import build_app
from relax_core.engines.embedded.scheduler import Scheduler


@pytest.fixture
def scheduler(model_folder: Path, tmp_path: Path) -> Iterator[Scheduler]:
    """Returns the scheduler of an engine with weights, as after the engine's start."""
    (tmp_path / "token").write_text("token")
    threads = torch.get_num_threads()
    arguments = argparse.Namespace(
        model_path=model_folder,
        family=None,
        token_file=tmp_path / "token",
        max_running_samples=4,
        max_total_tokens=256,
        prefix_cache_tokens=0,
        context_length=64,
        threads=1,
        dtype="float32",
        load_weights=True,
        weight_version=0,
        media_folder=None,
    )
    _, found = build_app(arguments, token="token")
    yield found
    torch.set_num_threads(threads)


def hold(scheduler: Scheduler) -> threading.Event:
    """Blocks the decode thread until the event is set."""
    gate = threading.Event()
    scheduler.post(lambda: gate.wait(60.0))
    return gate


def test_many_who_ask_cost_one_look(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[Any] = []
    score = scheduler.score

    def counted(items: Any) -> Future[Any]:
        checks.append(items)
        return score(items)

    monkeypatch.setattr(scheduler, "score", counted)
    monkeypatch.setattr(health_generate, "REUSE_S", 3600.0)

    async def scene() -> None:
        health = HealthGenerate(scheduler)
        gate = hold(scheduler)
        asking = [asyncio.create_task(health(b"")) for _ in range(50)]
        await asyncio.sleep(0.05)
        asking[0].cancel()  # a client that disconnects does not affect other clients
        gate.set()
        assert await asyncio.gather(*asking[1:]) == [{"status": "ok"}] * 49
        assert await health(b"") == {"status": "ok"} and len(checks) == 1
        monkeypatch.setattr(health_generate, "REUSE_S", 0.0)
        await health(b"")
        assert len(checks) == 2

    asyncio.run(scene())


def test_a_decode_thread_that_hangs_is_told_and_survives_it(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller times out first. In an old version, a response without a caller ended the thread and the process."""
    monkeypatch.setattr(health_generate, "DEADLINE_S", 0.1)
    monkeypatch.setattr(health_generate, "REUSE_S", 0.0)

    async def scene() -> None:
        health = HealthGenerate(scheduler)
        gate = hold(scheduler)
        with pytest.raises(HttpError, match="has not answered within"):
            await health(b"")
        gate.set()
        monkeypatch.setattr(health_generate, "DEADLINE_S", 60.0)
        assert await health(b"") == {"status": "ok"}

    asyncio.run(scene())
    assert scheduler.is_alive()


def test_what_stands_still_says_so_at_once(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_generate, "REUSE_S", 0.0)

    async def scene() -> None:
        health = HealthGenerate(scheduler)
        for stop, go_on in (
            (lambda: scheduler.pause("in_place"), scheduler.resume),
            (scheduler.release_memory, scheduler.resume_memory),
        ):
            await asyncio.wrap_future(scheduler.post(stop))
            with pytest.raises(HttpError, match="paused, or its memory is released"):
                await health(b"")
            await asyncio.wrap_future(scheduler.post(go_on))
            assert await health(b"") == {"status": "ok"}

    asyncio.run(scene())
