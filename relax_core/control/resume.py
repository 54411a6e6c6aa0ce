"""Finds the checkpoint to resume from: the newest complete checkpoint of run.dir, or the folder in ``resume``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from relax_core.config.engine_checks import offline_rows
from relax_core.config.learning_rate_schedule import learning_rate_jump_message
from relax_core.config.saved_config import DATA_LOCATION_KEYS, REFUSED, REPORTED_KEYS, Change, changes, plain
from relax_core.config.schema import DtypeByMachine, RelaxConfig
from relax_core.data.data_identity import data_digest
from relax_core.train.checkpoints.checkpoint_store import (
    BUS_SNAPSHOT,
    CONFIG,
    DATA_DIGEST,
    DATUM,
    TOKEN_TREE,
    CheckpointStore,
    ValidCheckpoint,
    recover_replaced,
)

REPORTED_DATA_KEYS = tuple(key for key in REPORTED_KEYS if key.startswith("data."))


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Describes the checkpoint that the run continues from.

    ``folder`` is the checkpoint's folder, ``step`` its number of train steps, and ``snapshot`` the state of the bus.
    ``notes`` are lines for the user, for example about changed settings. ``left`` are lines about newer checkpoints
    that resume=auto skipped because they are incomplete. ``template_date`` is the run's data.template_date, or None.
    ``dtype`` is the run's model.dtype.
    """

    folder: Path
    step: int
    snapshot: bytes
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    template_date: str | None = None
    dtype: str = ""


def find_resume_point(config: RelaxConfig, *, repair: bool = True) -> ResumePoint | None:
    """Returns the checkpoint that ``resume`` selects, or None if the run starts from step 0.

    With ``repair`` a checkpoint is restored if its replacement was interrupted; no other process may use the folder at
    this time. With resume=auto the result is None if no checkpoint exists yet. Raises ValueError if the named
    checkpoint, or every checkpoint, is incomplete; if the checkpoint has more steps than the run; and if it belongs to
    a run with different data, another model or another algorithm.
    """
    if config.resume is None:
        return None
    found = _newest_valid(config, repair=repair) if config.resume == "auto" else _named(Path(config.resume))
    if found is None:
        return None
    folder, step = found.folder, found.meta.step
    if found.meta.run.get(DATUM) != TOKEN_TREE:
        raise ValueError(
            f"resume={folder}: it was written before groups were token trees, and its run's ledger has another format. "
            f"Start a new run in another folder from its weights: relax export {folder} FOLDER, then "
            "model.path=FOLDER."
        )
    if step > config.run.steps:
        raise ValueError(
            f"resume={folder}: it holds {step} train steps, but run.steps={config.run.steps}. Raise run.steps."
        )
    saved = _saved(found)
    return ResumePoint(
        folder=folder,
        step=step,
        snapshot=(folder / BUS_SNAPSHOT).read_bytes(),
        notes=_compare(found, config, what=f"resume={folder}"),
        template_date=saved["data"].get("template_date"),
        dtype=saved["model"]["dtype"],
        left=tuple(f"{reason}; the run goes on from {folder.name}" for reason in found.left),
    )


def _newest_valid(config: RelaxConfig, *, repair: bool) -> ValidCheckpoint | None:
    root = Path(config.run.dir) / "checkpoints"
    if repair:
        recover_replaced(root)
    return CheckpointStore(root, keep_last=config.run.keep_last).newest_valid(requirements=(BUS_SNAPSHOT, CONFIG))


def _named(folder: Path) -> ValidCheckpoint:
    return ValidCheckpoint(folder=folder, meta=CheckpointStore.verify(folder, requirements=(BUS_SNAPSHOT, CONFIG)))


def _compare(found: ValidCheckpoint, config: RelaxConfig, *, what: str) -> tuple[str, ...]:
    """Returns notes on the settings that differ from the checkpoint's settings.

    Raises ValueError if the checkpoint belongs to another run. Data is compared by content if the checkpoint contains a
    digest of the run's data.
    """
    before, now = _saved(found), plain(config)
    digest, step = str(found.meta.run.get(DATA_DIGEST, "")), found.meta.step
    digest_now = data_digest(config.data, offline=offline_rows(config)) if digest else ""
    moved = DATA_LOCATION_KEYS if digest and digest_now == digest else ()
    # The run takes these values from the checkpoint.
    date = () if config.data.template_date else ("data.template_date",)
    dtype = ("model.dtype",) if isinstance(config.model.dtype, DtypeByMachine) else ()
    changed = changes(before, now, keys=REFUSED, but=(*moved, *date, *dtype, *REPORTED_DATA_KEYS))
    if changed:
        raise ValueError(
            f"{what}: it was made by another run: {'; '.join(change.describe() for change in changed)}. "
            f"Go on with {' '.join(change.as_it_was() for change in changed)}, or start a new run with resume=null, "
            "which may begin with these weights: model.path=FOLDER of an exported model."
        )
    if digest_now != digest:
        raise ValueError(
            f"{what}: it was made with other data: digest {digest}; the files that data.path, data.paths "
            f"and data.eval_path name, or the rows of data.name, have {digest_now or 'none'}. Give the data as it was, "
            "or start a new run with resume=null."
        )
    reported = changes(before, now, keys=REPORTED_KEYS)
    if moved:
        reported += changes(before, now, keys=DATA_LOCATION_KEYS)
    jump = learning_rate_jump_message(before, now, step=step)
    return (*(_note(change, step=step) for change in reported), *([] if jump is None else [jump]))


def _saved(found: ValidCheckpoint) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((found.folder / CONFIG).read_text(encoding="utf-8"))
    return values


def _note(change: Change, *, step: int) -> str:
    moved = ", the same data by its content" if change.key in DATA_LOCATION_KEYS else ""
    return f"{change.describe()}{moved} from step {step} on"
