"""Tests reading the ledger's file: the events of samples, and counts over all events."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from relax_core.bus.ledger_reader import SETTLE_S, EngineShare, LedgerFile, SampleHistory
from tests.bus.make_rows import for_actor, uids_of
from tests.bus.persisted_run import PersistedRun, T, generated_row


@pytest.fixture
def run(tmp_path: Path) -> Iterator[PersistedRun]:
    run = PersistedRun(tmp_path / "ledger.sqlite")
    yield run
    run.journal.close(timeout_s=T)


def words(life: SampleHistory) -> list[tuple[str, int | None, bool]]:
    return [(event.event, event.step, event.undone) for event in life.events]


def test_a_life_has_every_event_and_what_the_rollout_told(run: PersistedRun) -> None:
    first, second = run.roll_out(2)
    lease = run.core.lease(for_actor(0))
    assert lease is not None
    run.core.release([lease.lease_id])
    run.train()
    with run.file() as file:  # the journal still has the file open
        (life,) = file.samples({"uid": uids_of(second)[1]})
    assert life.state == "trained" and life.group == second.group_uid
    assert words(life) == [
        ("issued", None, False),
        ("put", None, False),
        ("leased", 0, False),
        ("returned", 0, False),
        ("leased", 0, False),
        ("trained", 0, False),
    ]
    assert [event.time for event in life.events] == sorted(event.time for event in life.events)
    made = life.events[1].made
    assert made is not None
    assert (made.ended, made.reward, made.parts) == ("stop", 1.25, {"exact": 0})
    (turn,) = made.turns
    assert (turn.engine, turn.finish, turn.versions) == ("engine-0", "stop", [(0, 2), (1, 1)])
    assert [event.reason for event in life.events] == ["", "", "", "released", "delivery 2", ""]
    with run.file() as file:
        shares = file.engine_shares()
    samples = len(uids_of(first)) + len(uids_of(second))
    assert shares == {"engine-0": EngineShare(samples=samples, tokens=3 * samples)}
    assert first.group_uid != second.group_uid


def test_filters_must_fit_one_event_and_all_of_them(run: PersistedRun) -> None:
    first, second = run.roll_out(2)
    run.train()
    third, fourth = run.core.admit(2)
    run.core.drop(third.group_uid, reason="engine failed")
    with run.file() as file:
        assert [life.uid for life in file.samples({"group": first.group_uid})] == uids_of(first)
        assert [life.uid for life in file.samples({"step": 0})] == uids_of(first) + uids_of(second)
        assert [life.uid for life in file.samples({"step": 1})] == uids_of(third)
        assert [life.uid for life in file.samples({"step": 1, "reason": "engine failed"})] == uids_of(third)
        assert file.samples({"step": 0, "reason": "engine failed"}) == []
        assert [life.state for life in file.samples({"group": fourth.group_uid})] == ["issued", "issued"]
        assert file.reasons() == {"engine failed": 2} and file.steps() == (0, 1)
        assert file.last_uid() == uids_of(fourth)[1]


def test_what_a_restore_undid_is_told_as_undone(run: PersistedRun) -> None:
    admissions = run.roll_out(2)
    snapshot = run.core.snapshot()
    run.train()
    run.core.restore(snapshot)
    assert [a.index for a in run.roll_out(2)] == [a.index for a in admissions]
    with run.file() as file:
        (life,) = file.samples({"uid": uids_of(admissions[0])[0]})
        assert words(life) == [
            ("issued", None, False),
            ("put", None, False),
            ("leased", 0, True),
            ("trained", 0, True),
            ("issued", None, False),
            ("put", None, False),
        ]
        assert life.state == "put" and life.events[-1].made is not None
        assert file.samples({"step": 0}) == []
        assert file.counts(run_over=False).open == {"put": 4}


def test_a_restore_to_a_later_checkpoint_brings_its_events_back(run: PersistedRun) -> None:
    """A run resumes from an older checkpoint, dies, and then resumes from the newest checkpoint."""
    run.roll_out(2)
    older = run.core.snapshot()
    run.train()
    newer = run.core.snapshot()
    run.core.restore(older)
    run.roll_out(2)
    run.train()  # the same samples again, after the restore
    run.core.restore(newer)
    with run.file() as file:
        assert file.counts(run_over=True).trained_twice == []
        assert file.counts(run_over=True).trained == 4
        (life, *_) = file.samples({"group": "g00000000"})
    assert [undone for _, _, undone in words(life)] == [False] * 4 + [True] * 4
    run.core.restore(older)
    with run.file() as file:
        assert file.counts(run_over=False).open == {"put": 4}


def test_a_fresh_start_on_an_old_file_sets_all_of_it_aside(run: PersistedRun) -> None:
    run.roll_out(2)
    run.train()
    run.journal.close(timeout_s=T)
    again = PersistedRun(run.path)
    again.roll_out(2)
    with again.file() as file:
        counts = file.counts(run_over=False)
        assert (counts.issued, counts.trained, counts.open) == (4, 0, {"put": 4})
        assert [event.undone for event in file.samples({"group": "g00000000"})[0].events] == [True] * 4 + [False] * 2
    again.train()
    with again.file() as file:
        assert file.counts(run_over=True).trained_twice == []
    again.journal.close(timeout_s=T)


def test_event_ids_are_never_used_again(run: PersistedRun) -> None:
    """Readers find payloads of groups by event ids, so ids of undone events must not be reused."""
    run.roll_out(2)
    snapshot = run.core.snapshot()
    run.train()
    run.core.restore(snapshot)
    run.journal.close(timeout_s=T)
    again = PersistedRun(run.path)
    again.core.restore(snapshot)
    again.roll_out(2)
    again.journal.close(timeout_s=T)
    with closing(sqlite3.connect(run.path)) as database:
        (doubled,) = database.execute("SELECT COUNT(*) FROM events JOIN rolled_back USING (id)").fetchone()
    assert doubled == 0


def test_counts_report_lost_and_twice_trained_samples(run: PersistedRun) -> None:
    first, second = run.roll_out(2)
    run.train()
    third, _ = run.roll_out(2)
    run.journal.flush(timeout_s=T)
    with run.file() as file:
        counts = file.counts(run_over=False)
        assert (counts.issued, counts.trained, counts.open, counts.lost, counts.trained_twice) == (
            8,
            4,
            {"put": 4},
            [],
            [],
        )
        assert len(file.counts(run_over=True).lost) == 4
    # No bus writes such events, so the test writes them.
    run.journal.append("trained", first.group_uid, uids_of(first)[:1], step=1, versions=[1])
    run.journal.append("dropped", third.group_uid, uids_of(third)[:1], step=1, reason="stale")
    run.journal.flush(timeout_s=T)
    with closing(sqlite3.connect(run.path)) as database, database:
        database.execute("UPDATE events SET time = ?", (time.time() - SETTLE_S - 1.0,))
    with run.file() as file:
        counts = file.counts(run_over=False)
        assert counts.lost == uids_of(third)[1:] and counts.trained_twice == uids_of(first)[:1]
        assert counts.dropped == {"stale": 1} and counts.open == {"put": 2}
    assert second.group_uid


def test_a_row_without_the_rollouts_columns_is_read_without_them(run: PersistedRun) -> None:
    (admission,) = run.core.admit(1)
    run.core.put([msgspec.structs.replace(generated_row(admission), columns={"a": b"x"})])
    with run.file() as file:
        (life, _) = file.samples({"group": admission.group_uid})
    assert life.events[1].event == "put" and life.events[1].made is None


def test_a_finished_file_is_read_in_a_folder_that_nobody_may_write(run: PersistedRun, tmp_path: Path) -> None:
    run.roll_out(2)
    run.train()
    run.journal.close(timeout_s=T)
    before = sorted(path.name for path in tmp_path.iterdir())
    with LedgerFile(run.path) as file:
        assert file.counts(run_over=True).trained == 4
        assert sorted(path.name for path in tmp_path.iterdir()) == before == ["ledger.sqlite"]


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LedgerFile(tmp_path / "ledger.sqlite")
