"""Tests groups that a new weight version aborts or cancels, with the bus's state machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from relax_core.contracts.bus import Admission, BusClosed, VersionChange
from relax_core.contracts.tree import group_uid
from relax_core.rollout.partial_rollout import WeightUpdateHandler


class Versions:
    """A bus that reports the version changes in order and then closes."""

    def __init__(self, *changes: VersionChange) -> None:
        self._changes = list(changes)
        self.since: list[int] = []

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        self.since.append(since_version)
        if not self._changes:
            raise BusClosed("all train steps are done")
        return self._changes.pop(0)


class Asked:
    """An engine pool that records calls."""

    def __init__(self) -> None:
        self.aborted: list[tuple[list[str], int]] = []
        self.cancelled: list[list[str]] = []

    async def abort(self, rids: Iterable[str], *, min_version: int) -> None:
        self.aborted.append((list(rids), min_version))

    async def cancel(self, rids: Iterable[str]) -> None:
        self.cancelled.append(list(rids))


def admission(index: int, min_version: int) -> Admission:
    return Admission(index=index, group_uid=group_uid(index), min_version=min_version)


def turn(*changes: VersionChange, max_aborts: int, groups: dict[int, int], done: tuple[int, ...] = ()) -> Asked:
    """Runs the handler and returns its calls. ``changes``: the weight versions, beginning with the version at the
    start. ``groups``: index → min_version of the running groups. ``done``: indices of complete groups.
    """
    asked = Asked()
    versions = Versions(*changes)
    weight_update_handler = WeightUpdateHandler(versions, asked, max_aborts=max_aborts, call_timeout_s=1.0)
    for index, min_version in groups.items():
        weight_update_handler.admit([admission(index, min_version)])
        assert weight_update_handler.begin(index)
        weight_update_handler.add_request(index, f"r{index}")
    for index in done:
        weight_update_handler.end(index)
    with pytest.raises(BusClosed):
        asyncio.run(weight_update_handler.run())
    assert versions.since == [-1, *(change.version for change in changes)]
    assert weight_update_handler.aborts == sum(len(rids) for rids, _ in asked.aborted)
    return asked


def change(version: int, *retired: str) -> VersionChange:
    return VersionChange(version=version, retired=list(retired))


def test_what_began_with_older_weights_is_aborted_once_a_version() -> None:
    asked = turn(change(0), change(3), change(4), max_aborts=9, groups={1: 2, 2: 3, 3: 4, 4: 1}, done=(4,))
    assert asked.aborted == [(["r1"], 3), (["r1", "r2"], 4)]
    assert asked.cancelled == []


def test_a_group_that_was_aborted_often_enough_is_left_to_finish() -> None:
    asked = turn(*map(change, range(5)), max_aborts=2, groups={1: 0, 2: 2})
    assert asked.aborted == [(["r1"], 1), (["r1"], 2), (["r2"], 3), (["r2"], 4)]


def test_what_the_bus_has_ended_is_given_up_and_not_aborted() -> None:
    asked = turn(change(0), change(1, "g00000001", "g00000009"), change(2), max_aborts=9, groups={1: 0, 2: 0})
    assert asked.cancelled == [["r1"]]
    assert asked.aborted == [(["r2"], 1), (["r2"], 2)]


def test_a_deadline_without_a_change_changes_nothing() -> None:
    asked = turn(change(0), change(1), change(1), max_aborts=9, groups={1: 0})
    assert asked.aborted == [(["r1"], 1)]


def test_without_aborts_only_what_is_over_ends() -> None:
    asked = turn(change(4), change(5, "g00000001"), max_aborts=0, groups={1: 0, 2: 0})
    assert (asked.cancelled, asked.aborted) == ([["r1"]], [])


def test_what_is_in_force_at_the_start_aborts_nothing() -> None:
    """A reclaimed group has an older min_version, but it started with the current weights."""
    asked = turn(change(5, "g00000002"), change(6), max_aborts=1, groups={1: 3, 2: 3})
    assert asked.cancelled == [["r2"]]
    assert asked.aborted == [(["r1"], 6)]


def test_what_is_over_before_it_began_does_not_begin() -> None:
    asked = Asked()
    versions = Versions(change(0), change(1, "g00000001"))
    weight_update_handler = WeightUpdateHandler(versions, asked, max_aborts=9, call_timeout_s=1.0)
    weight_update_handler.admit([admission(1, 0), admission(2, 0)])
    with pytest.raises(BusClosed):
        asyncio.run(weight_update_handler.run())
    assert (asked.cancelled, asked.aborted, weight_update_handler.aborts) == ([], [], 0), (
        "the engines have no request of these groups"
    )
    assert not weight_update_handler.begin(1)
    assert weight_update_handler.begin(2)


def test_of_a_group_of_episodes_the_turns_under_way_are_aborted_and_its_end_ends_its_envs() -> None:
    asked, ended = Asked(), list[int]()
    weight_update_handler = WeightUpdateHandler(
        Versions(change(0), change(1), change(2, "g00000001"), change(3)), asked, max_aborts=9, call_timeout_s=1.0
    )
    for index in (1, 2, 3):
        weight_update_handler.admit([admission(index, 0)])
        assert weight_update_handler.begin(index, lambda index=index: ended.append(index))  # type: ignore[misc]
        weight_update_handler.add_request(index, f"r{index}.0.0")
        weight_update_handler.add_request(index, f"r{index}.1.0")
    weight_update_handler.remove_request(2, "r2.0.0")  # the episode's env is in a step now
    weight_update_handler.remove_request(3, "r3.0.0")
    weight_update_handler.remove_request(3, "r3.1.0")
    with pytest.raises(BusClosed):
        asyncio.run(weight_update_handler.run())
    assert asked.aborted == [(["r1.0.0", "r1.1.0", "r2.1.0"], 1), (["r2.1.0"], 2), (["r2.1.0"], 3)]
    assert (asked.cancelled, ended) == ([["r1.0.0", "r1.1.0"]], [1])
    weight_update_handler.remove_request(1, "r1.0.0")  # its response has already arrived
    assert not weight_update_handler.begin(1, lambda: None)
