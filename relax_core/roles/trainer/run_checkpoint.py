"""Saves checkpoints of the run, each a consistent snapshot of models, optimizers, random states, ledger and cursor.

Each checkpoint also contains the configuration of its run. With run.keep_best the checkpoint of the best evaluation is
kept. run.patience ends a run that does not improve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relax_core.bus.ray_bus import blocking
from relax_core.config.rerun import marked
from relax_core.config.saved_config import to_yaml
from relax_core.contracts.bus import CALL_TIMEOUT_S, Bus
from relax_core.contracts.outage import OUTAGE_SHARE, Outage, retry_through_outage
from relax_core.contracts.reward import HALT
from relax_core.observe.event_log import EVAL
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.shadow_watch import MAX_STEPS, ShadowWatch
from relax_core.roles.trainer.worker_group import TrainerWorkerGroup
from relax_core.rollout.evaluator import eval_versions
from relax_core.train.checkpoints.checkpoint_store import (
    BUS_SNAPSHOT,
    CONFIG,
    DATA_DIGEST,
    DATUM,
    TOKEN_TREE,
    CheckpointStore,
)


@dataclass(frozen=True, kw_only=True)
class BestVersion:
    """Holds the weight version with the highest ``value``; if several versions have this value, the first of them."""

    version: int
    value: float


class BestMetric:
    """Tracks one metric of the evaluations; thread-safe.

    ``metric`` is a metric of the source ``eval``, such as eval/exact. The run ends after ``patience`` evaluations in a
    row without a new best value; 0 means never. ``candidates`` are the versions with an evaluation and a checkpoint.
    ``seen`` maps the versions that were evaluated before a resume to their values.
    """

    def __init__(self, metric: str, *, patience: int, candidates: Iterable[int], seen: Mapping[int, float]) -> None:
        self._name = metric.removeprefix(f"{EVAL}/")
        self._patience = patience
        self._candidates = frozenset(candidates)
        self._seen = dict(seen)
        self._lock = threading.Lock()

    @property
    def candidates(self) -> frozenset[int]:
        """Returns the versions with an evaluation and a checkpoint."""
        return self._candidates

    def add(self, version: int, values: Mapping[str, float]) -> None:
        """Adds an evaluation. A report that is repeated after a restart counts once."""
        with self._lock:
            self._seen[version] = values[self._name]

    def seen(self) -> dict[int, float]:
        """Returns the values of all evaluations so far, by version."""
        with self._lock:
            return dict(self._seen)

    def best(self) -> BestVersion | None:
        """Returns the best evaluation so far, or None before the first evaluation."""
        seen = self.seen()
        if not seen:
            return None
        version = max(sorted(seen), key=lambda candidate: seen[candidate])
        return BestVersion(version=version, value=seen[version])

    def exhausted(self) -> bool:
        """Returns True if the last ``patience`` evaluations had no new best value."""
        best, seen = self.best(), self.seen()
        return (
            bool(self._patience)
            and best is not None
            and sum(version > best.version for version in seen) >= self._patience
        )

    def kept(self) -> set[int]:
        """Returns the versions with checkpoints to keep: the best version, and versions with a pending evaluation.

        Evaluations are reported in order, so a version below the newest evaluated version has no pending evaluation.
        """
        best, seen = self.best(), self.seen()
        newest = max(seen, default=-1)
        pending = {version for version in self._candidates if version > newest}
        return pending | ({best.version} if best is not None else set())


EVALUATIONS = "evaluations"  # the key in meta.json that maps versions to values of run.keep_best
SHADOW_WATCH = "shadow_watch"  # the key in meta.json with the state of the shadow watch
CHECK_S = 0.5  # interval of checks in seconds while a write is awaited


class RunCheckpoints:
    """Takes a snapshot after the acknowledgement of a train step; then ledger and weights agree on the trained samples.

    A thread writes the snapshot while the next steps run. A snapshot is a valid checkpoint only when it is complete.
    ``shadow_watch`` is the newest state of the `ShadowWatch`, which each checkpoint contains. ``report_progress`` is
    called with a text at each progress of an awaited write. ``report_wait`` is called with a text that names the ledger
    or the outage that delays the write. If a write fails because of an outage of the disk
    (`relax_core.contracts.outage`), it is repeated with the same snapshot while the steps continue.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        bus: Bus,
        worker_group: TrainerWorkerGroup,
        report_progress: Callable[[str], None],
        report_wait: Callable[[str], None],
    ) -> None:
        run = context.config.run
        self._best = _best_metric(context)
        self.shadow_watch = _shadow_watch(context)
        self._halts = context.config.reward.on_hack == HALT
        self._store = CheckpointStore(context.run_dir / "checkpoints", keep_last=run.keep_last, kept=self._kept)
        self._deadline_s = run.stall_timeout_s
        self._outage_s = OUTAGE_SHARE * run.stall_timeout_s
        self._outage = Outage("the checkpoint")
        self._bus = bus
        self._worker_group = worker_group
        self._report_progress, self._report_wait = report_progress, report_wait
        self._taken = context.start_step
        self._copied = -1  # the version of the copy of the models' state
        self._config = marked(to_yaml(context.config))
        self._data_digest = context.data_digest
        self._naming = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[Path] | None = None

    def _kept(self) -> set[int]:
        """Returns the versions with checkpoints to keep; with reward.on_hack=halt, recent versions are included."""
        best = set() if self._best is None else self._best.kept()
        return best | (set(range(self._taken - MAX_STEPS, self._taken + MAX_STEPS)) if self._halts else set())

    def newest_before(self, step: int) -> Path | None:
        """Returns the newest checkpoint that was written before this train step, or None."""
        return self._store.newest_before(step)

    def save(self, version: int) -> None:
        """Saves the state after ``version`` steps, if the newest checkpoint is older.

        First waits for the previous write and raises the error of this write. Then waits until the ledger's events are
        on disk; raises LedgerUnwritable if an outage lasts too long.
        """
        if version == self._taken:
            return
        self.copy_models(version)
        self._report_wait(f"takes the snapshot of step {version}: waits for the ledger")
        snapshot = blocking(self._bus.snapshot(timeout_s=min(CALL_TIMEOUT_S, self._outage_s)))

        meta: dict[str, Any] = {"version": version, DATUM: TOKEN_TREE}
        if self._data_digest:
            meta[DATA_DIGEST] = self._data_digest
        if self.shadow_watch.recent:
            meta[SHADOW_WATCH] = msgspec.to_builtins(self.shadow_watch)
        if self._best is not None:
            meta[EVALUATIONS] = {str(evaluated): value for evaluated, value in self._best.seen().items()}

        def write(folder: Path) -> None:
            (folder / CONFIG).write_text(self._config, encoding="utf-8")
            (folder / BUS_SNAPSHOT).write_bytes(snapshot)
            self._worker_group.write_copy(folder)

        def store() -> Path:
            stored = self._store.write(version, writers=write, meta=meta)
            self._name_best()
            return stored

        def store_in_outages(outage: Outage) -> Path:
            stored = retry_through_outage(store, outage, limit_s=self._outage_s)
            self._worker_group.drop_copies()
            return stored

        self._outage = outage = Outage(f"the checkpoint of step {version}")

        self._write = self._thread.submit(store_in_outages, outage)
        self._taken = version

    def copy_models(self, version: int) -> None:
        """Copies the models' state after ``version`` steps to the host for `save`, unless they are copied already.

        It first waits for the previous write and raises its error.
        """
        if self._copied != version:
            self.finish()
            self._worker_group.copy_state()
            self._copied = version

    def has_copy(self, version: int) -> bool:
        """Returns whether `save` of this version needs no models on their devices."""
        return version in (self._copied, self._taken)

    def finish(self) -> None:
        """Waits until the newest checkpoint is on disk, without a limit while the write makes progress.

        Raises the error of the write; an outage of the disk is an error after nine tenths of ``run.stall_timeout_s``.
        Raises RuntimeError if nothing is written for ``run.stall_timeout_s``. A restart of the services would not help,
        because they would use the same disk.
        """
        if self._write is None:
            return
        seen, moved = -1, time.monotonic()
        while not wait([self._write], timeout=min(CHECK_S, self._deadline_s)).done:
            if problem := self._outage.problem:  # `retry_through_outage` limits the outage
                moved = time.monotonic()
                self._report_wait(f"writes checkpoint of step {self._taken}: waits for the disk ({problem})")
                continue
            progress = self._store.progress(self._taken)
            if progress != seen:
                seen, moved = progress, time.monotonic()
                self._report_progress(f"writes checkpoint of step {self._taken}")
            elif time.monotonic() - moved > self._deadline_s:
                raise RuntimeError(
                    f"the checkpoint of step {self._taken} is not written: nothing was written to the disk for "
                    f"{self._deadline_s:g} s. Choose another disk with run.dir, or raise run.stall_timeout_s."
                )
        self._write.result(timeout=0)
        self._write = None

    def due(self, version: int) -> bool:
        """Returns True if this version has an evaluation, so its checkpoint may become the best checkpoint."""
        return self._best is not None and version in self._best.candidates

    def record_evaluation(self, version: int, values: Mapping[str, float]) -> bool:
        """Records an evaluation's metrics; returns True if the run must end because it does not improve."""
        if self._best is None:
            return False
        self._best.add(version, values)
        self._name_best()
        return self._best.exhausted()

    def _name_best(self) -> None:
        """Points the link ``best`` at the best checkpoint.

        A checkpoint may be written before or after its evaluation.
        """
        with self._naming:
            best = None if self._best is None else self._best.best()
            if best is not None:
                self._store.name_best(best.version)

    def raise_failure(self) -> None:
        """Raises the error of a failed write in the background; never waits."""
        if self._write is not None and self._write.done():
            self.finish()


def _best_metric(context: RunContext) -> BestMetric | None:
    """Returns the tracker of run.keep_best, or None if the key is null. The initial weights have no checkpoint."""
    run = context.config.run
    if run.keep_best is None:
        return None
    versions = eval_versions(every=context.config.eval.every, start=context.start_step, total_steps=run.steps)
    seen = {}
    if context.resume_from is not None:
        seen = CheckpointStore.read_meta(context.resume_from).run.get(EVALUATIONS, {})
    return BestMetric(
        run.keep_best,
        patience=run.patience,
        candidates=[version for version in versions if version > 0],
        seen={int(version): value for version, value in seen.items()},
    )


def _shadow_watch(context: RunContext) -> ShadowWatch:
    """Returns the `ShadowWatch` of a new run, or of the checkpoint that the run resumes from."""
    if context.resume_from is None:
        return ShadowWatch()
    state = CheckpointStore.read_meta(context.resume_from).run.get(SHADOW_WATCH, {})
    return msgspec.convert(state, ShadowWatch)
