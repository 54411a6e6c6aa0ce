"""A checkpoint of the run is one cut: models, optimizers and random states, and the bus's ledger and cursor. Beside
them lies the configuration that they were made with."""

from __future__ import annotations

from pathlib import Path

from relax_core.config.saved import to_yaml
from relax_core.contracts.bus import Bus
from relax_core.roles.context import RunContext
from relax_core.roles.gang import Gang
from relax_core.train.checkpoint_store import CheckpointStore

BUS_SNAPSHOT = "bus.msgpack"
CONFIG = "config.yaml"


class RunCheckpoints:
    """Writes the cut after a train step was acknowledged: what the ledger calls trained, the weights have seen."""

    def __init__(self, context: RunContext, *, bus: Bus, gang: Gang) -> None:
        self._store = CheckpointStore(context.run_dir / "checkpoints", keep_last=context.config.run.keep_last)
        self._timeout_s = context.config.bus.call_timeout_s
        self._bus = bus
        self._gang = gang
        self._saved = context.start_step
        self._config = to_yaml(context.config)

    def save(self, version: int) -> None:
        """Saves the state after ``version`` steps, unless that is what the newest checkpoint holds."""
        if version == self._saved:
            return

        def write(folder: Path) -> None:
            (folder / CONFIG).write_text(self._config, encoding="utf-8")
            (folder / BUS_SNAPSHOT).write_bytes(self._bus.snapshot(timeout_s=self._timeout_s))
            self._gang.save(folder)

        self._store.write(version, writers=write, meta={"version": version})
        self._saved = version
