"""Tests many concurrent callers in threads: each caller gets an answer, and no caller hangs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from relax_core.contracts.bus import BusClosed, BusTimeout, LeaseLost, LeaseRequest
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row

MakeBus = Callable[..., BlockingBus]
T = 60.0

STEPS, GROUPS = 12, 4


def _produce(bus: BlockingBus) -> None:
    try:
        while True:
            for admission in bus.admit(3, timeout_s=T):
                while bus.progress(timeout_s=T).version < admission.min_version:
                    bus.wait_progress(admission.min_version - 1, timeout_s=T)  # type: ignore[attr-defined]
                bus.put([make_row(admission)], timeout_s=T)
    except BusClosed:
        return


def _work(bus: BlockingBus, seen: list[str]) -> None:
    request = LeaseRequest(task="advantages", columns=("a",), max_groups=3)
    try:
        lease = bus.lease(request, timeout_s=T)
        while True:
            seen += [row.group_uid for row in lease.rows]
            columns = {row.group_uid: {"b": row.columns["a"][::-1]} for row in lease.rows}
            following = bus.write(lease.lease_id, columns, then=request, timeout_s=T)
            assert following is not None
            lease = following
    except BusClosed:
        return


def _train(bus: BlockingBus, max_staleness: int) -> list[str]:
    trained = []
    for step in range(STEPS):
        request = LeaseRequest(task="actor", columns=("a", "b"), max_groups=GROUPS, min_groups=GROUPS, step=step)
        lease = bus.lease(request, timeout_s=T)
        for row in lease.rows:
            assert bytes(row.columns["b"]) == row.group_uid.encode()[::-1]
            assert min(row.versions) >= step - max_staleness
            trained += row.uids
        bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
    return trained


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_every_sample_is_trained_exactly_once(make_bus: MakeBus, max_staleness: int) -> None:
    bus = make_bus(groups_per_step=GROUPS, max_staleness=max_staleness, total_steps=STEPS)
    seen: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        calls: list[Future[None]] = [pool.submit(_produce, bus) for _ in range(4)]
        calls += [pool.submit(_work, bus, seen) for _ in range(3)]
        trained = pool.submit(_train, bus, max_staleness).result(timeout=5 * T)
        for future in calls:
            future.result(timeout=T)
    assert Counter(trained) == Counter(f"g{index:08d}.{k}" for index in range(STEPS * GROUPS) for k in range(2))
    assert len(seen) == len(set(seen)) == STEPS * GROUPS
    counts = bus.progress(timeout_s=T).ledger
    assert (counts.issued, counts.trained, counts.open, counts.lost, counts.trained_twice) == (96, 96, 0, 0, 0)


def _await_waits(bus: BlockingBus, count: int) -> None:
    """Blocks until ``count`` calls wait in the bus."""
    deadline = time.monotonic() + T
    while len(waits := bus.waits(timeout_s=T)) < count:
        assert time.monotonic() < deadline, waits
        time.sleep(0.01)


def test_close_wakes_all_waiting_callers(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    bus.admit(10, timeout_s=T)
    with ThreadPoolExecutor(6) as pool:
        waiting: list[Future[Any]] = [pool.submit(bus.admit, 1, timeout_s=T) for _ in range(2)]
        waiting += [pool.submit(bus.lease, for_actor(0, groups=1), timeout_s=T) for _ in range(2)]
        waiting += [pool.submit(bus.lease, for_worker(), timeout_s=T) for _ in range(2)]
        _await_waits(bus, 6)
        assert not any(future.done() for future in waiting), "there is no result yet"
        bus.close(reason="stopped by the user", timeout_s=T)
        for future in waiting:
            with pytest.raises(BusClosed, match="stopped by the user"):
                future.result(timeout=T)


def test_a_put_wakes_only_callers_that_can_continue(make_bus: MakeBus) -> None:
    bus = make_bus()
    first, second = bus.admit(2, timeout_s=T)
    with ThreadPoolExecutor(2) as pool:
        for_two = pool.submit(bus.lease, for_actor(0, groups=2), timeout_s=T)
        for_one = pool.submit(bus.lease, for_worker(), timeout_s=T)
        _await_waits(bus, 2)
        bus.put([make_row(first)], timeout_s=T)
        for_one.result(timeout=T)
        assert [wait.task for wait in bus.waits(timeout_s=T)] == ["actor"]
        bus.put([make_row(second)], timeout_s=T)
        for_two.result(timeout=T)


def test_revoke_ends_the_waits_of_a_lost_worker(make_bus: MakeBus) -> None:
    bus = make_bus()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bus.lease, for_worker(), timeout_s=T)
        _await_waits(bus, 1)
        bus.revoke("advantages", timeout_s=T)
        with pytest.raises(LeaseLost, match="leases of task advantages were revoked"):
            waiting.result(timeout=T)


def test_reclaim_ends_the_wait_that_a_lost_rollout_left(make_bus: MakeBus) -> None:
    """The admit call of a killed process still waits in the bus. It must not take the successor's credits."""
    bus = make_bus()
    while len(bus.admit(100, timeout_s=T)) == 100:
        pass
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(bus.admit, 1, timeout_s=T)
        _await_waits(bus, 1)
        assert bus.reclaim(timeout_s=T)
        with pytest.raises(LeaseLost, match="of rollout-0 were reclaimed"):
            waiting.result(timeout=T)


