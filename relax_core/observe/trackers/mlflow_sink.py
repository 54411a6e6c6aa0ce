"""Writes a run's metrics to an MLflow server, or to a database file in the run's folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import yaml

from relax_core.contracts.sink import BaseSink, MetricRecord, Record, SinkConfig, SinkSpec, SinkStart, TextRecord

ID_FILE = "mlflow_run_id"  # file in the run's folder with the id of the MLflow run, for a resumed run
DATABASE, FILES = "mlflow.db", "mlflow_files"  # database in the run's folder, if no uri is set
MAX_METRICS, MAX_PARAMS, MAX_PARAM_CHARACTERS = 1000, 100, 500  # MLflow's limits for a batch and for a value
_INVALID_CHARACTERS = re.compile(r"[^\w\-. /]")  # MLflow rejects these characters in a name


@dataclass(frozen=True)
class MlflowConfig(SinkConfig):
    """Holds the sink's config keys.

    ``uri`` is the address of the tracking server, by default a database file in the run's folder. Show the file with
    ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``. ``run`` is the name of the run in MLflow, by default the
    name of the run's folder.
    """

    name: str = "mlflow"
    uri: str | None = None
    experiment: str = "relax"
    run: str | None = None


def check(config: MlflowConfig) -> None:
    """Raises ValueError if a library is missing or ``uri`` is not supported."""
    key = "tracker.sinks.mlflow"
    missing = [name for name in ("mlflow", "sqlalchemy", "alembic") if find_spec(name) is None]
    if missing:
        raise ValueError(f"{key} needs {', '.join(missing)}: pip install 'relax-core[mlflow]'.")
    if config.uri is not None and not config.uri.startswith(("http://", "https://", "sqlite:///", "databricks")):
        raise ValueError(f"{key}.uri={config.uri}: give http(s)://…, sqlite:///FILE or databricks.")


class MlflowSink(BaseSink):
    """Writes to one MLflow run. A resumed run continues the same MLflow run."""

    def __init__(self, start: SinkStart, config: MlflowConfig) -> None:
        from mlflow import MlflowClient

        uri = config.uri or f"sqlite:///{(start.run_dir / DATABASE).absolute()}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        id_file = start.run_dir / ID_FILE
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8").strip()
        else:
            self._run_id = self._new_run(start, config)
            id_file.write_text(self._run_id, encoding="utf-8")

    def _new_run(self, start: SinkStart, config: MlflowConfig) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(config.experiment)
        # Without this, MLflow without a server would put the files into the current folder.
        files = (start.run_dir / FILES).absolute().as_uri() if config.uri is None else None
        experiment = found.experiment_id if found else self._client.create_experiment(config.experiment, files)
        run = self._client.create_run(experiment, run_name=config.run or start.run_dir.name)
        values = yaml.safe_load((start.run_dir / "config.yaml").read_text(encoding="utf-8"))
        params = [
            Param(_INVALID_CHARACTERS.sub("_", key), value[:MAX_PARAM_CHARACTERS]) for key, value in _flat(values)
        ]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[first : first + MAX_PARAMS])
        return str(run.info.run_id)

    def write(self, batch: Sequence[Record]) -> None:
        """Logs the metrics, and logs the texts of an evaluation as a JSON artifact."""
        from mlflow.entities import Metric

        metrics = (
            Metric(
                _INVALID_CHARACTERS.sub("_", f"{record.source}/{name}"), value, round(1e3 * record.time_s), record.step
            )
            for record in batch
            if isinstance(record, MetricRecord)
            for name, value in record.values.items()
            if math.isfinite(value)
        )
        while part := list(islice(metrics, MAX_METRICS)):
            self._client.log_batch(self._run_id, metrics=part)
        for record in batch:
            if isinstance(record, TextRecord):
                text = json.dumps(record.rows, ensure_ascii=False, indent=1)
                self._client.log_text(self._run_id, text, f"texts/{record.kind}_{record.step}.json")

    def close(self) -> None:
        """Marks the MLflow run as finished. A resumed run continues it anyway."""
        self._client.set_terminated(self._run_id)


def _flat(values: Any, before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)


SPEC = SinkSpec(
    name="mlflow",
    summary="an MLflow server, or a database file in the run's folder",
    config=MlflowConfig,
    open=MlflowSink,
    check=check,
)
