"""A metrics sink that writes every metric as a line of one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.contracts.sink import BaseSink, MetricRecord, Record, SinkConfig, SinkSpec, SinkStart


@dataclass(frozen=True)
class CsvConfig(SinkConfig):
    name: str = "csv"
    file: str = "metrics.csv"  # a path below the run's folder
    sources: tuple[str, ...] = ("actor", "rollout", "eval")  # sources whose metrics are written


def check(config: CsvConfig) -> None:
    if Path(config.file).is_absolute():
        raise ValueError(f"tracker.sinks.csv_sink.file={config.file}: give a path below the run's folder.")


class CsvSink(BaseSink):
    def __init__(self, start: SinkStart, config: CsvConfig) -> None:
        path = start.run_dir / config.file
        is_new = not path.exists()
        self.sources = config.sources
        self.file = path.open("a", newline="", encoding="utf-8")
        self.rows = csv.writer(self.file)
        if is_new:
            self.rows.writerow(("time_s", "source", "step", "name", "value"))

    def write(self, batch: Sequence[Record]) -> None:
        for record in batch:
            if isinstance(record, MetricRecord) and record.source in self.sources:
                for name, value in record.values.items():
                    self.rows.writerow((record.time_s, record.source, record.step, name, value))

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


SPEC = SinkSpec(name="csv", summary="one CSV line for each number", config=CsvConfig, open=CsvSink, check=check)
