"""A run that another process starts later: what it is, in its folder, and how it ended.

`submitted.yaml` is the whole configuration as it was when the run was submitted: what is edited meanwhile does not
reach a job that waits in a queue. `end.json` is the run's last word, which needs no accounting of any cluster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launchers.local import make_run_folder, save_config
from relax_core.config.compose import config_from_yaml
from relax_core.config.saved import to_whole_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.plan.plan_command import plan_run, save_plan

CONFIG_FILE = "submitted.yaml"
END_FILE = "end.json"
JOB_FILE = "job.json"
_OVERRIDES = "# overrides: "


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """``code``: the run's own exit code. ``cause``: in words where the run could not say it itself. ``attempt``: of
    which job and which start of it this is the end."""

    code: int
    cause: str
    attempt: str


def make_folder(config: RelaxConfig, overrides: Sequence[str]) -> RelaxConfig:
    """Plans, and makes the run's folder with config.yaml, plan.json and `submitted.yaml` in it. Returns the
    configuration with that folder. Raises ValueError for a plan that cannot work, OSError for a folder that cannot be
    written."""
    plan = plan_run(config)
    folder = make_run_folder(config)
    save_config(config, folder)
    save_plan(plan, folder)
    config = replace(config, run=replace(config.run, dir=str(folder), panel=False))  # nobody looks at its terminal
    (folder / END_FILE).unlink(missing_ok=True)  # of the run that this one goes on with
    file = folder / CONFIG_FILE
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(submitted_text(config, overrides))
    return config


def submitted_text(config: RelaxConfig, overrides: Sequence[str]) -> str:
    """What `submitted.yaml` holds. It has the configuration's secrets in it."""
    return f"{_OVERRIDES}{json.dumps(list(overrides))}\n{to_whole_yaml(config)}"


def read_submitted(text: str) -> tuple[RelaxConfig, list[str]]:
    """The configuration in `submitted.yaml`, typed, and the overrides that it was made from."""
    first = text.split("\n", 1)[0]
    overrides = json.loads(first.removeprefix(_OVERRIDES)) if first.startswith(_OVERRIDES) else []
    return config_from_yaml(text), overrides


def write_end(folder: Path, end: RunEnd) -> None:
    """Whole or not at all."""
    put(folder / END_FILE, json.dumps({"code": end.code, "cause": end.cause, "attempt": end.attempt}))


def read_end(folder: Path) -> RunEnd | None:
    """None where the run has not ended, or could not say so."""
    file = folder / END_FILE
    return RunEnd(**json.loads(file.read_text())) if file.is_file() else None


def put(file: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
