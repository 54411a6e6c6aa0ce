"""Tests snapshots: a restored bus issues each open group again once, before new groups. Trained groups stay trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, make_row, uids_of

MakeBus = Callable[..., BlockingBus]
T = 60.0


def _train_step(bus: BlockingBus, step: int) -> list[str]:
    """Trains one complete step and returns its samples."""
    version = bus.progress(timeout_s=T).version
    assert version == step
    lease = bus.lease(for_actor(step), timeout_s=T)
    bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
    return [uid for row in lease.rows for uid in row.uids]


def test_open_groups_come_first_and_each_once(make_bus: MakeBus) -> None:
    bus = make_bus()
    admissions = bus.admit(6, timeout_s=T)
    half_dropped = make_row(admissions[3], dropped={uids_of(admissions[3])[0]: "reward failed"})
    bus.put([*(make_row(admission) for admission in admissions[:3]), half_dropped], timeout_s=T)
    trained = _train_step(bus, 0)
    bus.lease(for_actor(1), timeout_s=T)  # this lease exists when the snapshot is taken
    snapshot = bus.snapshot(timeout_s=T)
    at_cut = bus.progress(timeout_s=T)

    resumed = make_bus()
    resumed.restore(snapshot, timeout_s=T)
    progress = resumed.progress(timeout_s=T)
    assert progress.version == 1
    assert progress.ledger == at_cut.ledger
    assert progress.staleness_histogram == at_cut.staleness_histogram
    assert (progress.in_flight, progress.waiting, progress.leased) == (0, 0, 0)

    again = resumed.admit(100, timeout_s=T)
    assert [(a.index, a.attempt) for a in again] == [(2, 1), (3, 1), (4, 1), (5, 1), (6, 0), (7, 0)]
    resumed.put([make_row(admission, version=1) for admission in again[:4]], timeout_s=T)
    trained += _train_step(resumed, 1) + _train_step(resumed, 2)
    assert len(trained) == len(set(trained)) == 12
    counts = resumed.progress(timeout_s=T).ledger
    assert (counts.trained, counts.open, counts.lost, counts.trained_twice, counts.dropped) == (12, 4, 0, 0, {})


def test_open_groups_go_to_the_worker_that_asks_first(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.admit(2, worker=0, timeout_s=T)
    resumed = make_bus()
    resumed.restore(bus.snapshot(timeout_s=T), timeout_s=T)
    assert resumed.reclaim(worker=0, timeout_s=T) == []
    assert [(a.index, a.attempt) for a in resumed.admit(2, worker=3, timeout_s=T)] == [(0, 1), (1, 1)]
    assert resumed.reclaim(worker=0, timeout_s=T) == []
    assert [(a.index, a.attempt) for a in resumed.reclaim(worker=3, timeout_s=T)] == [(0, 2), (1, 2)]


def test_a_second_restore_counts_another_attempt(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.admit(2, timeout_s=T)
    first = make_bus()
    first.restore(bus.snapshot(timeout_s=T), timeout_s=T)
    assert [(a.index, a.attempt) for a in first.admit(1, timeout_s=T)] == [(0, 1)]
    second = make_bus()
    second.restore(first.snapshot(timeout_s=T), timeout_s=T)
    assert [(a.index, a.attempt) for a in second.admit(3, timeout_s=T)] == [(0, 2), (1, 1), (2, 0)]


def test_a_running_bus_can_go_back(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.put([make_row(admission) for admission in bus.admit(4, timeout_s=T)], timeout_s=T)
    snapshot = bus.snapshot(timeout_s=T)
    _train_step(bus, 0)
    bus.restore(snapshot, timeout_s=T)
    again = bus.admit(4, timeout_s=T)
    bus.put([make_row(admission) for admission in again], timeout_s=T)
    _train_step(bus, 0)
    counts = bus.progress(timeout_s=T).ledger
    assert (counts.issued, counts.trained, counts.open, counts.lost, counts.trained_twice) == (8, 4, 4, 0, 0)


def test_another_group_size_is_refused(make_bus: MakeBus) -> None:
    snapshot = make_bus().snapshot(timeout_s=T)
    with pytest.raises(ValueError, match="group_size=2, this run group_size=4"):
        make_bus(group_size=4).restore(snapshot, timeout_s=T)
