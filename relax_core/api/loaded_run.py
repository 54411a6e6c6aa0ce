"""Reads the summary, metric curves, evaluation answers and samples of a run, as lists, dicts or data frames."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_core.bus.ledger_reader import LedgerFile, SampleHistory
from relax_core.observe.event_log import EVAL, read_metrics, read_texts, without_undone
from relax_core.observe.summary import SUMMARY_FILE

LEDGER = "ledger.sqlite"
CONFIG = "config.yaml"


class Summary(Mapping[str, Any]):
    """Holds the content of a run's summary.json (docs/summary.md) as a mapping.

    ``folder`` is the run's folder.
    """

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self._values = dict(values)

    @property
    def outcome(self) -> str:
        """Returns "finished", "stopped", or "failed: " and the first cause."""
        return str(self["outcome"])

    @property
    def steps(self) -> int:
        """Returns the number of finished train steps."""
        return int(self["steps"])

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Summary of {self.folder}: {self.outcome}, {self.steps} steps>"


class LoadedRun:
    """Reads a run's folder.

    The run may still be live: each method reads its file when it is called. ``summary`` is read once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._summary: Summary | None = None

    @property
    def summary(self) -> Summary | None:
        """Returns the summary, or None if the run is live or failed before the first report."""
        file = self.folder / SUMMARY_FILE
        if self._summary is None and file.exists():
            self._summary = Summary(self.folder, json.loads(file.read_text(encoding="utf-8")))
        return self._summary

    def curves(self) -> list[dict[str, float]]:
        """Returns one dict per step: "step" and the metrics of docs/metrics.md by name, such as "actor/reward".

        Records that a resume has undone are left out. If a source has several records for a step, the last value of
        each metric is used.
        """
        points: dict[int, dict[str, float]] = {}
        for record in without_undone(read_metrics(self.folder)):
            point = points.setdefault(record.step, {"step": record.step})
            point.update({f"{record.source}/{name}": value for name, value in record.values.items()})
        return [points[step] for step in sorted(points)]

    def answers(self) -> list[dict[str, Any]]:
        """Returns one dict per recorded evaluation answer: step, prompt, answer (the reference), response, exact."""
        texts = [record for record in read_texts(self.folder) if record.kind == EVAL]
        return [{"step": record.step, **answer} for record in texts for answer in record.rows]

    def samples(self, **filters: str | int) -> list[dict[str, Any]]:
        """Returns one dict per sample, in order of issue, from the run's ledger.

        The keys of a dict are uid, group, state ("trained", "dropped", …), step, version, reason, reward,
        finish_reason, and the parts of the reward as "part/NAME". ``filters`` are uid, group, step or reason, as for
        `relax lineage`. Raises FileNotFoundError if the run has no ledger yet.
        """
        with LedgerFile(self.folder / LEDGER) as ledger:
            return [_sample(history) for history in ledger.samples(filters)]

    def frame(self, what: str, **filters: str | int) -> Any:
        """Returns ``what`` ("curves", "answers" or "samples") as a data frame."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                f"frame({what!r}) needs pandas: pip install pandas. {what}() gives plain lists."
            ) from error
        assert what in ("curves", "answers", "samples"), what
        return pandas.DataFrame(getattr(self, what)(**filters))

    def __repr__(self) -> str:
        return f"<Run in {self.folder}>"


def load_run(folder: str | Path) -> LoadedRun:
    """Returns a reader of the run in ``folder``. Raises FileNotFoundError if the folder is not a run's folder."""
    path = Path(folder).expanduser().absolute()
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path}: it has no {CONFIG}, so it is not the folder of a run.")
    return LoadedRun(path)


def _sample(history: SampleHistory) -> dict[str, Any]:
    in_force = [event for event in history.events if not event.undone]
    last = in_force[-1] if in_force else None
    made = next((event.made for event in reversed(history.events) if event.made is not None), None)
    return {
        "uid": history.uid,
        "group": history.group,
        "state": history.state,
        "step": last.step if last is not None else None,
        "version": last.version if last is not None else None,
        "reason": last.reason if last is not None else "",
        "reward": made.reward if made is not None else None,
        "finish_reason": made.ended if made is not None else None,
        **({f"part/{name}": value for name, value in made.parts.items()} if made is not None else {}),
    }
