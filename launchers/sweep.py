"""The runs of a sweep (-m): on this machine one after the other; on a cluster submitted together."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launchers.choose import launch
from launchers.local import make_run_folder
from launchers.submitted import put
from relax_core.config.errors import ConfigError
from relax_core.config.schema import FolderByTime, LauncherKind, RelaxConfig, SlurmLauncherConfig
from relax_core.observe.results.summary import SUMMARY_FILE
from relax_core.plan.plan_command import plan_run

SWEEP_FILE = "sweep.json"
USAGE = 2
STOPPED = (129, 130, 143)  # by SIGHUP, Ctrl-C or SIGTERM
LABEL_BYTES = 100  # of a folder's name, which may have 255


@dataclass(kw_only=True)
class SweepRun:
    """``number``: in the sweep, from 0. ``swept``: the overrides in which it differs from the others. ``folder``: None
    for a run that was refused. ``job_id``: None until it was submitted, and on this machine. ``code``: None until it
    has ended. ``cause``: why it was refused."""

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    config: RelaxConfig | None
    folder: Path | None = None
    job_id: str | None = None
    code: int | None = None
    cause: str = ""
    handle: Any = None

    def words(self) -> str:
        return " ".join(self.swept) or f"number {self.number + 1}"


class Sweep:
    """Takes runs, and starts them together: none where one of them is refused. ``launch``: runs one here."""

    def __init__(self, launch: Callable[[RelaxConfig], int] = launch) -> None:
        self._launch = launch
        self._runs: list[SweepRun] = []
        self._folder: Path | None = None

    def take(
        self, config: RelaxConfig, overrides: Sequence[str], folder: Path, *, swept: Sequence[str]
    ) -> SweepRun | None:
        """Keeps a valid run until all that belong together are known; None for one whose plan cannot work. ``folder``:
        Hydra's of this sweep."""
        try:
            if config.launcher.name is not LauncherKind.ray_job:  # its model and data are on the cluster
                plan_run(config)
        except ConfigError as error:
            self.refuse(overrides, folder, swept=swept, error=error)
            return None
        return self._keep(SweepRun(number=0, overrides=tuple(overrides), swept=tuple(swept), config=config), folder)

    def refuse(self, overrides: Sequence[str], folder: Path, *, swept: Sequence[str], error: ConfigError) -> None:
        """Tells of a run that cannot start, and keeps that."""
        run = SweepRun(number=0, overrides=tuple(overrides), swept=tuple(swept), config=None, code=USAGE)
        run.cause = error.problems[0]
        self._keep(run, folder)
        print(f"relax: run {run.words()} of the sweep is refused", file=sys.stderr)
        print(error.report(), file=sys.stderr)

    def _keep(self, run: SweepRun, folder: Path) -> SweepRun:
        if self._folder is None:
            numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
            self._folder = next(one for one in itertools.chain([folder], numbered) if not (one / SWEEP_FILE).exists())
        run.number = len(self._runs)
        self._runs.append(run)
        return run

    def drop(self, runs: Sequence[SweepRun]) -> None:
        """Leaves out runs that a sweeper asked for together with one that is refused."""
        for run in runs:
            run.code, run.cause = USAGE, "another run that was asked for together with it is refused"

    def settle(self, metric: str) -> dict[int, float | None]:
        """Starts what was kept, waits for the end of all, and returns each run's ``metric``: a dotted place in its
        summary.json, e.g. reward.last or eval.-1.exact. None for a run that was refused or failed."""
        self._start()
        for run in self._runs:
            if run.code is None and run.job_id is not None:
                run.code = self._wait(run)
        return {
            run.number: read_metric(run.folder, metric) if run.code == 0 and run.folder is not None else None
            for run in self._runs
        }

    def finish(self) -> int:
        """Starts what was kept and prints a table; after runs on this machine their comparison. Returns the exit code:
        the first that is not 0."""
        kept = [run for run in self._runs if run.code is None and run.job_id is None]
        refused = [run for run in self._runs if run.config is None]
        if refused and (kept or len(refused) == len(self._runs)):
            told = f"{len(refused)} of the sweep's {len(self._runs)} runs are refused, so none was started"
            print(f"relax: {told}", file=sys.stderr)
            self._remove_folder()
            return USAGE
        try:
            self._start()
        except (RuntimeError, OSError, ValueError) as error:
            print(f"relax: {error}", file=sys.stderr)
            return USAGE
        if any(run.job_id is not None for run in self._runs):
            self._print_table()
        elif sum(run.folder is not None and (run.folder / SUMMARY_FILE).is_file() for run in self._runs) > 1:
            from relax_core.tools.compare import show

            assert self._folder is not None
            show([self._folder])
        return next((run.code for run in self._runs if run.code), 0)

    def _remove_folder(self) -> None:
        """Hydra has made it, for a sweep that has nothing to write."""
        assert self._folder is not None
        (self._folder / "multirun.yaml").unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    def _start(self) -> None:
        """Runs what is kept for this machine, one after the other, and submits the rest together."""
        kept = [run for run in self._runs if run.job_id is None and run.code is None]
        _name_folders(kept)
        here = [run for run in kept if _config(run).launcher.name is LauncherKind.local or _only_shows(run)]
        for run in here:
            self._run_here(run, count=len(here))
        if len(here) < len(kept):
            self._submit([run for run in kept if run.code is None])

    def _run_here(self, run: SweepRun, *, count: int) -> None:
        run.code = next((earlier.code for earlier in self._runs if earlier.code in STOPPED), None)
        if run.code is not None:
            run.cause = "the sweep was stopped before"
            print(f"relax: run {run.words()} is not started, since the sweep was stopped", file=sys.stderr)
            return
        print(f"relax: run {run.number + 1} of the sweep's {max(count, run.number + 1)}: {run.words()}", flush=True)
        config = _config(run)
        before, sys.argv = sys.argv, ["relax", *run.overrides]  # what its summary says it was started with
        try:
            if _only_shows(run):
                run.code = self._launch(config)
                return
            run.folder = make_run_folder(config)
            run.code = self._launch(replace(config, run=replace(config.run, dir=str(run.folder))))
            if run.code == USAGE:
                run.cause = "refused at its start"
            with suppress(OSError):
                run.folder.rmdir()  # it was refused, and wrote nothing
        finally:
            sys.argv = before
            self._write()

    def _submit(self, kept: Sequence[SweepRun]) -> None:
        assert self._folder is not None
        if isinstance(_config(kept[0]).launcher, SlurmLauncherConfig):
            self._submit_to_slurm(kept, self._folder)
        else:
            from launchers import ray_job

            for run in kept:
                run.handle = ray_job.submit(_config(run), run.overrides)
                run.job_id, run.folder = run.handle.job_id, run.handle.run_dir
        self._write()

    def _submit_to_slurm(self, kept: Sequence[SweepRun], folder: Path) -> None:
        """One job array of all runs that ask Slurm for the same."""
        from launchers import slurm

        groups: list[list[SweepRun]] = []
        for run in kept:
            asked = _config(run).launcher
            like = next((group for group in groups if _config(group[0]).launcher == asked), None)
            if like is None:
                groups.append([run])
            else:
                like.append(run)
        for number, group in enumerate(groups):
            files = folder / (slurm.FOLDER if len(groups) == 1 else f"{slurm.FOLDER}-{number}")
            jobs = slurm.submit([_config(run) for run in group], [run.overrides for run in group], folder=files)
            for run, job in zip(group, jobs, strict=True):
                run.handle, run.job_id, run.folder = job, job.job_id, job.run_dir

    def _wait(self, run: SweepRun) -> int:
        if _config(run).launcher.name is LauncherKind.slurm:
            from launchers.slurm_follow import follow

            return follow(run.handle, output=False)
        from launchers import ray_job

        return ray_job.follow(run.handle, output=False)

    def _write(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "number": run.number,
                "overrides": list(run.overrides),
                "folder": None if run.folder is None else str(run.folder),
                "job_id": run.job_id,
                "code": run.code,
                "cause": run.cause,
            }
            for run in self._runs
        ]
        put(self._folder / SWEEP_FILE, json.dumps({"runs": rows}, indent=2) + "\n")

    def _print_table(self) -> None:
        rows = [("run", "job", "folder")]
        rows += [(run.words(), run.job_id or "", str(run.folder or run.cause)) for run in self._runs]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        for what, job, folder in rows:
            print(f"  {what:<{widths[0]}}  {job:<{widths[1]}}  {folder}")
        print(f"relax: {len(self._runs)} runs submitted; compare them: relax compare {self._folder}")


