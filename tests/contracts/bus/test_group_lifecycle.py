"""Tests a group from its admission to its end, with one caller at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_core.contracts.bus import BusClosed, BusTimeout, LeaseLost
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row, uids_of

MakeBus = Callable[..., BlockingBus]
T = 60.0  # timeout of calls that must succeed, in seconds
SHORT = 0.05  # timeout of calls that must time out


def test_a_group_is_trained_once_and_persisted(make_bus: MakeBus) -> None:
    bus = make_bus()
    first, second = bus.admit(2, timeout_s=T)
    assert (first.index, first.group_uid, first.attempt) == (0, "g00000000", 0)
    bus.put([make_row(first), make_row(second, dropped={uids_of(second)[1]: "reward failed"})], timeout_s=T)
    lease = bus.lease(for_actor(0), timeout_s=T)
    assert [row.group_uid for row in lease.rows] == ["g00000000", "g00000001"]
    assert [bytes(row.columns["a"]) for row in lease.rows] == [b"g00000000", b"g00000001"]
    assert lease.rows[1].uids == uids_of(second)[:1]
    assert bus.progress(timeout_s=T).leased == 2
    bus.ack([lease.lease_id], step=0, dropped={uids_of(first)[0]: "masked"}, timeout_s=T)
    progress = bus.progress(timeout_s=T)
    assert (progress.version, progress.in_flight, progress.waiting, progress.leased) == (1, 0, 0, 0)
    assert progress.staleness_histogram == {0: 2}
    counts = progress.ledger
    assert (counts.issued, counts.trained, counts.open, counts.lost, counts.trained_twice) == (4, 2, 0, 0, 0)
    assert counts.dropped == {"masked": 1, "reward failed": 1}


def test_admissions_are_one_step_early_at_most(make_bus: MakeBus) -> None:
    bus = make_bus(total_steps=3)
    assert [a.min_version for a in bus.admit(100, timeout_s=T)] == [0, 0, 0, 0, 1, 1]
    assert bus.progress(timeout_s=T).credits == 0
    with pytest.raises(BusTimeout, match=r"rollout waits for credit .* 6 in flight"):
        bus.admit(1, timeout_s=SHORT)


def test_a_second_put_of_a_group_is_ignored_even_after_its_end(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission, *_) = bus.admit(1, timeout_s=T)
    for _ in range(2):
        bus.put([make_row(admission)], timeout_s=T)
    assert bus.progress(timeout_s=T).waiting == 1
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    bus.drop(admission.group_uid, reason="late", timeout_s=T)
    progress = bus.progress(timeout_s=T)
    assert progress.waiting == 0
    assert (progress.ledger.trained, progress.ledger.dropped) == (2, {})


def test_a_row_is_seen_when_all_its_columns_are_there(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    with pytest.raises(BusTimeout, match=r"reference waits for 1 group .* 1 lack column b"):
        bus.lease(for_worker(("a", "b"), task="reference"), timeout_s=SHORT)
    lease = bus.lease(for_worker(), timeout_s=T)
    assert list(lease.rows[0].columns) == ["a"]
    bus.write(lease.lease_id, {admission.group_uid: {"b": b"new"}}, timeout_s=T)
    lease = bus.lease(for_worker(("a", "b"), task="reference"), timeout_s=T)
    assert bytes(lease.rows[0].columns["b"]) == b"new"
    with pytest.raises(BusTimeout):  # a task gets each group once
        bus.lease(for_worker(), timeout_s=SHORT)


def test_write_and_ack_carry_the_next_lease(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(first), make_row(second)], timeout_s=T)
    lease = bus.lease(for_worker(), timeout_s=T)
    next_lease = bus.write(lease.lease_id, {first.group_uid: {"b": b"1"}}, then=for_worker(), timeout_s=T)
    assert next_lease is not None and next_lease.rows[0].group_uid == second.group_uid
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    next_lease = bus.ack([lease.lease_id], step=0, dropped={}, then=for_actor(1, groups=1), timeout_s=T)
    assert next_lease is not None and next_lease.rows[0].group_uid == second.group_uid


def test_an_ack_is_persisted_even_when_its_next_lease_times_out(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    with pytest.raises(
        BusTimeout, match=r"the ack of step 0 is recorded; actor waits for 1 group at step 1 .* rollout"
    ):
        bus.ack([lease.lease_id], step=0, dropped={}, then=for_actor(1, groups=1), timeout_s=SHORT)
    assert bus.progress(timeout_s=T).version == 1


def test_a_rank_reads_its_own_rows_of_another_ranks_lease(make_bus: MakeBus) -> None:
    """Rank 0 leases a small column. Every rank reads the large columns of its own groups, and the lease stays valid."""
    bus = make_bus()
    admissions = bus.admit(2, timeout_s=T)
    large = [bytes([number]) * 5000 for number in range(2)]
    bus.put(
        [make_row(a, columns={"a": b"small", "b": b, "c": b"-"}) for a, b in zip(admissions, large, strict=True)],
        timeout_s=T,
    )
    lease = bus.lease(for_actor(0), timeout_s=T)
    first, second = (row.group_uid for row in lease.rows)
    for rows, expected in (((second,), large[1:]), ((second, first), large[::-1]), ((), [])):
        read = bus.read(lease.lease_id, rows, columns=("b", "a"), timeout_s=T)
        assert [row.group_uid for row in read] == list(rows)
        assert [bytes(row.columns["b"]) for row in read] == expected
        assert all(set(row.columns) == {"a", "b"} and row.versions == [0, 0] for row in read)
    assert bus.progress(timeout_s=T).leased == 2
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    with pytest.raises(LeaseLost, match=f"lease {lease.lease_id} is not held"):
        bus.read(lease.lease_id, [first], columns=("b",), timeout_s=T)


def test_a_released_row_comes_again(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    with pytest.raises(BusTimeout, match=r"1 leased by actor for step 0 \(lease 1"):
        bus.lease(for_actor(0, groups=1), timeout_s=SHORT)
    bus.release([lease.lease_id], timeout_s=T)
    bus.release([lease.lease_id], timeout_s=T)
    again = bus.lease(for_actor(0, groups=1), timeout_s=T)
    assert again.rows == lease.rows
    with pytest.raises(LeaseLost):
        bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    bus.ack([again.lease_id], step=0, dropped={}, timeout_s=T)


def test_an_expired_lease_goes_to_a_waiting_caller(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lost = bus.lease(for_worker(lease_s=0.2), timeout_s=T)
    again = bus.lease(for_worker(), timeout_s=T)  # this call waits until the first lease expires
    assert again.rows == lost.rows
    with pytest.raises(LeaseLost):
        bus.write(lost.lease_id, {admission.group_uid: {"b": b"late"}}, timeout_s=T)
    bus.write(again.lease_id, {admission.group_uid: {"b": b"good"}}, timeout_s=T)
    lease = bus.lease(for_worker(("b",), task="reader"), timeout_s=T)
    assert bytes(lease.rows[0].columns["b"]) == b"good"


def test_revoke_gives_back_the_rows_of_a_lost_worker(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lost = bus.lease(for_worker(), timeout_s=T)
    bus.revoke("advantages", timeout_s=T)
    assert bus.lease(for_worker(), timeout_s=T).rows == lost.rows


def test_dropped_and_reclaimed_admissions(make_bus: MakeBus) -> None:
    bus = make_bus()
    first, second, third = bus.admit(3, timeout_s=T)
    bus.put([make_row(second)], timeout_s=T)
    bus.drop(first.group_uid, reason="engine failed", timeout_s=T)
    reclaimed = bus.reclaim(timeout_s=T)
    assert [(a.index, a.attempt, a.min_version) for a in reclaimed] == [(third.index, 1, third.min_version)]
    assert bus.progress(timeout_s=T).ledger.dropped == {"engine failed": 2}


def test_a_row_without_kept_samples_ends_its_group(make_bus: MakeBus) -> None:
    bus = make_bus()
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission, dropped=dict.fromkeys(uids_of(admission), "reward failed"))], timeout_s=T)
    progress = bus.progress(timeout_s=T)
    assert (progress.in_flight, progress.waiting) == (0, 0)
    assert progress.ledger.dropped == {"reward failed": 2}


def test_large_payloads_arrive_whole(make_bus: MakeBus) -> None:
    bus = make_bus()
    admissions = bus.admit(2, timeout_s=T)
    pixels = {admission.group_uid: bytes([admission.index]) * 1_000_000 for admission in admissions}
    bus.put([make_row(a, columns={"a": b"small", "pixels": pixels[a.group_uid]}) for a in admissions], timeout_s=T)
    worker = bus.lease(for_worker(("a",), groups=2), timeout_s=T)
    echo = {uid: {"echo": payload + b"!"} for uid, payload in pixels.items()}
    bus.write(worker.lease_id, echo, timeout_s=T)
    lease = bus.lease(for_worker(("pixels", "a", "echo"), task="reader", groups=2), timeout_s=T)
    assert len(lease.rows) == 2
    for row in lease.rows:
        assert row.columns["pixels"] == pixels[row.group_uid]
        assert row.columns["echo"] == pixels[row.group_uid] + b"!"
        assert bytes(row.columns["a"]) == b"small"


@pytest.mark.parametrize("on_stale", ["drop", "mask"])
def test_rows_outside_the_window(make_bus: MakeBus, on_stale: str) -> None:
    """A group that was generated by version 0 arrives at version 1. No staleness is allowed."""
    bus = make_bus(groups_per_step=1, max_staleness=0, on_stale=on_stale)
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(first)], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    bus.put([make_row(second, version=0)], timeout_s=T)
    if on_stale == "drop":
        assert bus.progress(timeout_s=T).ledger.dropped == {"stale": 2}
        assert bus.admit(1, timeout_s=T)[0].min_version == 1, "its credit is free again"
        return
    lease = bus.lease(for_actor(1, groups=1), timeout_s=T)
    bus.ack([lease.lease_id], step=1, dropped={uids_of(second)[0]: "masked"}, timeout_s=T)
    progress = bus.progress(timeout_s=T)
    assert progress.staleness_histogram == {0: 2, 1: 1}
    assert progress.ledger.dropped == {"masked": 1}


def test_without_staleness_rows_come_in_order_of_issue(make_bus: MakeBus) -> None:
    bus = make_bus(max_staleness=0)
    first, second = bus.admit(2, timeout_s=T)
    bus.put([make_row(second)], timeout_s=T)
    with pytest.raises(BusTimeout, match=r"1 in flight in rollout .oldest g00000000.*, 1 ready"):
        bus.lease(for_actor(0, at_least=1), timeout_s=SHORT)
    bus.put([make_row(first)], timeout_s=T)
    lease = bus.lease(for_actor(0), timeout_s=T)
    assert [row.index for row in lease.rows] == [0, 1]


def test_slots_are_kept_for_groups_that_would_fall_out_of_the_window(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    first, second, third = bus.admit(3, timeout_s=T)
    bus.put([make_row(second)], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)  # the first group may wait one step
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    bus.put([make_row(third)], timeout_s=T)
    with pytest.raises(BusTimeout, match="1 in flight in rollout"):  # the first group cannot wait
        bus.lease(for_actor(1, groups=1), timeout_s=SHORT)
    bus.put([make_row(first)], timeout_s=T)
    assert bus.lease(for_actor(1, groups=1), timeout_s=T).rows[0].group_uid == first.group_uid


def test_a_step_never_gets_more_rows_than_it_has_slots(make_bus: MakeBus) -> None:
    bus = make_bus()
    admissions = bus.admit(4, timeout_s=T)
    bus.put([make_row(admission) for admission in admissions], timeout_s=T)
    assert len(bus.lease(for_actor(0, groups=4, at_least=1), timeout_s=T).rows) == 2
    with pytest.raises(BusTimeout, match="2 leased by actor for step 0"):
        bus.lease(for_actor(0, groups=1), timeout_s=SHORT)


def test_the_end_of_the_run(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1, total_steps=1)
    (admission,) = bus.admit(5, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lease = bus.lease(for_actor(0, groups=1), timeout_s=T)
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    with pytest.raises(BusClosed, match="all 1 train steps are done"):
        bus.admit(1, timeout_s=T)
    with pytest.raises(BusClosed, match="all 1 train steps are done"):
        bus.lease(for_worker(), timeout_s=T)


def test_samples_count_by_the_modality_of_their_prompt(make_bus: MakeBus) -> None:
    bus = make_bus(mix={"video": 0.5, "text": 0.5}, groups_per_step=2)
    admissions = bus.admit(2, timeout_s=T)
    drawn = {admission.data_index for admission in admissions}
    bus.drop(admissions[0].group_uid, reason="reward_failed", timeout_s=T)
    (again,) = bus.admit(1, timeout_s=T)
    assert drawn == {0, 1} and again.data_index == admissions[0].data_index + 2
    bus.put([make_row(admissions[1]), make_row(again)], timeout_s=T)
    lease = bus.lease(for_actor(0), timeout_s=T)
    assert {row.modality for row in lease.rows} == {"video", "text"}
    bus.ack([lease.lease_id], step=0, dropped={}, timeout_s=T)
    counts = bus.progress(timeout_s=T).ledger.modalities
    assert sorted(counts) == ["text", "video"]
    assert [count.trained for count in counts.values()] == [2, 2]
    assert sum(count.dropped.get("reward_failed", 0) for count in counts.values()) == 2


def test_a_rollout_names_modalities_without_shares(make_bus: MakeBus) -> None:
    bus = make_bus()
    admissions = bus.admit(2, timeout_s=T)
    assert bus.progress(timeout_s=T).ledger.modalities == {}
    bus.name_modalities({admission.index: "audio" for admission in admissions}, timeout_s=T)
    (counts,) = bus.progress(timeout_s=T).ledger.modalities.values()
    assert (counts.issued, counts.open) == (4, 4)
    with pytest.raises(ValueError, match="never admitted"):
        bus.name_modalities({99: "audio"}, timeout_s=T)
