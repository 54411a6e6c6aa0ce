"""Where a run goes on: the newest whole checkpoint of its folder, or the one that the user named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from relax_core.config.identity import REFUSED, TOLD, changes
from relax_core.config.saved import plain
from relax_core.config.schema import RelaxConfig
from relax_core.train.atomic_folder import recover_replaced
from relax_core.train.checkpoint_store import BUS_SNAPSHOT, CONFIG, CheckpointStore, WholeCheckpoint


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """``folder``: the checkpoint. ``step``: train steps it holds. ``snapshot``: the bus's part of the cut.
    ``notes``: what the user should be told, e.g. of knobs that have changed since. ``left``: which checkpoints that are
    not whole resume=auto left, and why."""

    folder: Path
    step: int
    snapshot: bytes
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def find_resume_point(config: RelaxConfig) -> ResumePoint | None:
    """None for a fresh start (also with resume=auto where there is no checkpoint yet). Raises ValueError for a
    checkpoint that is named and not whole, where none is whole, and for one that holds more steps than the run has, or
    is of a run with other data, another model or another algorithm."""
    if config.resume is None:
        return None
    found = _newest_whole(config) if config.resume == "auto" else _named(Path(config.resume))
    if found is None:
        return None
    folder, step = found.folder, found.meta.step
    if step > config.run.steps:
        raise ValueError(
            f"resume={folder}: it holds {step} train steps, but run.steps={config.run.steps}. Raise run.steps."
        )
    return ResumePoint(
        folder=folder,
        step=step,
        snapshot=(folder / BUS_SNAPSHOT).read_bytes(),
        notes=_compare(folder / CONFIG, config, what=f"resume={folder}", step=step),
        left=tuple(f"{one}; the run goes on from {folder.name}" for one in found.left),
    )


def _newest_whole(config: RelaxConfig) -> WholeCheckpoint | None:
    root = Path(config.run.dir) / "checkpoints"
    recover_replaced(root)  # whoever wrote there is gone
    return CheckpointStore(root, keep_last=config.run.keep_last).newest_whole(needs=(BUS_SNAPSHOT, CONFIG))


def _named(folder: Path) -> WholeCheckpoint:
    return WholeCheckpoint(folder=folder, meta=CheckpointStore.verify(folder, needs=(BUS_SNAPSHOT, CONFIG)))


def _compare(saved: Path, config: RelaxConfig, *, what: str, step: int) -> tuple[str, ...]:
    """Notes on the knobs that differ from the checkpoint's; ValueError where it is another run."""
    before, now = yaml.safe_load(saved.read_text(encoding="utf-8")), plain(config)
    other = changes(before, now, keys=REFUSED)
    if other:
        raise ValueError(
            f"{what}: it was made by another run: {'; '.join(change.words() for change in other)}. "
            f"Go on with {' '.join(change.as_it_was() for change in other)}, or start a new run with resume=null; it "
            "may begin with these weights: model.path=FOLDER of an exported model."
        )
    return tuple(f"{change.words()} from step {step} on" for change in changes(before, now, keys=TOLD))