def read_metric(folder: Path, metric: str) -> float | None:
    """A number of a run's summary.json; None where it has none there. Raises ValueError for what is no number."""
    value: Any = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    for part in metric.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"hydra.launcher.metric={metric}: {folder / SUMMARY_FILE} has no {part!r} there") from None
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"hydra.launcher.metric={metric}: it is no number in {folder / SUMMARY_FILE}")
    return value


def _config(run: SweepRun) -> RelaxConfig:
    assert run.config is not None, "a run that was refused never starts"
    return run.config


def _name_folders(runs: Sequence[SweepRun]) -> None:
    """Gives runs that would have one folder, or folders that only the time tells apart, their overrides in its name."""
    wanted = Counter(_config(run).run.dir for run in runs)
    for run in runs:
        config, label = _config(run), _label(run.swept)
        folder = config.run.dir
        if isinstance(folder, FolderByTime):
            run.config = replace(config, run=replace(config.run, dir=folder.labelled(label)))
        elif wanted[folder] > 1:
            run.config = replace(config, run=replace(config.run, dir=f"{folder}{label}"))


def _label(swept: Sequence[str]) -> str:
    """Overrides as the end of a folder's name; of many, the first and a digest of all."""
    text = re.sub(r"[^\w.,=+-]+", "-", ",".join(swept))
    if len(text) > LABEL_BYTES:
        text = f"{text[:LABEL_BYTES]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"_{text}" if text else ""


def _only_shows(run: SweepRun) -> bool:
    launcher = _config(run).launcher
    return bool(getattr(launcher, "dry_run", False) or getattr(launcher, "manifest", False))
