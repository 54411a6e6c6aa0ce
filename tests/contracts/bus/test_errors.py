"""Tests that errors arrive with the right type and name the cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
import pytest

from relax_core.contracts.bus import BusClosed, BusTimeout, LeaseLost
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row, uids_of

MakeBus = Callable[..., BlockingBus]
T = 60.0


def test_errors_are_exactly_of_their_type(make_bus: MakeBus) -> None:
    bus = make_bus()
    failures: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: bus.admit(0, timeout_s=T)),
        (BusTimeout, lambda: bus.lease(for_worker(), timeout_s=0.01)),
        (LeaseLost, lambda: bus.ack([99], step=0, dropped={}, timeout_s=T)),
    ]
    for kind, call in failures:
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind


def test_a_deadline_is_kept_and_names_the_blocker(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=4)
    admissions = bus.admit(4, timeout_s=T)
    bus.put([make_row(admission) for admission in admissions[2:]], timeout_s=T)
    wanted = msgspec.structs.replace(for_actor(0, groups=4), columns=("a", "advantages"))
    start = monotonic()
    with pytest.raises(BusTimeout) as caught:
        bus.lease(wanted, timeout_s=0.3)
    assert monotonic() - start >= 0.3
    assert re.sub(r"\d+(\.\d)? s", "… s", str(caught.value)) == (  # the printed time may be longer on a paused machine
        "actor waits for 4 groups at step 0 for … s: "
        "2 in flight in rollout (oldest g00000000, admitted … s ago), 2 lack column advantages (first g00000002)"
    )


def test_what_a_lease_does_not_hold_is_not_read(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(first), make_row(second)], timeout_s=T)
    lease = bus.lease(for_worker(), timeout_s=T)
    (uid,) = [row.group_uid for row in lease.rows]
    with pytest.raises(ValueError, match=f"lease {lease.lease_id} does not hold {second.group_uid}"):
        bus.read(lease.lease_id, [uid, second.group_uid], columns=("a",), timeout_s=T)
    with pytest.raises(ValueError, match=f"group {uid} has no column 'tokens': ask for one of a"):
        bus.read(lease.lease_id, [uid], columns=("a", "tokens"), timeout_s=T)
    bus.revoke("advantages", timeout_s=T)
    with pytest.raises(LeaseLost, match=f"lease {lease.lease_id} is not held"):
        bus.read(lease.lease_id, [uid], columns=("a",), timeout_s=T)
    bus.close(reason="the run has ended", timeout_s=T)
    with pytest.raises(BusClosed, match="the run has ended"):
        bus.read(lease.lease_id, [uid], columns=("a",), timeout_s=T)


def test_a_leased_group_that_has_ended_is_not_read(make_bus: MakeBus) -> None:
    """A worker may still have a lease on a group that the trainer leases and trains."""
    bus = make_bus(groups_per_step=1, max_staleness=0)
    (old,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(old)], timeout_s=T)
    worker = bus.lease(for_worker(), timeout_s=T)
    trainer = bus.lease(for_actor(0, groups=1), timeout_s=T)
    bus.ack([trainer.lease_id], step=0, dropped={}, timeout_s=T)
    with pytest.raises(LeaseLost, match=f"group {old.group_uid} of lease {worker.lease_id} has ended"):
        bus.read(worker.lease_id, [old.group_uid], columns=("a",), timeout_s=T)


def test_a_wrong_step_is_refused(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.put([make_row(admission) for admission in bus.admit(2, timeout_s=T)], timeout_s=T)
    lease = bus.lease(for_actor(0), timeout_s=T)
    with pytest.raises(ValueError, match="ack of step 1, but version 0 is in force"):
        bus.ack([lease.lease_id], step=1, dropped={}, timeout_s=T)
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    with pytest.raises(ValueError, match="ack of step 0, but version 1 is in force"):
        bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    with pytest.raises(ValueError, match="groups of step 0, version 1 is in force"):
        bus.lease(for_actor(0), timeout_s=T)
    with pytest.raises(BusTimeout, match="version 1 is in force, actor owes the ack of step 1"):
        bus.lease(for_actor(2), timeout_s=0.05)


def test_a_refused_ack_changes_nothing(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.put([make_row(admission) for admission in bus.admit(2, timeout_s=T)], timeout_s=T)
    lease = bus.lease(for_actor(0), timeout_s=T)
    before = bus.progress(timeout_s=T)
    with pytest.raises(ValueError, match=r"not in its leases: g00000009\.0"):
        bus.ack([lease.lease_id], step=0, dropped={"g00000009.0": "masked"}, timeout_s=T)
    with pytest.raises(LeaseLost):
        bus.ack([lease.lease_id, 99], step=0, dropped={}, timeout_s=T)
    assert bus.progress(timeout_s=T) == before


def test_rows_that_do_not_fit_their_admission(make_bus: MakeBus) -> None:
    bus = make_bus(max_row_bytes=5000)
    (admission,) = bus.admit(1, timeout_s=T)
    row = make_row(admission)
    never_admitted = msgspec.structs.replace(admission, index=7, group_uid="g00000007")
    wrong: list[tuple[Any, str]] = [
        (make_row(admission, columns={"a": bytes(6000)}), "group g00000000 has 6000 bytes, the largest group has 5000"),
        (msgspec.structs.replace(row, uids=uids_of(admission)[:1]), r"wrong: g00000000\.1"),
        (msgspec.structs.replace(row, uids=uids_of(admission)[:1] * 2), "each of its 2 samples once"),
        (msgspec.structs.replace(row, versions=[0]), "2 samples and 1 versions"),
        (msgspec.structs.replace(row, versions=[0, 2]), "names weights 2, but version 0 is in force"),
        (make_row(never_admitted), "'g00000007' .index 7. was never admitted"),
        (msgspec.structs.replace(row, index=1), "never admitted"),
    ]
    for bad, text in wrong:
        with pytest.raises(ValueError, match=text):
            bus.put([bad], timeout_s=T)
    assert bus.progress(timeout_s=T).in_flight == 1
    bus.put([row], timeout_s=T)


def test_a_write_must_cover_its_rows(make_bus: MakeBus) -> None:
    bus = make_bus(max_row_bytes=5000)
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(first), make_row(second)], timeout_s=T)
    lease = bus.lease(for_worker(groups=2), timeout_s=T)
    with pytest.raises(ValueError, match="wrong: g00000001"):
        bus.write(lease.lease_id, {first.group_uid: {"b": b"x"}}, timeout_s=T)
    with pytest.raises(ValueError, match=r"group g\d+ has 600\d bytes"):
        bus.write(lease.lease_id, {a.group_uid: {"b": bytes(6000 - 9)} for a in (first, second)}, timeout_s=T)
    with pytest.raises(ValueError, match="belongs to task advantages"):
        bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    bus.write(lease.lease_id, {a.group_uid: {"b": b"x"} for a in (first, second)}, timeout_s=T)


@pytest.mark.parametrize("changes", [{"min_groups": 3}, {"min_groups": 0}, {"lease_s": 0.0}, {"step": None}])
def test_requests_that_can_never_be_met(make_bus: MakeBus, changes: dict[str, Any]) -> None:
    bus = make_bus()
    with pytest.raises(ValueError, match="bus: "):
        bus.lease(msgspec.structs.replace(for_actor(0), **changes), timeout_s=T)
    with pytest.raises(ValueError, match="groups_per_step=2"):
        bus.lease(for_actor(0, groups=3), timeout_s=T)


def test_a_closed_bus_says_so_and_lets_its_ledger_be_read(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.admit(1, timeout_s=T)
    bus.close(reason="the trainer failed", timeout_s=T)
    bus.close(reason="again", timeout_s=T)
    for call in (
        lambda: bus.admit(1, timeout_s=T),
        lambda: bus.lease(for_worker(), timeout_s=T),
        lambda: bus.put([], timeout_s=T),
        lambda: bus.ack([], step=0, dropped={}, timeout_s=T),
    ):
        with pytest.raises(BusClosed, match="the trainer failed"):
            call()
    assert bus.progress(timeout_s=T).ledger.open == 2
    assert bus.snapshot(timeout_s=T)
