"""The child process of `relax_core.run`: ``python -m relax_core.api.run_child STAGING``.

The process is the run's supervisor, as in a run from the command line. STAGING is a private folder of the parent
process. The child reads the request from STAGING, and writes errors of the configuration, or the location of the run's
folder, to STAGING.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from relax_core.api.function_reward import FUNCTION_FILE, write_private
from relax_core.config.choices import LauncherKind
from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import without_secrets
from relax_core.config.redaction import shown
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.private_folder import set_private_files
from relax_core.observe.event_log import event_files
from relax_core.registry import with_file

REQUEST, LOCATION, PROBLEMS = "request.json", "location.json", "problems.json"
USAGE, INTERRUPTED = 2, 130


def main() -> int:
    """Executes the run and returns its exit code, or 2 for a mistake in the configuration."""
    staging = Path(sys.argv[1])
    set_private_files()
    del os.environ["PYTHONUNBUFFERED"]  # the processes of the run must not inherit this variable
    request = json.loads((staging / REQUEST).read_text(encoding="utf-8"))
    try:
        request["words"] = without_secrets(request["words"])
        # The summary records these words as the run's command line.
        sys.argv = ["relax", *map(shown, request["words"])]
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
        """Writes the run's files, including the reward function, so that a resumed run can load it."""
        if request["function"]:
            write_private(folder / FUNCTION_FILE, (staging / FUNCTION_FILE).read_text(encoding="utf-8"))
        save_config(config, folder)
        _write_location(staging / LOCATION, folder)

    return run_in_folder(config, make=make, prepare=prepare)


def _config(request: dict[str, Any], staging: Path) -> RelaxConfig:
    """Composes and checks the configuration of the request. Raises `ConfigError` for a mistake."""
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
    return config


def _write_location(file: Path, folder: Path) -> None:
    location = {"folder": str(folder), "events": event_files(folder)}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(location), encoding="utf-8")
    os.replace(partial, file)


if __name__ == "__main__":
    sys.exit(main())
