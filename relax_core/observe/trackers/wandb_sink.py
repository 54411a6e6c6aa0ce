"""Sends a run's metrics, histograms and evaluation tables to W&B, or stores them for a later `wandb sync`."""

from __future__ import annotations

import math
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from relax_core.contracts.sink import (
    BaseSink,
    HistogramRecord,
    MetricRecord,
    Record,
    SinkConfig,
    SinkSpec,
    SinkStart,
    TextRecord,
)

ID_FILE = "wandb_run_id"  # file in the run's folder with the id of the W&B run, for a resumed run
KEY = "WANDB_API_KEY"


@dataclass(frozen=True)
class WandbConfig(SinkConfig):
    """Holds the sink's config keys.

    ``run`` is the name of the run in W&B, by default the name of the run's folder. ``key_file`` has an API key, and
    only its owner may have read access. Without ``key_file``, the key is in WANDB_API_KEY or ~/.netrc. The first
    ``rows`` rows of each evaluation become a table.
    """

    name: str = "wandb"
    project: str = "relax"
    entity: str | None = None
    run: str | None = None
    offline: bool = False
    key_file: str | None = None
    rows: int = 16


def check(config: WandbConfig) -> None:
    """Raises ValueError if the library or (unless ``offline``) the key is missing, or if others may read the key."""
    key = "tracker.sinks.wandb"
    if find_spec("wandb") is None:
        raise ValueError(f"{key} needs the package wandb: pip install 'relax-core[wandb]'.")
    if config.rows < 0:
        raise ValueError(f"{key}.rows={config.rows}: give 0 or more.")
    if config.key_file is not None:
        path = Path(config.key_file).expanduser()
        if not path.is_file():
            raise ValueError(f"{key}.key_file={config.key_file}: there is no such file.")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"{key}.key_file={config.key_file}: other users may read it. chmod 600 {config.key_file}")
    elif not config.offline and not os.environ.get(KEY) and not _in_netrc():
        raise ValueError(f"{key} needs a key: `wandb login`, {KEY}, or {key}.key_file; or offline: true.")


def _in_netrc() -> bool:
    try:
        return "wandb" in (Path.home() / ".netrc").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


class WandbSink(BaseSink):
    """Writes to one W&B run. The x axis of each metric is the step of its source, such as ``actor/step``."""

    def __init__(self, start: SinkStart, config: WandbConfig) -> None:
        import wandb

        if config.key_file is not None:
            os.environ[KEY] = Path(config.key_file).expanduser().read_text(encoding="utf-8").strip()
        self._wandb: Any = wandb
        self._rows, self._sources = config.rows, set[str]()
        id_file = start.run_dir / ID_FILE
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.run or start.run_dir.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume=None if config.offline else "allow",
            dir=str(start.run_dir),
            mode="offline" if config.offline else "online",
            config=yaml.safe_load((start.run_dir / "config.yaml").read_text(encoding="utf-8")),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )

    def write(self, batch: Sequence[Record]) -> None:
        """Logs each record."""
        for record in batch:
            source = record.kind if isinstance(record, TextRecord) else record.source
            if source not in self._sources:
                self._sources.add(source)
                self._run.define_metric(f"{source}/*", step_metric=f"{source}/step")
            values = self._values(record)
            if values:
                self._run.log({**values, f"{source}/step": record.step})

    def _values(self, record: Record) -> dict[str, Any]:
        match record:
            case MetricRecord():
                finite = ((name, value) for name, value in record.values.items() if math.isfinite(value))
                return {f"{record.source}/{name}": value for name, value in finite}
            case HistogramRecord():
                edges = [min(record.least, record.limits[0]), *record.limits]
                histogram = self._wandb.Histogram(np_histogram=(record.counts, edges))
                return {f"{record.source}/{record.name}/distribution": histogram}
            case TextRecord():
                rows = record.rows[: self._rows]
                if not rows:
                    return {}
                columns = list(dict.fromkeys(name for row in rows for name in row))
                table = self._wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])
                return {f"{record.kind}/texts": table}

    def close(self) -> None:
        """Sends the waiting records and ends the run."""
        self._run.finish()


SPEC = SinkSpec(
    name="wandb",
    summary="Weights & Biases, online or for a later `wandb sync`",
    config=WandbConfig,
    open=WandbSink,
    check=check,
)
