"""A checkpoint of the run is one cut: model, optimizer and random states, and the bus's ledger and cursor."""

from __future__ import annotations

from pathlib import Path

import xxhash

from relax_core.config.saved import to_yaml
from relax_core.contracts.bus import Bus
from relax_core.roles.context import RunContext
from relax_core.roles.gang import Gang
from relax_core.train.checkpoint_store import CheckpointStore

TRAIN = "train"
BUS_SNAPSHOT = "bus.msgpack"


class RunCheckpoints:
    """Writes the cut after a train step was acknowledged: what the ledger calls trained, the weights have seen."""

    def __init__(self, context: RunContext, *, bus: Bus, gang: Gang) -> None:
        self._store = CheckpointStore(context.run_dir / "checkpoints", keep_last=context.config.run.keep_last)
        self._timeout_s = context.config.bus.call_timeout_s
        self._bus = bus
        self._gang = gang
        self._saved = context.start_step
        self._config_digest = xxhash.xxh3_128_hexdigest(to_yaml(context.config).encode())

    def save(self, version: int) -> None:
        """Saves the state after ``version`` steps, unless that is what the newest checkpoint holds."""
        if version == self._saved:
            return

        def write(folder: Path) -> None:
            (folder / BUS_SNAPSHOT).write_bytes(self._bus.snapshot(timeout_s=self._timeout_s))
            self._gang.save(folder / TRAIN)

        self._store.write(version, writers=write, meta={"version": version, "config_digest": self._config_digest})
        self._saved = version
