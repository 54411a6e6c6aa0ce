"""launcher=local: the run's services on this machine."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from relax_core.config.saved import to_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.train.checkpoint_store import has_checkpoint

USAGE = 2
LOST_S = 120.0  # a file server keeps the lock of a node that was lost for a while


def launch(config: RelaxConfig) -> int:
    """Plans, makes the run's folder, writes config.yaml and plan.json into it, and runs. Returns the exit code: the
    run's own, or 2 for a plan that cannot work, a checkpoint that cannot be resumed and a folder that cannot be
    written; nothing was started then."""
    folder = run_folder(config)
    in_folder = replace(config, run=replace(config.run, dir=str(folder)))
    return run_in_folder(in_folder, prepare=lambda: save_config(config, folder))


def run_in_folder(config: RelaxConfig, *, prepare: Callable[[], object], again: bool = False) -> int:
    """Runs in ``run.dir``, which is made and then ``prepare``d, unless another run is at work there. ``again``: the
    newest checkpoint goes before what ``resume`` says. Returns as `launch` does."""
    from relax_core.control.only_run import only_run
    from relax_core.control.resume import find_resume_point
    from relax_core.control.run import run_local
    from relax_core.control.supervisor import supervise
    from relax_core.plan.command import plan_run, save_plan

    folder = Path(config.run.dir)
    with ExitStack() as held:
        try:
            plan = plan_run(config)
            named = None if config.resume == "auto" else find_resume_point(config)
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(only_run(folder, wait_s=LOST_S if again else 0.0))
            newest = find_resume_point(replace(config, resume="auto")) if again or config.resume == "auto" else None
            prepare()
            save_plan(plan, folder)
        except (ValueError, OSError) as error:
            print(f"relax: {error}", file=sys.stderr)
            return USAGE
        resume = newest or named
        for note in (*resume.left, *resume.notes) if resume is not None else ():
            print(f"relax: resume: {note}", file=sys.stderr)
        if again:
            print(f"relax: goes on from step {resume.step if resume is not None else 0}", flush=True)
        return supervise(config, resume, run_local)


def run_folder(config: RelaxConfig) -> Path:
    """The folder of this run.

    resume=auto goes on in the newest folder beside ``run.dir`` that has a checkpoint, when ``run.dir`` itself has
    none. A fresh run never enters a folder that another run wrote to: it takes the next free name.
    """
    wanted = Path(config.run.dir)
    if config.resume == "auto":
        newest_first = sorted(wanted.parent.glob("*/"), key=lambda folder: folder.stat().st_mtime, reverse=True)
        with_checkpoint = (folder for folder in [wanted, *newest_first] if has_checkpoint(folder / "checkpoints"))
        return next(with_checkpoint, wanted)
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([wanted], numbered) if not (folder / "config.yaml").exists())


def save_config(config: RelaxConfig, folder: Path) -> Path:
    """Writes config.yaml, complete or not at all. A resumed run keeps the earlier one as config.1.yaml and so on."""
    target, text = folder / "config.yaml", to_yaml(config)
    if target.exists() and target.read_text(encoding="utf-8") != text:
        target.rename(next(path for n in itertools.count(1) if not (path := folder / f"config.{n}.yaml").exists()))
    partial = folder / ".config.yaml.partial"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)
    return target
