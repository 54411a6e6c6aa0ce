"""Starts the runs of a sweep (-m): one after the other on this machine, or all at once on a cluster."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launchers.local import make_run_folder
from launchers.submitted import write_atomically
from relax_core.config.choices import LauncherKind
from relax_core.config.errors import ConfigError
from relax_core.config.schema import FolderByTime, RelaxConfig, SlurmLauncherConfig
from relax_core.contracts.output_path import numbered
from relax_core.contracts.private_folder import private_folder
from relax_core.observe.summary import SUMMARY_FILE
from relax_core.plan.plan_command import plan_run

SWEEP_FILE = "sweep.json"
USAGE = 2
STOPPED = (129, 130, 143)  # exit codes of a run that SIGHUP, Ctrl-C or SIGTERM stopped
LABEL_BYTES = 100  # limit for the overrides in a folder's name, which may have 255 bytes


@dataclass(kw_only=True)
class SweepRun:
    """Describes one run of a sweep.

    ``number`` counts the runs from 0. ``swept`` are the overrides that differ between the runs. ``folder`` is None for
    a refused run. ``job_id`` is set when the run is submitted to a cluster. ``code`` is the exit code, or None before
    the end of the run. ``cause`` says why the run was refused. ``handle`` is the submitted job.
    """

    number: int
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    config: RelaxConfig | None
    folder: Path | None = None
    job_id: str | None = None
    code: int | None = None
    cause: str = ""
    handle: Any = None

    def describe(self) -> str:
        """Returns the name of the run in messages: the swept overrides, or the number."""
        return " ".join(self.swept) or f"number {self.number + 1}"


class Sweep:
    """Collects the runs of a sweep and starts them together.

    If one run is refused, no run is started. ``launch`` executes one run on this machine and returns its exit code.
    """

    def __init__(self, launch: Callable[[RelaxConfig], int]) -> None:
        self._launch = launch
        self._runs: list[SweepRun] = []
        self._folder: Path | None = None

    def take(
        self, config: RelaxConfig, overrides: Sequence[str], folder: Path, *, swept: Sequence[str]
    ) -> SweepRun | None:
        """Adds a run with a valid configuration.

        If the plan cannot work, records the refusal and returns None. ``folder`` is Hydra's folder of this sweep.
        """
        try:
            if config.launcher.name is not LauncherKind.ray_job:  # the model and the data of a Ray job are remote
                plan_run(config)
        except ConfigError as error:
            self.refuse(overrides, folder, swept=swept, error=error)
            return None
        return self._keep(SweepRun(number=0, overrides=tuple(overrides), swept=tuple(swept), config=config), folder)

    def refuse(self, overrides: Sequence[str], folder: Path, *, swept: Sequence[str], error: ConfigError) -> None:
        """Prints and records why a run cannot start."""
        run = SweepRun(number=0, overrides=tuple(overrides), swept=tuple(swept), config=None, code=USAGE)
        run.cause = error.problems[0]
        self._keep(run, folder)
        print(f"relax: run {run.describe()} of the sweep is refused", file=sys.stderr)
        print(error.report(), file=sys.stderr)

    def _keep(self, run: SweepRun, folder: Path) -> SweepRun:
        if self._folder is None:
            self._folder = next(candidate for candidate in numbered(folder) if not (candidate / SWEEP_FILE).exists())
        run.number = len(self._runs)
        self._runs.append(run)
        return run

    def drop(self, runs: Sequence[SweepRun]) -> None:
        """Refuses runs that a sweeper requested together with a refused run."""
        for run in runs:
            run.code, run.cause = USAGE, "another run that was requested together with it is refused"

    def settle(self, metric: str) -> dict[int, float | None]:
        """Starts the collected runs and waits for their ends. Returns run number → value of ``metric``.

        ``metric`` is a dotted path in summary.json, e.g. reward.last or eval.-1.exact. The value is None for a refused
        or failed run.
        """
        self._start()
        for run in self._runs:
            if run.code is None and run.job_id is not None:
                run.code = self._wait(run)
        return {
            run.number: read_metric(run.folder, metric) if run.code == 0 and run.folder is not None else None
            for run in self._runs
        }

    def finish(self) -> int:
        """Starts the collected runs. Returns the first exit code that is not 0, or 0.

        Prints a table of the submitted runs, or a comparison of the runs on this machine.
        """
        kept = [run for run in self._runs if run.code is None and run.job_id is None]
        refused = [run for run in self._runs if run.config is None]
        if refused and (kept or len(refused) == len(self._runs)):
            print(
                f"relax: {len(refused)} of the sweep's {len(self._runs)} runs are refused, so none was started",
                file=sys.stderr,
            )
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
        """Removes the folder that Hydra made but the sweep does not use."""
        assert self._folder is not None
        (self._folder / "multirun.yaml").unlink(missing_ok=True)
        with suppress(OSError):
            self._folder.rmdir()

    def _start(self) -> None:
        """Executes the runs for this machine one after the other, and submits all other runs together."""
        kept = [run for run in self._runs if run.job_id is None and run.code is None]
        _name_folders(kept)
        here = [run for run in kept if _config(run).launcher.name is LauncherKind.local or _only_prints(run)]
        for run in here:
            self._run_here(run, count=len(here))
        if len(here) < len(kept):
            self._submit([run for run in kept if run.code is None])

    def _run_here(self, run: SweepRun, *, count: int) -> None:
        run.code = next((earlier.code for earlier in self._runs if earlier.code in STOPPED), None)
        if run.code is not None:
            run.cause = "the sweep was stopped before"
            print(f"relax: run {run.describe()} is not started, because the sweep was stopped", file=sys.stderr)
            return
        print(f"relax: run {run.number + 1} of the sweep's {max(count, run.number + 1)}: {run.describe()}", flush=True)
        config = _config(run)
        before, sys.argv = sys.argv, ["relax", *run.overrides]  # the run's summary records sys.argv as its command line
        try:
            if _only_prints(run):
                run.code = self._launch(config)
                return
            run.folder = make_run_folder(config)
            run.code = self._launch(replace(config, run=replace(config.run, dir=str(run.folder))))
            if run.code == USAGE:
                run.cause = "refused at its start"
            with suppress(OSError):
                run.folder.rmdir()  # succeeds only for an empty folder, which a refused run leaves
        finally:
            sys.argv = before
            self._write()

    def _submit(self, kept: Sequence[SweepRun]) -> None:
        assert self._folder is not None
        if isinstance(_config(kept[0]).launcher, SlurmLauncherConfig):
            self._submit_to_slurm(kept, self._folder)
        else:
            from launchers.ray_job import job_client

            for run in kept:
                run.handle = job_client.submit(_config(run), run.overrides)
                run.job_id, run.folder = run.handle.job_id, run.handle.run_dir
        self._write()

    def _submit_to_slurm(self, kept: Sequence[SweepRun], folder: Path) -> None:
        """Submits one job array for all runs with equal launcher configurations."""
        from launchers.slurm import sbatch

        groups: list[list[SweepRun]] = []
        for run in kept:
            asked = _config(run).launcher
            like = next((group for group in groups if _config(group[0]).launcher == asked), None)
            if like is None:
                groups.append([run])
            else:
                like.append(run)
        for number, group in enumerate(groups):
            files = folder / (sbatch.FOLDER if len(groups) == 1 else f"{sbatch.FOLDER}-{number}")
            jobs = sbatch.submit([_config(run) for run in group], [run.overrides for run in group], folder=files)
            for run, job in zip(group, jobs, strict=True):
                run.handle, run.job_id, run.folder = job, job.job_id, job.run_dir

    def _wait(self, run: SweepRun) -> int:
        if _config(run).launcher.name is LauncherKind.slurm:
            from launchers.slurm.follow import follow

            return follow(run.handle, output=False)
        from launchers.ray_job import job_client

        return job_client.follow(run.handle, output=False)

    def _write(self) -> None:
        assert self._folder is not None
        private_folder(self._folder, key="hydra.sweep.dir")
        runs = [
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
        write_atomically(self._folder / SWEEP_FILE, json.dumps({"runs": runs}, indent=2) + "\n")

    def _print_table(self) -> None:
        lines = [("run", "job", "folder")]
        lines += [(run.describe(), run.job_id or "", str(run.folder or run.cause)) for run in self._runs]
        widths = [max(len(cells[column]) for cells in lines) for column in range(2)]
        for run, job, folder in lines:
            print(f"  {run:<{widths[0]}}  {job:<{widths[1]}}  {folder}")
        print(f"relax: {len(self._runs)} runs submitted; compare them: relax compare {self._folder}")


def read_metric(folder: Path, metric: str) -> float | None:
    """Returns the number at the dotted path ``metric`` of summary.json, or None if the value is null.

    Raises ValueError if the path does not exist or its value is not a number.
    """
    value: Any = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    for part in metric.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"hydra.launcher.metric={metric}: {folder / SUMMARY_FILE} has no {part!r} there") from None
    if value is not None and not isinstance(value, int | float):
        raise ValueError(f"hydra.launcher.metric={metric}: it is not a number in {folder / SUMMARY_FILE}")
    return value


def _config(run: SweepRun) -> RelaxConfig:
    assert run.config is not None, "a run that was refused never starts"
    return run.config


def _name_folders(runs: Sequence[SweepRun]) -> None:
    """Appends the swept overrides to folder names that would be equal or would differ only in the time."""
    wanted = Counter(_config(run).run.dir for run in runs)
    for run in runs:
        config, label = _config(run), _label(run.swept)
        folder = config.run.dir
        if isinstance(folder, FolderByTime):
            run.config = replace(config, run=replace(config.run, dir=folder.labelled(label)))
        elif wanted[folder] > 1:
            run.config = replace(config, run=replace(config.run, dir=f"{folder}{label}"))


def _label(swept: Sequence[str]) -> str:
    """Returns the end of a folder's name: the overrides, or their first `LABEL_BYTES` bytes and a digest."""
    text = re.sub(r"[^\w.,=+-]+", "-", ",".join(swept))
    if len(text) > LABEL_BYTES:
        text = f"{text[:LABEL_BYTES]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f"_{text}" if text else ""


def _only_prints(run: SweepRun) -> bool:
    """Returns whether the launcher only prints a script or a manifest, and starts no run."""
    return bool(getattr(_config(run).launcher, "dry_run", False))
