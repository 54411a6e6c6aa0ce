"""Tests over-sampling: the trained groups, the ends of the other groups, and that every step is full."""

from __future__ import annotations

import msgspec
import pytest

from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.bus.staleness import plan_admissions
from relax_core.contracts.bus import Admission
from relax_core.contracts.columns import EPISODES
from relax_core.contracts.tree import Episode, Turn
from tests.bus.make_rows import for_actor, make_core, make_row, make_settings


def train(core: ReplayBuffer) -> list[int]:
    """Trains one step with the ready groups and returns their indices."""
    lease = core.lease(for_actor(core.version))
    assert lease is not None
    core.ack([lease.lease_id], step=core.version, dropped={})
    return [row.index for row in lease.rows]


def spans(versions: list[int]) -> dict[str, bytes]:
    """Returns the columns of a group of two samples with tokens of these versions, in this order."""
    turn = Turn(1, 1 + len(versions), "engine-0", [(version, 1) for version in versions], "stop")
    episodes = [Episode(f"g.{place}", [len(versions)], 0.0, {}, [turn], "stop") for place in range(2)]
    return {"a": b"", EPISODES: msgspec.msgpack.encode(episodes)}


@pytest.mark.parametrize(("surplus", "expected"), [("drop", [0, 0, 0, 1, 1, 1]), ("keep", [0, 0, 0, 1, 1])])
def test_spares_are_let_in_for_each_step_or_once(surplus: str, expected: list[int]) -> None:
    core = make_core(max_staleness=0, spare_groups=1, surplus=surplus, on_stale="mask")
    assert [admission.min_version for admission in core.admit(100)] == expected
    assert core.credits() == 0


def test_the_fastest_groups_train_and_the_rest_ends_with_its_reason() -> None:
    core = make_core(max_staleness=0, spare_groups=2)
    admitted = core.admit(100)
    now, early = admitted[:4], admitted[4:]
    assert [admission.min_version for admission in admitted] == [0] * 4 + [1] * 4
    core.put([make_row(now[3]), make_row(now[1])])  # the step does not wait for the group that was issued first
    core.put([make_row(now[2])])
    assert train(core) == [1, 2]
    change = core.version_change(-1)
    assert change is not None and (change.version, change.retired) == (1, [now[0].group_uid])
    counts = core.progress().ledger
    assert counts.dropped == {"over_sampled": 4} and counts.lost == 0  # one group in flight, one complete group
    core.put([make_row(now[0])])  # a late group that was already ended
    assert core.progress().ledger == counts
    assert [admission.min_version for admission in core.admit(100)] == [2] * 4, "the next step's are in already"
    core.put([make_row(admission) for admission in early])
    assert train(core) == [4, 5]


def test_what_is_kept_goes_on_and_trains_masked() -> None:
    """A group in flight is not dropped. A complete group with only old tokens is dropped."""
    core = make_core(max_staleness=0, spare_groups=2, surplus="keep", on_stale="mask")
    slow, finished, first, second, *early = core.admit(100)
    core.put([make_row(admission, columns=spans([0])) for admission in (first, second, finished)])
    assert train(core) == [1, 2]
    change = core.version_change(-1)
    assert change is not None and change.retired == []
    assert core.progress().ledger.dropped == {"over_sampled": 2}
    core.put([make_row(slow, version=0, columns=spans([0, 1])), make_row(early[0], columns=spans([1]))])
    assert train(core) == [0, 4]


def test_a_group_that_was_dropped_is_back_filled_for_the_same_step() -> None:
    core = make_core(max_staleness=0, spare_groups=1)
    admitted = core.admit(100)
    for admission in admitted[:2]:
        core.drop(admission.group_uid, reason="reward_failed")
    again = core.admit(100)
    assert [admission.min_version for admission in again] == [0, 0]
    core.put([make_row(admission) for admission in again])
    assert train(core) == [admission.index for admission in again]


@pytest.mark.parametrize("surplus", ["drop", "keep"])
def test_the_last_step_leaves_nothing_open(surplus: str) -> None:
    core = make_core(max_staleness=1, spare_groups=3, surplus=surplus, total_steps=3)
    issued: list[Admission] = []
    while not core.finished():
        issued += core.admit(100)
        issued = [admission for admission in issued if core.accepts(admission.group_uid)]
        startable = [admission for admission in issued if admission.min_version <= core.version]
        core.put([make_row(admission, version=core.version) for admission in startable[:2]])
        train(core)
    counts = core.progress().ledger
    assert (counts.open, counts.lost, counts.trained) == (0, 0, 3 * 2 * 2)
    assert set(counts.dropped) <= {"over_sampled", "stale"}


def test_without_spares_the_plan_is_as_ever() -> None:
    plans = [
        plan_admissions([0, 1], make_settings(total_steps=9, **options), version=1, slots_left=2, max_groups=99)
        for options in ({}, {"spare_groups": 0, "surplus": "keep"}, {"spare_groups": 0, "surplus": "drop"})
    ]
    assert plans[0] == plans[1] == plans[2] == [1, 1, 2, 2]
