"""A checkpoint of the run is one cut: models, optimizers and random states, and the bus's ledger and cursor. Beside
them lies the configuration that they were made with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from relax_core.config.saved import to_yaml
from relax_core.contracts.bus import Bus
from relax_core.roles.process.role_context import RunContext
from relax_core.roles.trainer.best_metric import BestMetric
from relax_core.roles.trainer.worker_group import TrainerWorkerGroup
from relax_core.rollout.evaluation.evaluator import eval_versions
from relax_core.train.checkpoints.checkpoint_store import (
    BUS_SNAPSHOT,
    CONFIG,
    DATA_DIGEST,
    DATUM,
    TOKEN_TREE,
    CheckpointStore,
)

EVALUATIONS = "evaluations"  # in meta.json: version → value of run.keep_best
LOOK_S = 0.5  # how often a write that is waited for is looked at


class RunCheckpoints:
    """Takes the cut after a train step was acknowledged: what the ledger calls trained, the weights have seen. With
    ``run.async_save`` a thread writes it while the next steps run; it counts once it is whole.

    ``moved_on``: told in words of each bit of progress of a write that is waited for.
    """

    def __init__(
        self, context: RunContext, *, bus: Bus, worker_group: TrainerWorkerGroup, moved_on: Callable[[str], None]
    ) -> None:
        run = context.config.run
        self._best = _best_metric(context)
        kept = self._best.kept if self._best is not None else frozenset
        self._store = CheckpointStore(context.run_dir / "checkpoints", keep_last=run.keep_last, kept=kept)
        self._beside, self._deadline_s = run.async_save, run.stall_timeout_s
        self._timeout_s = context.config.bus.call_timeout_s
        self._bus = bus
        self._worker_group = worker_group
        self._moved_on = moved_on
        self._taken = context.start_step
        self._config = to_yaml(context.config)
        self._data_digest = context.data_digest
        self._naming = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[Path] | None = None

    def save(self, version: int) -> None:
        """Saves the state after ``version`` steps, unless that is what the newest checkpoint holds. One at a time: it
        waits for the write before it, and raises what that had failed of."""
        if version == self._taken:
            return
        self.finish()
        snapshot = self._bus.snapshot(timeout_s=self._timeout_s)
        self._worker_group.copy_state()

        meta: dict[str, Any] = {"version": version, DATUM: TOKEN_TREE}
        if self._data_digest:
            meta[DATA_DIGEST] = self._data_digest
        if self._best is not None:
            meta[EVALUATIONS] = {str(one): value for one, value in self._best.seen().items()}

        def write(folder: Path) -> None:
            (folder / CONFIG).write_text(self._config, encoding="utf-8")
            (folder / BUS_SNAPSHOT).write_bytes(snapshot)
            self._worker_group.write_copy(folder)

        def store() -> Path:
            stored = self._store.write(version, writers=write, meta=meta)
            self._name_best()
            return stored

        self._write = self._thread.submit(store)
        self._taken = version
        if not self._beside:
            self.finish()

    def finish(self) -> None:
        """Waits until the newest checkpoint is on disk, however long that takes while it goes on. Raises what its write
        failed of, RuntimeError where it stands still for ``run.stall_timeout_s``: starting anew would meet the same
        disk."""
        if self._write is None:
            return
        seen, moved = -1, time.monotonic()
        while not wait([self._write], timeout=min(LOOK_S, self._deadline_s)).done:
            progress = self._store.progress(self._taken)
            if progress != seen:
                seen, moved = progress, time.monotonic()
                self._moved_on(f"writes checkpoint of step {self._taken}")
            elif time.monotonic() - moved > self._deadline_s:
                raise RuntimeError(
                    f"the checkpoint of step {self._taken} is not written: nothing came to the disk for "
                    f"{self._deadline_s:g} s. Choose another one with run.dir, or raise run.stall_timeout_s."
                )
        self._write.result(timeout=0)
        self._write = None

    def due(self, version: int) -> bool:
        """Whether this version is evaluated, and its checkpoint may come to be the best one."""
        return self._best is not None and version in self._best.candidates

    def judge(self, version: int, values: Mapping[str, float]) -> bool:
        """An evaluation's figures are in. Returns whether the run has waited long enough for a better one."""
        if self._best is None:
            return False
        self._best.take(version, values)
        self._name_best()
        return self._best.exhausted()

    def _name_best(self) -> None:
        """The best checkpoint may come before its evaluation, or after it."""
        with self._naming:
            best = None if self._best is None else self._best.best()
            if best is not None:
                self._store.name_best(best.version)

    def raise_failure(self) -> None:
        """Raises what the write beside the steps failed of; returns at once."""
        if self._write is not None and self._write.done():
            self.finish()


def _best_metric(context: RunContext) -> BestMetric | None:
    """None where no figure chooses a best checkpoint. The weights that a run begins with have none of their own."""
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
