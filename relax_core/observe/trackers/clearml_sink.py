"""Sends a run's metrics to a ClearML server, or stores the metrics for a later import."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from relax_core.contracts.sink import BaseSink, MetricRecord, Record, SinkConfig, SinkSpec, SinkStart, TextRecord

FOLDER = "clearml"  # in the run's folder, with offline=true


@dataclass(frozen=True)
class ClearmlConfig(SinkConfig):
    """Holds the sink's config keys. ``task`` is the name of the task, by default the name of the run's folder."""

    name: str = "clearml"
    project: str = "relax"
    task: str | None = None
    offline: bool = False


def check(config: ClearmlConfig) -> None:
    """Raises ValueError if the library is missing, or if the credentials are missing and ``offline`` is False."""
    key = "tracker.sinks.clearml"
    if find_spec("clearml") is None:
        raise ValueError(f"{key} needs the package clearml: pip install 'relax-core[clearml]'.")
    known = os.environ.get("CLEARML_API_ACCESS_KEY") or (Path.home() / "clearml.conf").is_file()
    if not config.offline and not known:
        raise ValueError(f"{key} needs `clearml-init` or CLEARML_API_ACCESS_KEY; or offline: true.")


class ClearmlSink(BaseSink):
    """Writes to one ClearML task. A resumed run creates a new task.

    The metrics of the new task continue at the resumed step.
    """

    def __init__(self, start: SinkStart, config: ClearmlConfig) -> None:
        if config.offline:
            os.environ["CLEARML_CACHE_DIR"] = str(start.run_dir / FOLDER)
        from clearml import Task

        if config.offline:
            Task.set_offline(offline_mode=True)
        # Without this, a thread starts git while the library forks. The fork inherits the pipe to git, so close() waits
        # 300 s.
        Task.force_store_standalone_script(force=True)
        self._task: Any = Task.init(
            project_name=config.project,
            task_name=config.task or start.run_dir.name,
            reuse_last_task_id=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        values = yaml.safe_load((start.run_dir / "config.yaml").read_text(encoding="utf-8"))
        self._task.connect_configuration(values, name="config.yaml")
        self._logger: Any = self._task.get_logger()

    def write(self, batch: Sequence[Record]) -> None:
        """Reports the metrics as scalars, and the texts of an evaluation as text."""
        for record in batch:
            if isinstance(record, MetricRecord):
                for name, value in record.values.items():
                    if math.isfinite(value):
                        self._logger.report_scalar(record.source, name, value, iteration=record.step)
            elif isinstance(record, TextRecord):
                self._logger.report_text(json.dumps(record.rows, ensure_ascii=False), print_console=False)

    def close(self) -> None:
        """Ends the task."""
        self._task.close()


SPEC = SinkSpec(
    name="clearml",
    summary="a ClearML server, or a folder for a later import",
    config=ClearmlConfig,
    open=ClearmlSink,
    check=check,
)
