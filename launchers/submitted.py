"""Writes and reads the files of a submitted run: its configuration and its result.

`submitted.yaml` is the whole configuration at the time of submission. Later edits do not affect a job that waits in a
queue. `end.json` contains the run's exit code, so the cluster's accounting database is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launchers.local import make_run_folder, save_config
from relax_core.config.compose import config_from_yaml
from relax_core.config.saved_config import to_yaml_with_secrets
from relax_core.config.schema import RelaxConfig
from relax_core.plan.plan_command import plan_run, save_plan

CONFIG_FILE = "submitted.yaml"
END_FILE = "end.json"
JOB_FILE = "job.json"
OVERRIDES = "# overrides: "


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """Holds the result of a submitted run.

    ``code`` is the run's exit code. ``cause`` is the reason as text, if the run could not report a reason. ``attempt``
    names the job and the number of its start, because a job may be started several times.
    """

    code: int
    cause: str
    attempt: str


def make_folder(config: RelaxConfig, overrides: Sequence[str]) -> RelaxConfig:
    """Plans the run, makes its folder with config.yaml, plan.json and submitted.yaml, and returns the configuration.

    ``run.dir`` of the returned configuration is the new folder. Raises ValueError if the plan cannot work, and OSError
    if the folder cannot be written.
    """
    plan = plan_run(config)
    folder = make_run_folder(config)
    save_config(config, folder)
    save_plan(plan, folder)
    config = replace(config, run=replace(config.run, dir=str(folder), panel=False))  # the job has no terminal
    (folder / END_FILE).unlink(missing_ok=True)  # written by an earlier run in this folder
    file = folder / CONFIG_FILE
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(submitted_text(config, overrides))
    return config


def submitted_text(config: RelaxConfig, overrides: Sequence[str]) -> str:
    """Returns the text of submitted.yaml, which contains the configuration's secrets."""
    return f"{OVERRIDES}{json.dumps(list(overrides))}\n{to_yaml_with_secrets(config)}"


def read_submitted(text: str) -> tuple[RelaxConfig, list[str]]:
    """Parses submitted.yaml. Returns the typed configuration, and the overrides of the submitted command line."""
    first = text.split("\n", 1)[0]
    overrides = json.loads(first.removeprefix(OVERRIDES)) if first.startswith(OVERRIDES) else []
    return config_from_yaml(text), overrides


def write_end(folder: Path, end: RunEnd) -> None:
    """Writes end.json into the run's folder, completely or not at all."""
    write_atomically(folder / END_FILE, json.dumps({"code": end.code, "cause": end.cause, "attempt": end.attempt}))


def read_end(folder: Path) -> RunEnd | None:
    """Returns the result of the run, or None if the run has not ended or could not write end.json."""
    file = folder / END_FILE
    return RunEnd(**json.loads(file.read_text())) if file.is_file() else None


def write_atomically(file: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
