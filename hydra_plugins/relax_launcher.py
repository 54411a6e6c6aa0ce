"""Hydra launcher plug-in (`-m hydra/launcher=relax`): waits for the runs of a sweep and returns a metric of each.

Sweepers that choose the next runs by results, such as Optuna's, need it. Hydra finds plug-ins in the package
hydra_plugins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from relax_core.config.compose import SweepFailed
from relax_core.contracts.private_folder import private_folder

# ``metric`` is the dotted path of a run's value in its summary.json. This is not a dataclass, because Hydra loads this
# file without an entry in sys.modules.
_CONFIG = {"_target_": "hydra_plugins.relax_launcher.RelaxLauncher", "metric": "reward.last"}
ConfigStore.instance().store(group="hydra/launcher", name="relax", node=_CONFIG, provider="relax")


class RelaxLauncher(Launcher):
    """Starts all runs of a batch, waits for them, and returns the metric of each."""

    def __init__(self, metric: str) -> None:
        self._metric = metric

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Stores the arguments that Hydra passes to each launcher."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Executes one run for each list of overrides and returns their metrics; a failed run has status FAILED."""
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        private_folder(Path(str(self._config.hydra.sweep.dir)), key="hydra.sweep.dir")
        returns = [
            self._start(list(overrides), initial_job_idx + number) for number, overrides in enumerate(job_overrides)
        ]
        sweep: Any = self._task.sweep  # type: ignore[attr-defined]  # set by relax_core/config/compose.py
        runs = [one._return_value for one in returns]
        if None in runs:
            sweep.drop([run for run in runs if run is not None])
        values = sweep.settle(self._metric)
        for one, run in zip(returns, runs, strict=True):
            value = None if run is None else values[run.number]
            if value is None:
                one.status = JobStatus.FAILED
                failed = run is not None and run.folder is not None
                one.return_value = SweepFailed(f"the run in {run.folder} failed" if failed else "a run did not start")
            else:
                one.return_value = value
        return returns

    def _start(self, overrides: list[str], number: int) -> JobReturn:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        done = run_job(
            hydra_context=self._context,
            task_function=self._task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        return done
