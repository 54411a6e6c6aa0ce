"""Where a run goes on: the newest checkpoint of its folder, or the one that the user named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from relax_core.config.identity import REFUSED, TOLD, changes
from relax_core.config.saved import plain
from relax_core.config.schema import RelaxConfig
from relax_core.train.atomic_folder import recover_replaced
from relax_core.train.checkpoint_store import CheckpointStore


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """``folder``: the checkpoint. ``step``: train steps it holds. ``snapshot``: the bus's part of the cut.
    ``notes``: what the user should be told, e.g. of knobs that have changed since."""

    folder: Path
    step: int
    snapshot: bytes
    notes: tuple[str, ...] = ()


def find_resume_point(config: RelaxConfig) -> ResumePoint | None:
    """None for a fresh start (also with resume=auto where there is no checkpoint yet). Raises ValueError for a
    checkpoint that cannot be read, holds more steps than the run has, or is of a run with other data, another model
    or another algorithm."""
    if config.resume is None:
        return None
    if config.resume == "auto":
        root = Path(config.run.dir) / "checkpoints"
        recover_replaced(root)  # whoever wrote there is gone
        folder = CheckpointStore(root, keep_last=config.run.keep_last).newest()
        if folder is None:
            return None
    else:
        folder = Path(config.resume)
    meta = CheckpointStore.verify(folder)
    if meta.step > config.run.steps:
        raise ValueError(
            f"resume={folder}: it holds {meta.step} train steps, but run.steps={config.run.steps}. Raise run.steps."
        )
    snapshot, saved = folder / "bus.msgpack", folder / "config.yaml"
    for file in (snapshot, saved):
        if not file.is_file():
            raise ValueError(f"resume={folder}: {file} is not there: it is no checkpoint of a whole run.")
    return ResumePoint(
        folder=folder,
        step=meta.step,
        snapshot=snapshot.read_bytes(),
        notes=_compare(saved, config, what=f"resume={folder}", step=meta.step),
    )


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
