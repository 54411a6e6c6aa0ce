"""A checkpoint of the run is one cut: models, optimizers and random states, and the bus's ledger and cursor. Beside
them lies the configuration that they were made with."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from relax_core.config.saved import to_yaml
from relax_core.contracts.bus import Bus
from relax_core.roles.context import RunContext
from relax_core.roles.gang import TrainerGang
from relax_core.train.checkpoint_store import BUS_SNAPSHOT, CONFIG, CheckpointStore

LOOK_S = 0.5  # how often a write that is waited for is looked at


class RunCheckpoints:
    """Takes the cut after a train step was acknowledged: what the ledger calls trained, the weights have seen. With
    ``run.async_save`` a thread writes it while the next steps run; it counts once it is whole.

    ``moved_on``: told in words of each bit of progress of a write that is waited for.
    """

    def __init__(self, context: RunContext, *, bus: Bus, gang: TrainerGang, moved_on: Callable[[str], None]) -> None:
        run = context.config.run
        self._store = CheckpointStore(context.run_dir / "checkpoints", keep_last=run.keep_last)
        self._beside, self._deadline_s = run.async_save, run.stall_timeout_s
        self._timeout_s = context.config.bus.call_timeout_s
        self._bus = bus
        self._gang = gang
        self._moved_on = moved_on
        self._taken = context.start_step
        self._config = to_yaml(context.config)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: Future[Path] | None = None

    def save(self, version: int) -> None:
        """Saves the state after ``version`` steps, unless that is what the newest checkpoint holds. One at a time: it
        waits for the write before it, and raises what that had failed of."""
        if version == self._taken:
            return
        self.finish()
        snapshot = self._bus.snapshot(timeout_s=self._timeout_s)
        self._gang.copy_state()

        def write(folder: Path) -> None:
            (folder / CONFIG).write_text(self._config, encoding="utf-8")
            (folder / BUS_SNAPSHOT).write_bytes(snapshot)
            self._gang.write_copy(folder)

        self._write = self._thread.submit(self._store.write, version, writers=write, meta={"version": version})
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

    def raise_failure(self) -> None:
        """Raises what the write beside the steps failed of; returns at once."""
        if self._write is not None and self._write.done():
            self.finish()
