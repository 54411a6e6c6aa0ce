"""Makes the run's folder and executes the run on this machine (launcher=local)."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from relax_core.config.rerun import marked
from relax_core.config.saved_config import to_yaml
from relax_core.config.schema import DtypeByMachine, FolderByTime, RelaxConfig
from relax_core.contracts.output_path import numbered
from relax_core.contracts.private_folder import private_folder
from relax_core.train.checkpoints.checkpoint_store import has_checkpoint

USAGE = 2
LOCK_WAIT_S = 120.0  # a file server releases the lock of a lost node after some time


def launch(config: RelaxConfig) -> int:
    """Plans the run, makes its folder, writes config.yaml and plan.json into it, and executes the run.

    Returns the exit code of the run. Returns 2 without starting anything if the plan cannot work, the checkpoint cannot
    be resumed, or the folder cannot be written.
    """
    return run_in_folder(
        config, make=lambda: make_run_folder(config), prepare=lambda folder: save_config(config, folder)
    )


def run_in_folder(
    config: RelaxConfig, *, make: Callable[[], Path], prepare: Callable[[Path], object], again: bool = False
) -> int:
    """Executes the run in the folder that ``make`` returns. ``prepare`` first writes files into the folder.

    Returns the exit code like `launch`, and 2 if another run uses the folder. With ``again``, the run resumes from the
    newest checkpoint in the folder, if any, and ignores ``resume``.
    """
    from relax_core.control.host.run_paths import run_lock
    from relax_core.control.local_run import run_local
    from relax_core.control.resume import find_resume_point
    from relax_core.control.supervisor import supervise
    from relax_core.data.chat_template import reads_clock, utc_date
    from relax_core.plan.plan_command import plan_run, save_plan

    with ExitStack() as held:
        try:
            plan = plan_run(config)
            named = None if config.resume == "auto" else find_resume_point(config)
            folder = make()
            config = replace(config, run=replace(config.run, dir=str(folder)))
            held.enter_context(run_lock(folder, wait_s=LOCK_WAIT_S if again else 0.0))
            newest = find_resume_point(replace(config, resume="auto")) if again or config.resume == "auto" else None
            resume = newest or named
            kept = None if resume is None else resume.template_date
            config.data.template_date = config.data.template_date or kept or utc_date()
            if isinstance(config.model.dtype, DtypeByMachine):
                config.model.dtype = str(config.model.dtype) if resume is None else resume.dtype
            prepare(folder)
            save_plan(plan, folder)
        except (ValueError, OSError) as error:
            print(f"relax: {error}", file=sys.stderr)
            return USAGE
        if config.model.path is not None and reads_clock(Path(config.model.path)):
            print(
                f"relax: data.template_date={config.data.template_date}: the chat template writes it", file=sys.stderr
            )
        for line in plan.left_out:
            print(f"relax: data: {line}", file=sys.stderr)
        for line in plan.warnings:
            print(f"relax: warning: {line}", file=sys.stderr)
        for note in (*resume.left, *resume.notes) if resume is not None else ():
            print(f"relax: resume: {note}", file=sys.stderr)
        if again:
            print(f"relax: the run goes on from step {resume.step if resume is not None else 0}", flush=True)
        elif config.resume == "auto" and resume is None:
            print(f"relax: resume=auto: {folder} has no checkpoint yet, so the run starts at step 0", file=sys.stderr)
        return supervise(config, resume, run_local)


def make_run_folder(config: RelaxConfig) -> Path:
    """Makes the folder of this run, or finds the folder of the run that it resumes. Returns the folder.

    With resume=auto, the run resumes in ``run.dir``, with or without a checkpoint in it. The default ``run.dir`` has
    the time in its name. In this case the run resumes in the newest sibling folder with a checkpoint. A new run never
    uses a folder that another run wrote to or made in the same second. It appends the next free number to the name.
    Raises ValueError with key and fix if the folder cannot be made.
    """
    wanted, by_time = Path(config.run.dir), isinstance(config.run.dir, FolderByTime)
    if config.resume == "auto" and isinstance(config.run.dir, FolderByTime):
        if (newest := _newest_sibling(wanted, label=config.run.dir.label)) is not None:
            return private_folder(newest, key="run.dir")
    elif config.resume == "auto":
        return _made(wanted, exist_ok=True)
    for folder in numbered(wanted):
        if not (folder / "config.yaml").exists() and not (by_time and folder.exists()):
            with suppress(FileExistsError):  # another run has just made the folder
                return _made(folder, exist_ok=not by_time)
    raise AssertionError("`numbered` does not end")


def _newest_sibling(folder: Path, *, label: str) -> Path | None:
    """Returns the newest sibling of ``folder`` that has a checkpoint and a name with the ending ``label``."""
    labelled = [path for path in folder.parent.glob("*/") if path.name.endswith(label)]
    newest_first = sorted(labelled, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in newest_first if has_checkpoint(path / "checkpoints")), None)


def _made(folder: Path, *, exist_ok: bool) -> Path:
    """Makes the folder. Raises FileExistsError if it exists and ``exist_ok`` is False."""
    try:
        return private_folder(folder, key="run.dir", exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ValueError(f"run.dir={folder} cannot be made: {error.strerror}. Choose another folder.") from error


def save_config(config: RelaxConfig, folder: Path) -> Path:
    """Writes config.yaml completely or not at all. A resumed run keeps the earlier file as config.1.yaml and so on."""
    target, text = folder / "config.yaml", marked(to_yaml(config))
    if target.exists() and target.read_text(encoding="utf-8") != text:
        target.rename(next(path for n in itertools.count(1) if not (path := folder / f"config.{n}.yaml").exists()))
    partial = folder / ".config.yaml.partial"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)
    return target
