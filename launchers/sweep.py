"""The runs of a sweep (-m): on this machine one after the other; on a cluster submitted together."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.choose import launch
from launchers.local import run_folder
from launchers.submitted import put
from relax_core.config.schema import LauncherConfig, LauncherKind, RelaxConfig, SlurmLauncherConfig
from relax_core.observe.summary import SUMMARY_FILE

SWEEP_FILE = "sweep.json"
USAGE = 2
STOPPED = (130, 143)  # by Ctrl-C or SIGTERM


@dataclass(kw_only=True)
class SweepRun:
    """``number``: in the sweep, from 0. ``job_id``: None until it was submitted, and on this machine. ``code``: None
    until it has ended."""

    number: int
    overrides: tuple[str, ...]
    config: RelaxConfig
    folder: Path
    job_id: str | None = None
    code: int | None = None
    handle: Any = None


class Sweep:
    """``folder``: Hydra's of this sweep; which run is where is written into it. ``launch``: runs one here."""

    def __init__(self, launch: Callable[[RelaxConfig], int] = launch) -> None:
        self._launch = launch
        self._runs: list[SweepRun] = []
        self._folder: Path | None = None

    def take(self, config: RelaxConfig, overrides: Sequence[str], folder: Path) -> SweepRun:
        """Runs it here, to its end; or keeps it until all runs that belong together are known."""
        self._folder = folder
        run = SweepRun(number=len(self._runs), overrides=tuple(overrides), config=config, folder=Path(config.run.dir))
        self._runs.append(run)
        if config.launcher.name is LauncherKind.local or _only_shows(config.launcher):
            run.code = next((earlier.code for earlier in self._runs if earlier.code in STOPPED), None)
            if run.code is not None:
                print("relax: not started, since the sweep was stopped", file=sys.stderr)
                return run
            run.folder = run_folder(config)
            before, sys.argv = sys.argv, ["relax", *overrides]  # what its summary says it was started with
            try:
                run.code = self._launch(config)
            finally:
                sys.argv = before
            self._write()
        return run

    def settle(self, metric: str) -> dict[int, float | None]:
        """Submits what was kept, waits for the end of all, and returns each run's ``metric``: a dotted place in its
        summary.json, e.g. reward.last or eval.-1.exact. None for a run that failed."""
        self._submit()
        for run in self._runs:
            if run.code is None and run.job_id is not None:
                run.code = self._wait(run)
        return {run.number: read_metric(run.folder, metric) if run.code == 0 else None for run in self._runs}

    def finish(self) -> int:
        """Submits what was kept and prints a table; after runs on this machine their comparison. Returns the exit code:
        the first that is not 0."""
        try:
            self._submit()
        except (RuntimeError, OSError, ValueError) as error:
            print(f"relax: {error}", file=sys.stderr)
            return USAGE
        if any(run.job_id is not None for run in self._runs):
            self._print_table()
        elif sum((run.folder / SUMMARY_FILE).is_file() for run in self._runs) > 1:
            from relax_core.tools.compare import show

            assert self._folder is not None
            show([self._folder])
        return next((run.code for run in self._runs if run.code), 0)

    def _submit(self) -> None:
        kept = [run for run in self._runs if run.job_id is None and run.code is None]
        if not kept:
            return
        assert self._folder is not None
        if isinstance(kept[0].config.launcher, SlurmLauncherConfig):
            self._submit_to_slurm(kept, self._folder)
        else:
            from launchers import ray_job

            for run in kept:
                run.handle = ray_job.submit(run.config, run.overrides)
                run.job_id, run.folder = run.handle.job_id, run.handle.run_dir
        self._write()

    def _submit_to_slurm(self, kept: Sequence[SweepRun], folder: Path) -> None:
        """One job array of all runs that ask Slurm for the same."""
        from launchers import slurm

        groups: list[list[SweepRun]] = []
        for run in kept:
            like = next((group for group in groups if group[0].config.launcher == run.config.launcher), None)
            if like is None:
                groups.append([run])
            else:
                like.append(run)
        for number, group in enumerate(groups):
            files = folder / (slurm.FOLDER if len(groups) == 1 else f"{slurm.FOLDER}-{number}")
            jobs = slurm.submit([run.config for run in group], [run.overrides for run in group], folder=files)
            for run, job in zip(group, jobs, strict=True):
                run.handle, run.job_id, run.folder = job, job.job_id, job.run_dir

    def _wait(self, run: SweepRun) -> int:
        if run.config.launcher.name is LauncherKind.slurm:
            from launchers.slurm_follow import follow

            return follow(run.handle, output=False)
        from launchers import ray_job

        return ray_job.follow(run.handle, output=False)

    def _write(self) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        rows = [
            {"number": run.number, "overrides": list(run.overrides), "folder": str(run.folder), "job_id": run.job_id}
            for run in self._runs
        ]
        put(self._folder / SWEEP_FILE, json.dumps({"runs": rows}, indent=2) + "\n")

    def _print_table(self) -> None:
        rows = [("run", "job", "folder")]
        rows += [(" ".join(run.overrides), run.job_id or "", str(run.folder)) for run in self._runs]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        for what, job, folder in rows:
            print(f"  {what:<{widths[0]}}  {job:<{widths[1]}}  {folder}")
        print(
            f"relax: {len(self._runs)} runs submitted; compare them: python -m relax_core.tools.compare {self._folder}"
        )


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


def _only_shows(launcher: LauncherConfig) -> bool:
    return bool(getattr(launcher, "dry_run", False) or getattr(launcher, "manifest", False))
