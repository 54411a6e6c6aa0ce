"""Tests a run's checkpoints: they are consistent snapshots, written in parallel to steps, and report failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.roles.trainer.run_checkpoint import BUS_SNAPSHOT, BestMetric, BestVersion, RunCheckpoints
from relax_core.roles.trainer.worker_group import Ranks, TrainerWorkerGroup
from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
from tests.outages import filled
from tests.roles.run_context import context_in


def metric(*values: float, patience: int = 0, candidates: tuple[int, ...] = (10, 20, 30, 40)) -> BestMetric:
    """Returns a tracker after evaluations with these values, of versions 0, 10, 20, …."""
    best = BestMetric("eval/exact", patience=patience, candidates=candidates, seen={})
    for place, value in enumerate(values):
        best.add(10 * place, {"exact": value, "reward": 9.0})
    return best


def test_the_first_of_the_highest_is_the_best() -> None:
    assert metric().best() is None
    assert metric(0.1, 0.5, 0.5, 0.2).best() == BestVersion(version=10, value=0.5)
    assert metric(0.9, 0.5).best() == BestVersion(version=0, value=0.9)


def test_what_is_still_to_be_judged_stays_and_what_was_passed_over_does_not() -> None:
    assert metric(0.1).kept() == {0, 10, 20, 30, 40}
    assert metric(0.1, 0.5, 0.2).kept() == {10, 30, 40}
    passed_over = metric(0.1)
    passed_over.add(30, {"exact": 0.05})  # a restarted rollout begins with the newest version
    assert passed_over.kept() == {0, 40}


def test_patience_counts_evaluations_since_the_best() -> None:
    assert not metric(0.5, 0.4, patience=2).exhausted()
    assert metric(0.5, 0.4, 0.5, patience=2).exhausted()
    assert not metric(0.5, 0.4, 0.6, patience=2).exhausted()
    assert not metric(0.5, *[0.1] * 50).exhausted()


def test_an_evaluation_that_is_told_twice_counts_once() -> None:
    best = metric(0.5, 0.4, patience=2)
    best.add(10, {"exact": 0.4})
    assert not best.exhausted()
    assert best.seen() == {0: 0.5, 10: 0.4}


def test_evaluations_before_a_resume_count() -> None:
    best = BestMetric("eval/exact", patience=3, candidates=[30], seen={0: 0.2, 10: 0.7, 20: 0.6})
    best.add(20, {"exact": 0.6})
    best.add(30, {"exact": 0.1})
    assert best.best() == BestVersion(version=10, value=0.7)
    assert not best.exhausted() and best.kept() == {10}


class Lead:
    """A backend with one number as its state. The test controls the duration of a write."""

    def __init__(self) -> None:
        self.state = 0
        self.writes = threading.Event()
        self.may_write = threading.Event()
        self.may_write.set()

    def copy_state(self) -> None:
        self.copy = self.state

    def write_copy(self, folder: Path) -> None:
        self.writes.set()
        assert self.may_write.wait(timeout=120)
        folder.write_text(str(self.copy))

    def drop_copy(self) -> None:
        del self.copy


class Bus:
    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    async def snapshot(self, *, timeout_s: float) -> bytes:
        return str(self._lead.state).encode()


@pytest.fixture
def lead() -> Iterator[Lead]:
    fresh_lead = Lead()
    yield fresh_lead
    fresh_lead.may_write.set()


def nobody(words: str) -> None:
    """Ignores the progress of a write."""


def checkpoints(
    lead: Lead,
    run_dir: Path,
    *overrides: str,
    report_progress: Callable[[str], None] = nobody,
    report_wait: Callable[[str], None] = nobody,
    **changes: Any,
) -> RunCheckpoints:
    """Returns the checkpoints of a run. ``changes`` replace fields of the run's context."""
    context = replace(context_in(run_dir, "run.keep_last=9", *overrides), **changes)
    whole: Any = lead
    ranks = Ranks(name="actor-0", lead=whole, other_ranks=[], replicas=[[0]])
    worker_group = TrainerWorkerGroup(ranks, timeout_s=30, waiting=lambda what, *, on: nullcontext())
    bus: Any = Bus(lead)
    return RunCheckpoints(
        context, bus=bus, worker_group=worker_group, report_progress=report_progress, report_wait=report_wait
    )


def saved(run_dir: Path) -> dict[str, tuple[bytes, str]]:
    """Returns the bus's part and the trainer's part of each complete checkpoint."""
    return {
        folder.name: ((folder / BUS_SNAPSHOT).read_bytes(), (folder / "train").read_text())
        for folder in sorted((run_dir / "checkpoints").glob("step_*"))
    }


def test_steps_go_on_while_the_cut_of_an_earlier_one_is_written(lead: Lead, tmp_path: Path) -> None:
    writer = checkpoints(lead, tmp_path)
    lead.may_write.clear()
    lead.state = 5
    writer.save(5)
    lead.state = 6
    writer.raise_failure()
    assert saved(tmp_path) == {}  # a checkpoint is valid when it is complete
    lead.may_write.set()
    writer.save(6)
    writer.finish()
    assert saved(tmp_path) == {"step_00000005": (b"5", "5"), "step_00000006": (b"6", "6")}
    newest = CheckpointStore(tmp_path / "checkpoints", keep_last=9).newest_valid()
    assert newest is not None and newest.folder == tmp_path / "checkpoints" / "step_00000006"


def test_what_is_saved_already_is_not_saved_again(lead: Lead, tmp_path: Path) -> None:
    writer = checkpoints(lead, tmp_path)
    writer.save(0)
    writer.finish()
    assert saved(tmp_path) == {}
    writer.save(3)
    lead.state = 9
    writer.save(3)
    writer.finish()
    assert saved(tmp_path) == {"step_00000003": (b"0", "0")}