def test_a_worker_that_is_back_gets_its_own_admissions_and_leaves_the_others_theirs(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=2)
    kept, put = bus.admit(2, worker=0, timeout_s=T)
    lost = bus.admit(100, worker=1, timeout_s=T)
    bus.put([make_row(put)], timeout_s=T)
    with ThreadPoolExecutor(2) as pool:
        second_worker = pool.submit(bus.admit, 1, worker=0, timeout_s=T)
        _await_waits(bus, 1)
        predecessors = pool.submit(bus.admit, 1, worker=1, timeout_s=T)
        _await_waits(bus, 2)
        assert [wait.worker for wait in bus.waits(timeout_s=T)] == [0, 1]
        again = bus.reclaim(worker=1, timeout_s=T)
        assert [(admission.index, admission.attempt) for admission in again] == [
            (admission.index, 1) for admission in lost
        ]
        with pytest.raises(LeaseLost, match="of rollout-1 were reclaimed"):
            predecessors.result(timeout=T)
        assert [wait.worker for wait in bus.waits(timeout_s=T)] == [0], "the other worker still waits"
        bus.drop(again[0].group_uid, reason="bad_row", timeout_s=T)
        assert [admission.attempt for admission in second_worker.result(timeout=T)] == [0], (
            "the waiting worker gets the credit"
        )
    assert [admission.index for admission in bus.reclaim(worker=0, timeout_s=T)] == [kept.index, len(lost) + 2]


def test_a_worker_that_comes_first_leaves_the_others_their_part(make_bus: MakeBus) -> None:
    """With 3 steps of 2 groups, each of two workers may have 3 groups in flight, without finished groups."""
    bus = make_bus(groups_per_step=2, max_staleness=1, rollout_workers=2)
    first = bus.admit(100, worker=0, timeout_s=T)
    assert len(first) == 3
    with pytest.raises(BusTimeout, match="rollout-0 has its part of the groups in flight"):
        bus.admit(1, worker=0, timeout_s=0.05)
    assert len(bus.admit(1, worker=1, timeout_s=T)) == 1
    with ThreadPoolExecutor(1) as pool:
        more = pool.submit(bus.admit, 100, worker=0, timeout_s=T)
        _await_waits(bus, 1)
        assert [wait.owed_by for wait in bus.waits(timeout_s=T)] == [[]]
        bus.put([make_row(first[0])], timeout_s=T)
        assert len(more.result(timeout=T)) == 1
    assert len(bus.admit(100, worker=1, timeout_s=T)) == 1, "all groups that admission allows"


def test_workers_that_wait_get_credit_in_the_order_in_which_they_asked(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=2, max_staleness=0)
    bus.put(
        [make_row(admission) for admission in bus.admit(100, timeout_s=T) if admission.min_version == 0], timeout_s=T
    )
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(bus.admit, 1, worker=1, timeout_s=T)
        _await_waits(bus, 1)
        second = pool.submit(bus.admit, 1, worker=0, timeout_s=T)
        _await_waits(bus, 2)
        lease = bus.lease(for_actor(0), timeout_s=T)
        bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
        (earlier,), (later,) = first.result(timeout=T), second.result(timeout=T)
    assert earlier.index < later.index
