"""Tests that the ledger reports lost samples and samples trained twice, is cheap, and survives a snapshot."""

from __future__ import annotations

import msgspec

from relax_core.bus.ledger import Ledger, LedgerState


def make_ledger(groups: int, group_size: int = 2) -> Ledger:
    ledger = Ledger(group_size=group_size, journal=None)
    for index in range(groups):
        uids = [f"g{index}.{place}" for place in range(group_size)]
        ledger.issue(index, f"g{index}", uids, attempt=0, min_version=0)
    return ledger


def test_counts_come_from_the_entries() -> None:
    ledger = make_ledger(4)
    ledger.train(0, "g0", ["g0.0", "g0.1"], [0, 0], step=0)
    ledger.drop(1, "g1", {"g1.0": "stale", "g1.1": "reward failed"}, step=0)
    ledger.train(3, "g3", ["g3.1"], [0], step=1)
    ledger.drop(3, "g3", {"g3.0": "stale"}, step=1)
    counts = ledger.counts([2])
    assert (counts.issued, counts.trained, counts.open, counts.lost, counts.trained_twice) == (8, 3, 2, 0, 0)
    assert counts.dropped == {"reward failed": 1, "stale": 2}
    assert ledger.counts([2]) == counts, "counting closed entries once must not change the counts"


def test_a_sample_without_end_that_nobody_holds_is_lost() -> None:
    ledger = make_ledger(2)
    ledger.train(1, "g1", ["g1.0"], [0], step=0)
    counts = ledger.counts([1])
    assert (counts.open, counts.lost) == (1, 2)


def test_training_twice_is_found() -> None:
    ledger = make_ledger(3)
    for step in range(3):
        ledger.train(0, "g0", ["g0.0"], [0], step=step)
    ledger.drop(1, "g1", {"g1.0": "stale"}, step=0)
    ledger.train(1, "g1", ["g1.0"], [0], step=1)  # two ends, but trained only once
    ledger.drop(2, "g2", {"g2.0": "stale"}, step=0)
    ledger.train(2, "g2", ["g2.0"], [0], step=1)
    ledger.train(2, "g2", ["g2.0"], [0], step=2)
    assert ledger.counts([]).trained_twice == 2


def test_a_snapshot_keeps_everything() -> None:
    ledger = make_ledger(3)
    ledger.train(0, "g0", ["g0.0", "g0.1"], [0, 0], step=7)
    ledger.train(0, "g0", ["g0.0"], [0], step=8)
    ledger.drop(1, "g1", {"g1.0": "stale"}, step=0)
    before = ledger.counts([1, 2])
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.state()), type=LedgerState)
    restored = Ledger(group_size=2, journal=None)
    restored.restore(state)
    assert restored.counts([1, 2]) == before
    restored.drop(1, "g1", {"g1.1": "engine failed"}, step=0)
    assert restored.counts([2]).dropped == {"engine failed": 1, "stale": 1}


def test_a_million_samples_take_four_bytes_each() -> None:
    ledger = Ledger(group_size=1000, journal=None)
    for index in range(1000):
        uids = [f"g{index}.{place}" for place in range(1000)]
        ledger.issue(index, f"g{index}", uids, attempt=0, min_version=0)
        ledger.train(index, f"g{index}", uids, [0] * 1000, step=index)
    assert ledger.counts([]).trained == 1_000_000
    assert len(msgspec.msgpack.encode(ledger.state())) < 4_001_000
