"""Where a run goes on: the newest checkpoint of its folder, or the one that the user named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.train.checkpoint_store import CheckpointStore


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """``folder``: the checkpoint. ``step``: train steps it holds. ``snapshot``: the bus's part of the cut."""

    folder: Path
    step: int
    snapshot: bytes


def find_resume_point(config: RelaxConfig) -> ResumePoint | None:
    """None for a fresh start (also with resume=auto where there is no checkpoint yet). Raises ValueError for a
    checkpoint that cannot be read or holds more steps than the run has."""
    if config.resume is None:
        return None
    if config.resume == "auto":
        folder = CheckpointStore(Path(config.run.dir) / "checkpoints", keep_last=config.run.keep_last).newest()
        if folder is None:
            return None
    else:
        folder = Path(config.resume)
    meta = CheckpointStore.verify(folder)
    if meta.step > config.run.steps:
        raise ValueError(
            f"resume={folder}: it holds {meta.step} train steps, but run.steps={config.run.steps}. Raise run.steps."
        )
    snapshot = folder / "bus.msgpack"
    if not snapshot.is_file():
        raise ValueError(f"resume={folder}: {snapshot} is not there: it is no checkpoint of a whole run.")
    return ResumePoint(folder=folder, step=meta.step, snapshot=snapshot.read_bytes())
