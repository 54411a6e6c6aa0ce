"""What a run left in its folder, as plain lists and dicts, or as data frames."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from relax_core.bus.ledger.ledger_reader import LedgerFile, SampleLife
from relax_core.observe.results.summary import SUMMARY_FILE
from relax_core.observe.service.records import EVAL, without_undone
from relax_core.observe.service.sinks import read_metrics, read_texts

LEDGER = "ledger.sqlite"
CONFIG = "config.yaml"


class Summary(Mapping[str, Any]):
    """summary.json of a run (docs/summary.md): a mapping, and its folder."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.folder = folder
        self._values = dict(values)

    @property
    def outcome(self) -> str:
        """ "finished", "stopped", or "failed: " and the first cause."""
        return str(self["outcome"])

    @property
    def steps(self) -> int:
        """Train steps that are done."""
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
    """A run's folder, also of a run under way. Everything is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def summary(self) -> Summary | None:
        """None where the run has not ended, or had failed before there was anything to report."""
        file = self.folder / SUMMARY_FILE
        return Summary(self.folder, json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    def curves(self) -> list[dict[str, float]]:
        """One row a step: "step", and every number of docs/metrics.md under its name there, such as "actor/reward".

        What a resume has undone is left out; of several records of one source at one step the last counts.
        """
        rows: dict[int, dict[str, float]] = {}
        for record in without_undone(read_metrics(self.folder)):
            row = rows.setdefault(record.step, {"step": record.step})
            row.update({f"{record.source}/{name}": value for name, value in record.values.items()})
        return [rows[step] for step in sorted(rows)]

    def answers(self) -> list[dict[str, Any]]:
        """Answers of the evaluations that were kept: step, prompt, answer (the reference), response, exact."""
        texts = [record for record in read_texts(self.folder) if record.kind == EVAL]
        return [{"step": record.step, **row} for record in texts for row in record.rows]

    def samples(self, **filters: str | int) -> list[dict[str, Any]]:
        """One row a sample, in order of issue: uid, group, state ("trained", "dropped", …), step, version, reason,
        reward, and its parts as "part/NAME". ``filters``: uid, group, step or reason, as `relax lineage` takes them.

        Raises FileNotFoundError where the run has no ledger yet.
        """
        with LedgerFile(self.folder / LEDGER) as ledger:
            return [_sample_row(life) for life in ledger.samples(filters)]

    def frame(self, what: str, **filters: str | int) -> Any:
        """ "curves", "answers" or "samples" as a data frame. Raises ImportError where pandas is not installed."""
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
    """The run in ``folder``. Raises FileNotFoundError for a folder that is no run's."""
    path = Path(folder).expanduser().absolute()
    if not (path / CONFIG).is_file():
        raise FileNotFoundError(f"{path}: it has no {CONFIG}, so it is no run's folder.")
    return LoadedRun(path)


def _sample_row(life: SampleLife) -> dict[str, Any]:
    in_force = [event for event in life.events if not event.undone]
    last = in_force[-1] if in_force else None
    made = next((event.made for event in reversed(life.events) if event.made is not None), None)
    return {
        "uid": life.uid,
        "group": life.group,
        "state": life.state,
        "step": last.step if last is not None else None,
        "version": last.version if last is not None else None,
        "reason": last.reason if last is not None else "",
        "reward": made.reward if made is not None else None,
        "finish_reason": made.ended if made is not None else None,
        **({f"part/{name}": value for name, value in made.parts.items()} if made is not None else {}),
    }
