"""The ledger's events in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from relax_core.bus.journal import Journal, LedgerUnwritable
from relax_core.bus.ledger import Ledger
from relax_core.bus.replay_buffer import BusCore
from tests.bus.make_rows import Clock, for_actor, make_row, make_settings, uids_of

T = 120.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path)
    yield journal
    journal.close(timeout_s=T)


def read(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def make_core(journal: Journal) -> BusCore:
    return BusCore(make_settings(), ledger=Ledger(group_size=2, journal=journal), clock=Clock())


def test_the_life_of_every_sample_can_be_read(journal: Journal, path: Path) -> None:
    core = make_core(journal)
    first, second = core.admit(2)
    core.put([make_row(first, dropped={uids_of(first)[1]: "reward failed"})])
    core.drop(second.group_uid, reason="engine failed")
    for _ in range(2):
        lease = core.lease(for_actor(0, groups=1))
        assert lease is not None
        core.release([lease.lease_id])
    lease = core.lease(for_actor(0, groups=1))
    assert lease is not None
    core.ack([lease.lease_id], step=0, dropped={})
    journal.flush(timeout_s=T)
    events = read(path, "SELECT event, uid, group_uid, step, version, reason FROM events WHERE uid LIKE 'g00000000%'")
    kept, dropped = uids_of(first)
    assert [event[1:] for event in events if event[0] == "issued"] == [
        (kept, first.group_uid, None, 0, ""),
        (dropped, first.group_uid, None, 0, ""),
    ]
    assert [event for event in events if event[1] == kept][1:] == [
        ("put", kept, first.group_uid, None, 0, ""),
        ("leased", kept, first.group_uid, 0, None, ""),
        ("returned", kept, first.group_uid, 0, None, "released"),
        ("leased", kept, first.group_uid, 0, None, "delivery 2"),
        ("returned", kept, first.group_uid, 0, None, "released"),
        ("leased", kept, first.group_uid, 0, None, "delivery 3"),
        ("trained", kept, first.group_uid, 0, 0, ""),
    ]
    assert events[-1] == ("dropped", dropped, first.group_uid, 0, None, "reward failed")
    assert read(path, "SELECT COUNT(*) FROM events WHERE reason = 'engine failed' AND time > 0") == [(2,)]


def test_a_restore_sets_later_events_aside(path: Path) -> None:
    first = Journal(path)
    core = make_core(first)
    core.put([make_row(admission) for admission in core.admit(2)])
    snapshot = core.snapshot()
    lease = core.lease(for_actor(0))
    assert lease is not None
    core.ack([lease.lease_id], step=0, dropped={})
    first.close(timeout_s=T)

    second = Journal(path)
    resumed = make_core(second)
    resumed.restore(snapshot)
    resumed.put([make_row(admission) for admission in resumed.admit(2)])
    lease = resumed.lease(for_actor(0))
    assert lease is not None
    resumed.ack([lease.lease_id], step=0, dropped={})
    second.close(timeout_s=T)
    assert read(path, "SELECT COUNT(*), COUNT(DISTINCT uid) FROM events WHERE event = 'trained'") == [(4, 4)]
    assert read(path, "SELECT COUNT(*) FROM rolled_back WHERE event = 'trained'") == [(4,)]
    assert read(path, "SELECT COUNT(*) FROM events WHERE event = 'issued' AND reason = 'attempt 1'") == [(4,)]


def test_a_failed_write_is_told_at_the_next_flush(journal: Journal, path: Path) -> None:
    journal.flush(timeout_s=T)
    with closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE events")
        other.commit()
    journal.append("issued", "g0", ["g0.0"])
    with pytest.raises(LedgerUnwritable, match=r"ledger\.sqlite: no such table"):
        journal.flush(timeout_s=T)
    journal.append("issued", "g0", ["g0.0"])  # the bus goes on after a failed write
    with pytest.raises(LedgerUnwritable):
        journal.close(timeout_s=T)


def test_a_file_from_before_token_trees_is_refused_in_words(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE generated (id INTEGER PRIMARY KEY, weight_versions BLOB, rewards BLOB)")
    with pytest.raises(ValueError, match=r"without token trees.*Use another run.dir"):
        Journal(path)
