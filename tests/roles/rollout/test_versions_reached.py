"""Tests waiting for weight versions: there is one bus call at a time, and waits end with the run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_core.contracts.bus import BusClosed
from relax_core.roles.rollout_worker import VersionsReached


class Versions:
    """A bus that returns these versions, one per call, and then repeats the last version."""

    def __init__(self, *versions: int) -> None:
        self.left = list(versions)
        self.asked: list[int] = []

    async def wait_progress(self, since_version: int, *, timeout_s: float) -> Any:
        self.asked.append(since_version)
        return SimpleNamespace(version=self.left.pop(0) if len(self.left) > 1 else self.left[0])


def reached_of(bus: Versions, *, stopping: bool = False) -> VersionsReached:
    return VersionsReached(cast(Any, bus), version=0, call_timeout_s=1.0, stopping=lambda: stopping)


def test_waits_share_the_calls_of_the_bus() -> None:
    bus = Versions(1, 2, 3)
    reached = reached_of(bus)

    async def scene() -> list[int]:
        order: list[int] = []

        async def wait(version: int) -> None:
            await reached.wait(version)
            order.append(version)

        async with asyncio.timeout(30):
            await asyncio.gather(*(wait(version) for version in (3, 1, 2, 0)))
        return order

    assert sorted(asyncio.run(scene())) == [0, 1, 2, 3]
    assert bus.asked == [0, 1, 2], "one call for each new version, for all waits"


def test_a_wait_ends_with_the_run() -> None:
    with pytest.raises(BusClosed, match="the run ended before this version"):
        asyncio.run(reached_of(Versions(0), stopping=True).wait(1))
