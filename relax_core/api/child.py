"""The process of a run that `relax_core.run` started: ``python -m relax_core.api.child STAGING PARENT``.

It is what the command line is, a supervisor; STAGING, a folder of the parent's alone, has the request, and takes the
answers that a program needs: what is wrong with the configuration, and where the run is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from relax_core.api.function_reward import FUNCTION_FILE, write_private
from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import LauncherKind, RelaxConfig
from relax_core.control.host.subreaper import PR_SET_PDEATHSIG, prctl
from relax_core.observe.service.sinks import METRICS_FILE
from relax_core.registry import with_file

REQUEST, PLACE, PROBLEMS = "request.json", "place.json", "problems.json"
USAGE, INTERRUPTED = 2, 130


def main() -> int:
    """Returns the run's exit code, or 2 for a mistake in the configuration."""
    staging, parent = Path(sys.argv[1]), int(sys.argv[2])
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # a parent that is killed stops its run
    if os.getppid() != parent:
        return INTERRUPTED
    del os.environ["PYTHONUNBUFFERED"]  # of this process alone
    request = json.loads((staging / REQUEST).read_text(encoding="utf-8"))
    sys.argv = ["relax", *request["words"]]  # which the summary tells
    try:
        config = _config(request, staging)
    except ConfigError as error:
        (staging / PROBLEMS).write_text(json.dumps(error.problems), encoding="utf-8")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    from launchers.local import make_run_folder, run_in_folder, save_config

    def make() -> Path:
        folder = make_run_folder(config)
        if request["function"]:
            config.reward = with_file("reward", config.reward, str(folder / FUNCTION_FILE))
        return folder

    def prepare(folder: Path) -> None:
        """The folder is this run's now. It keeps the function, also for a run that goes on from it."""
        if request["function"]:
            write_private(folder / FUNCTION_FILE, (staging / FUNCTION_FILE).read_text(encoding="utf-8"))
        save_config(config, folder)
        _tell_place(staging / PLACE, folder)

    return run_in_folder(config, make=make, prepare=prepare)


def _config(request: dict[str, Any], staging: Path) -> RelaxConfig:
    """Raises `ConfigError`."""
    from relax_core.preflight import CHECKS, settle

    function = ["reward=plugin", f"reward.name={staging / FUNCTION_FILE}"] if request["function"] else []
    config = load_config([*request["words"], *function], checks=CHECKS, settle=settle)
    if config.plan is not False:
        raise ConfigError(
            [f"plan={config.plan}: relax_core.run starts a run. On the command line: relax plan=true ..."]
        )
    if config.launcher.name is not LauncherKind.local:
        name = config.launcher.name.value
        raise ConfigError(
            [f"launcher={name}: relax_core.run starts runs here. On the command line: relax launcher={name}"]
        )
    if request["on_step"] and not config.tracker.jsonl:
        raise ConfigError(["tracker.jsonl=false with on_step: the steps' numbers are read from that file. Drop it."])
    return config


def _tell_place(file: Path, folder: Path) -> None:
    metrics = folder / METRICS_FILE
    place = {"folder": str(folder), "metrics_bytes": metrics.stat().st_size if metrics.exists() else 0}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(place), encoding="utf-8")
    os.replace(partial, file)


if __name__ == "__main__":
    sys.exit(main())