@pytest.mark.parametrize("then", ["raise_failure", "save", "finish"])
def test_a_failed_write_is_raised_with_its_cause(lead: Lead, tmp_path: Path, then: str) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    writer = checkpoints(lead, tmp_path)
    writer.save(1)
    with pytest.raises(OSError, match=r"step_00000001 was not written: .*bytes are free"):
        next_call(writer, then)


def next_call(writer: RunCheckpoints, name: str) -> None:
    if name == "raise_failure":
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:  # train steps; the first step after the failure raises the failure
            writer.raise_failure()
            time.sleep(0.01)
    elif name == "save":
        writer.save(2)
    else:
        writer.finish()


STALL_S = 0.2
SHORT = (f"run.stall_timeout_s={STALL_S}",)


def test_a_disk_that_stands_still_is_told(lead: Lead, tmp_path: Path) -> None:
    writer = checkpoints(lead, tmp_path, *SHORT)
    lead.may_write.clear()
    writer.save(1)
    message = r"checkpoint of step 1 is not written: nothing was written to the disk for 0.2 s.*run\.stall_timeout_s"
    with pytest.raises(RuntimeError, match=message):
        writer.finish()


def test_a_slow_disk_is_waited_for_as_long_as_it_goes_on(lead: Lead, tmp_path: Path) -> None:
    messages: list[str] = []
    slow = tmp_path / "checkpoints" / ".step_00000001.partial" / "slow"

    def a_byte_more(words: str) -> None:
        messages.append(words)
        assert lead.writes.wait(timeout=120)
        with slow.open("ab") as file:
            file.write(b".")
        if len(messages) == 8:  # one such message per STALL_S
            lead.may_write.set()

    writer = checkpoints(lead, tmp_path, *SHORT, report_progress=a_byte_more)
    lead.may_write.clear()
    writer.save(1)
    began = time.monotonic()
    writer.finish()
    assert time.monotonic() - began > 3 * STALL_S
    assert set(messages) == {"writes checkpoint of step 1"}
    assert saved(tmp_path) == {"step_00000001": (b"0", "0")}


WAITS = "writes checkpoint of step 5: waits for the disk (No space left on device since "


def test_a_full_disk_is_waited_out_with_the_same_snapshot(
    lead: Lead, small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk, told = small_disk("1m"), list[str]()
    space = ExitStack()

    def free_after_two(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            space.close()

    writer = checkpoints(lead, disk / "run", report_wait=free_after_two)
    with space:
        space.enter_context(filled(disk))
        lead.state = 5
        writer.save(5)
        lead.state = 6  # training continues and changes the state
        writer.raise_failure()
        writer.finish()
    assert saved(disk / "run") == {"step_00000005": (b"5", "5")}
    assert told[0] == "takes the snapshot of step 5: waits for the ledger"
    assert len(told) >= 3 and all(text.startswith(WAITS) for text in told[1:])
    assert "the checkpoint of step 5 waits for the disk" in caplog.text
    assert "the checkpoint of step 5 goes on after" in caplog.text


def test_a_disk_that_stays_full_ends_the_wait_with_its_cause(lead: Lead, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("1m")
    writer = checkpoints(lead, disk / "run", *SHORT)
    writer.save(1)
    writer.finish()
    with filled(disk):
        writer.save(2)
        with pytest.raises(OSError, match=r"step_00000002 was not written: No space left on device.*bytes are free"):
            writer.finish()
    assert list(saved(disk / "run")) == ["step_00000001"]


# -- the best checkpoint ----------------------------------------------------------------------------------------------
BEST = ("run.keep_best=eval/exact", "run.patience=2", "run.keep_last=1", "eval.every=2")


def exact(value: float) -> dict[str, float]:
    return {"exact": value, "reward": 1.0 - value}


def test_the_best_evaluations_checkpoint_stays_also_over_a_resume(lead: Lead, tmp_path: Path) -> None:
    writer = checkpoints(lead, tmp_path, *BEST, "run.steps=10", data_digest="d1")
    assert [version for version in range(11) if writer.due(version)] == [2, 4, 6, 8, 10]
    assert not writer.record_evaluation(0, exact(0.1))
    writer.save(2)
    writer.finish()
    writer.save(4)  # the evaluation of version 2 is still to come
    writer.finish()
    assert sorted(saved(tmp_path)) == ["step_00000002", "step_00000004"]
    assert not writer.record_evaluation(2, exact(0.9))
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_00000002"
    assert not writer.record_evaluation(4, exact(0.5))
    writer.save(6)
    writer.finish()
    assert sorted(saved(tmp_path)) == ["step_00000002", "step_00000006"]
    run = CheckpointStore.read_meta(tmp_path / "checkpoints" / "step_00000006").run
    assert run == {"version": 6, "datum": "token tree", "data": "d1", "evaluations": {"0": 0.1, "2": 0.9, "4": 0.5}}

    start = {"start_step": 6, "resume_from": tmp_path / "checkpoints" / "step_00000006"}
    resumed = checkpoints(lead, tmp_path, *BEST, "run.steps=10", **start)
    assert resumed.record_evaluation(6, exact(0.3))  # the second evaluation in a row without an improvement
    resumed.save(8)
    resumed.finish()
    assert sorted(saved(tmp_path)) == ["step_00000002", "step_00000008"]
    assert not resumed.record_evaluation(8, exact(0.95))
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step_00000008"


def test_without_a_figure_nothing_is_due_and_nothing_ends(lead: Lead, tmp_path: Path) -> None:
    writer = checkpoints(lead, tmp_path)
    assert not any(writer.due(version) for version in range(100))
    assert not any(writer.record_evaluation(version, exact(0.0)) for version in range(100))
