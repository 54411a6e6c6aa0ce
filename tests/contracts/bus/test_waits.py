"""Tests the report of waits in the bus: which task waits, what it waits for, and which task must act."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from relax_core.contracts.bus import BusWait
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row

MakeBus = Callable[..., BlockingBus]
T = 60.0


def waits_of(bus: BlockingBus, count: int) -> dict[str, BusWait]:
    deadline = time.monotonic() + T
    while len(waits := bus.waits(timeout_s=T)) != count:
        assert time.monotonic() < deadline, waits
    assert [wait.since_s for wait in waits] == sorted((wait.since_s for wait in waits), reverse=True)
    return {wait.task: wait for wait in waits}


def test_each_wait_names_the_missing_data_and_its_producers(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=2, max_staleness=0)
    assert bus.waits(timeout_s=T) == []
    first, second, *early = bus.admit(100, timeout_s=T)
    bus.put([make_row(first)], timeout_s=T)
    with ThreadPoolExecutor(3) as threads:
        wanted = msgspec.structs.replace(for_actor(0), columns=("a", "advantages"))
        calls = [
            threads.submit(bus.lease, wanted, timeout_s=T),
            threads.submit(bus.lease, for_worker(("a", "old_logprobs")), timeout_s=T),
            threads.submit(bus.admit, 1, timeout_s=T),
        ]
        waits = waits_of(bus, 3)
        assert waits["actor"].owed_by == ["rollout-0", "advantages"]
        assert f"in flight in rollout (oldest {second.group_uid}" in waits["actor"].text
        assert f"1 lack column advantages (first {first.group_uid})" in waits["actor"].text
        assert waits["advantages"].owed_by == ["rollout-0", "actor_fwd"]
        assert waits["rollout"].owed_by == ["actor"]
        assert all(0.0 <= wait.since_s < T for wait in waits.values())
        bus.put([make_row(second)], timeout_s=T)
        assert waits_of(bus, 3)["actor"].owed_by == ["advantages"]  # groups that wait for later weights owe nothing yet
        bus.close(reason="the end", timeout_s=T)
        assert all(call.exception(timeout=T) is not None for call in calls)
    assert bus.waits(timeout_s=T) == []
    assert early, "groups for the next version were admitted"


def test_a_wait_names_the_workers_whose_groups_it_needs(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=2, max_staleness=0)
    (first,) = bus.admit(1, worker=2, timeout_s=T)
    (second,) = bus.admit(1, worker=1, timeout_s=T)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(bus.lease, for_actor(0), timeout_s=T)
        assert waits_of(bus, 1)["actor"].owed_by == ["rollout-1", "rollout-2"]
        assert f"(oldest {first.group_uid}, rollout-2, admitted " in waits_of(bus, 1)["actor"].text
        bus.put([make_row(first)], timeout_s=T)
        assert waits_of(bus, 1)["actor"].owed_by == ["rollout-1"]
        bus.put([make_row(second)], timeout_s=T)
        call.result(timeout=T)


def test_a_lease_tells_how_long_it_waited_for_rows(make_bus: MakeBus) -> None:
    bus = make_bus()
    late, *rest = bus.admit(2, timeout_s=T)
    bus.put([make_row(admission) for admission in rest], timeout_s=T)
    at_once = bus.lease(for_actor(0, groups=1), timeout_s=T)
    assert at_once.waited_s == 0.0
    with ThreadPoolExecutor(1) as threads:
        began = time.monotonic()
        call = threads.submit(bus.lease, for_actor(0, groups=1), timeout_s=T)
        while waits_of(bus, 1)["actor"].since_s < 0.05:
            assert time.monotonic() < began + T
        bus.put([make_row(late)], timeout_s=T)
        waited = call.result(timeout=T)
        took_s = time.monotonic() - began
    assert 0.05 <= waited.waited_s <= took_s
    with ThreadPoolExecutor(1) as threads:
        leases = [at_once.lease_id, waited.lease_id]
        then = threads.submit(bus.ack, leases, step=0, dropped={}, then=for_actor(1, groups=1), timeout_s=T)
        assert waits_of(bus, 1)["actor"].owed_by == ["rollout"]
        bus.put([make_row(admission) for admission in bus.admit(1, timeout_s=T)], timeout_s=T)
        lease = then.result(timeout=T)
    assert lease is not None and lease.waited_s > 0.0


def test_a_step_that_is_not_due_waits_for_the_trainer(make_bus: MakeBus) -> None:
    bus = make_bus()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(bus.lease, for_actor(1), timeout_s=T)
        assert waits_of(bus, 1)["actor"].owed_by == ["actor"]
        bus.close(reason="the end", timeout_s=T)
        assert call.exception(timeout=T) is not None


def test_the_rollout_gets_new_versions_and_the_groups_that_ended(make_bus: MakeBus) -> None:
    bus = make_bus(max_staleness=0, spare_groups=1)
    slow, *others_admitted = (admission for admission in bus.admit(100, timeout_s=T) if admission.min_version == 0)
    bus.put([make_row(admission) for admission in others_admitted], timeout_s=T)
    assert bus.wait_version(-1, timeout_s=T).version == 0
    idle = bus.wait_version(0, timeout_s=0.05)
    assert (idle.version, idle.retired) == (0, []), "a deadline is no failure"
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(bus.wait_version, 0, timeout_s=T)
        lease = bus.lease(for_actor(0), timeout_s=T)
        bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
        change = call.result(timeout=T)
    assert (change.version, change.retired) == (1, [slow.group_uid])
    assert bus.progress(timeout_s=T).ledger.dropped == {"over_sampled": 2}
    assert bus.wait_version(-1, worker=1, timeout_s=T).retired == [], "it was never this worker's"
    bus.put([make_row(slow)], timeout_s=T)  # this put comes late: the group has ended
    assert bus.progress(timeout_s=T).ledger.dropped == {"over_sampled": 2}


def test_each_worker_gets_its_groups_at_any_later_call(make_bus: MakeBus) -> None:
    """The second worker's groups end in both steps. This worker calls after each step.

    The third worker calls once, after both.
    """
    bus = make_bus(groups_per_step=1, max_staleness=0, spare_groups=2)
    retired: dict[int, list[str]] = {1: [], 2: []}
    for step in (0, 1):
        (trained,) = bus.admit(1, worker=0, timeout_s=T)
        for worker in retired:
            retired[worker] += [admission.group_uid for admission in bus.admit(1, worker=worker, timeout_s=T)]
        bus.put([make_row(trained)], timeout_s=T)
        lease = bus.lease(for_actor(step, groups=1), timeout_s=T)
        bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
        change = bus.wait_version(step, worker=1, timeout_s=T)
        assert (change.version, change.retired) == (step + 1, retired[1][step:])
        assert bus.wait_version(step, worker=0, timeout_s=T).retired == []
    assert bus.wait_version(0, worker=2, timeout_s=T).retired == retired[2]
