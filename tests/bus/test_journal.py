"""Tests the ledger's events in SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.bus import journal as journal_module
from relax_core.bus.bus_actor import BusActor
from relax_core.bus.journal import Journal, LedgerUnwritable
from relax_core.bus.ledger import Ledger
from relax_core.bus.ray_bus import open_answer
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts.bus import Admission, BusWait
from relax_core.contracts.columns import PERSISTED_COLUMNS
from tests.bus.make_rows import Clock, for_actor, make_row, make_settings, uids_of
from tests.outages import filled, locked

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


def make_core(journal: Journal) -> ReplayBuffer:
    return ReplayBuffer(make_settings(), ledger=Ledger(group_size=2, journal=journal), clock=Clock())


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
    with closing(sqlite3.connect(path)) as intruder:
        intruder.execute("DROP TABLE events")
        intruder.commit()
    journal.append("issued", "g0", ["g0.0"])
    with pytest.raises(LedgerUnwritable, match=r"ledger\.sqlite: no such table"):
        journal.flush(timeout_s=T)
    journal.append("issued", "g0", ["g0.0"])  # the bus continues after a failed write
    with pytest.raises(LedgerUnwritable):
        journal.close(timeout_s=T)


def test_a_file_from_before_token_trees_is_refused_in_words(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE generated (id INTEGER PRIMARY KEY, weight_versions BLOB, rewards BLOB)")
    with pytest.raises(ValueError, match=r"without token trees.*Use another run.dir"):
        Journal(path)


# -- outages ----------------------------------------------------------------------------------------------------------
WaitUntil = Callable[..., None]
ONCE = "SELECT COUNT(*), COUNT(DISTINCT uid) FROM events"


def test_a_lock_of_another_program_is_waited_out(journal: Journal, path: Path, wait_until: WaitUntil) -> None:
    with locked(path):
        journal.append("issued", "g0", ["g0.0", "g0.1"])
        wait_until(lambda: "database is locked since" in journal.problem, what="the lock")
        journal.append("issued", "g1", ["g1.0"])  # no bus call waits
        with pytest.raises(LedgerUnwritable, match=r"ledger\.sqlite: database is locked since \d+ s"):
            journal.flush(timeout_s=0.1)
        assert read(path, ONCE) == [(0, 0)]
    journal.flush(timeout_s=T)
    assert journal.problem == "" and journal.waiting_bytes == 0
    assert read(path, ONCE) == [(3, 3)]


def test_a_full_disk_is_waited_out(small_disk: Callable[[str], Path], wait_until: WaitUntil) -> None:
    disk = small_disk("4m")
    journal = Journal(disk / "ledger.sqlite")
    payloads = tuple(bytes(100_000) for _ in PERSISTED_COLUMNS)
    with filled(disk):
        journal.append("put", "g0", ["g0.0", "g0.1"], persisted=payloads)
        wait_until(lambda: "full" in journal.problem, what="the full disk")
        assert journal.waiting_bytes > sum(map(len, payloads))
    journal.flush(timeout_s=T)
    assert read(disk / "ledger.sqlite", ONCE) == [(2, 2)]
    assert read(disk / "ledger.sqlite", "SELECT COUNT(*) FROM generated") == [(1,)]
    journal.close(timeout_s=T)


def test_a_batch_that_was_written_before_its_error_is_not_written_again(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network disk may fail after the commit. Then the journal opens the connection again."""
    write, errors = journal._write, [sqlite3.SQLITE_IOERR_FSYNC]

    def commit_and_fail(database: sqlite3.Connection, batch: Any) -> None:
        write(database, batch)
        if errors:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = errors.pop()
            raise error

    monkeypatch.setattr(journal, "_write", commit_and_fail)
    journal.append("issued", "g0", ["g0.0", "g0.1"], persisted=tuple(b"1" for _ in PERSISTED_COLUMNS))
    journal.flush(timeout_s=T)
    journal.append("issued", "g1", ["g1.0"])
    journal.flush(timeout_s=T)
    assert not errors and read(path, ONCE) == [(3, 3)]
    assert read(path, "SELECT COUNT(*) FROM generated") == [(1,)]


def test_a_restore_in_an_outage_is_made_once(journal: Journal, path: Path, wait_until: WaitUntil) -> None:
    journal.append("issued", "g0", ["g0.0"])
    journal.flush(timeout_s=T)
    with locked(path):
        journal.append("issued", "g1", ["g1.0"])
        journal.roll_back(1)
        journal.append("issued", "g2", ["g2.0"])
        wait_until(lambda: journal.problem, what="the lock")
    journal.flush(timeout_s=T)
    assert read(path, "SELECT uid FROM events ORDER BY id") == [("g0.0",), ("g2.0",)]
    assert read(path, "SELECT uid FROM rolled_back") == [("g1.0",)]


def test_the_end_of_the_run_does_not_wait_longer_than_it_may(path: Path, wait_until: WaitUntil) -> None:
    journal = Journal(path)
    with locked(path):
        journal.append("issued", "g0", ["g0.0"])
        wait_until(lambda: journal.problem, what="the lock")
        with pytest.raises(LedgerUnwritable, match="database is locked"):
            journal.close(timeout_s=0.1)
    journal.close(timeout_s=T)  # the journal is already closed


def test_a_ledger_that_is_locked_at_the_start_is_waited_for(
    path: Path, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    path.parent.mkdir()
    opened: list[Journal] = []
    with locked(path):
        thread = threading.Thread(target=lambda: opened.append(Journal(path)))
        thread.start()
        wait_until(lambda: "waits for the disk: database is locked" in caplog.text, what="the lock")
        assert not opened
    thread.join(T)
    opened[0].close(timeout_s=T)


def test_the_bus_admits_no_group_while_too_much_waits_and_says_why(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot waits for the same disk. The wait graph names the disk for both waits."""
    monkeypatch.setattr(journal_module, "MAX_WAITING_BYTES", 1)
    actor = BusActor(msgspec.msgpack.encode(make_settings()), str(path))

    def value(answer: Any, kind: Any) -> Any:
        return msgspec.msgpack.decode(open_answer(answer)[0], type=kind)

    async def live() -> None:
        with locked(path):
            (first,) = value(await actor.admit(1, 0, T), list[Admission])
            admit = asyncio.create_task(actor.admit(1, 0, T))
            snapshot = asyncio.create_task(actor.snapshot(T))
            async with asyncio.timeout(T):
                while True:
                    waits = value(await actor.waits(), list[BusWait])
                    if len(waits) == 2 and all("database is locked since" in wait.text for wait in waits):
                        break
                    await asyncio.sleep(0.01)
            assert [wait.text.partition(" for ")[0] for wait in waits] == ["actor waits", "rollout waits"]
            assert all(wait.owed_by == ["bus"] and "0 MiB wait for the disk" in wait.text for wait in waits)
            assert "database is locked" in actor._progress().ledger_problem
            body = msgspec.msgpack.encode([(make_row(first), {})])
            open_answer(await actor.put(body, []))  # the bus accepts a complete group
            assert not admit.done() and not snapshot.done()
        assert len(value(await admit, list[Admission])) == 1
        open_answer(await snapshot)
        open_answer(await actor.close("over", T))

    asyncio.run(live())
    assert read(path, "SELECT COUNT(*) FROM events WHERE event = 'put'") == [(2,)]
