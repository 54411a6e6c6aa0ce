"""Builds the dashboard's list of runs: state, newest metrics, and the reason why a file cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from relax_core.contracts.untrusted_files import decode_json, read_plain_file, shown_line
from relax_core.observe.event_log import ACTOR, EVAL, MetricRecord, event_files, newest_metrics
from relax_core.server.run_folders import (
    BROKEN,
    MAX_NAME,
    MAX_SUMMARY,
    SUMMARY,
    UNREADABLE,
    RunStatus,
    inside,
    reason,
    run_name,
    run_status,
)
from relax_core.server.run_reader import CONFIG, LEDGER, MAX_CONFIG, SUMMARY_DECODER, decode_yaml, open_ledger

LOOK_S = 2.0  # time limit for reading all files for one list
FILES = (CONFIG, SUMMARY, LEDGER)


class _ListedRun(NamedTuple):
    problem: str
    figures: dict[str, Any]


Value = TypeVar("Value")
NO_METRICS = dict.fromkeys(("label", "steps_done", "steps", "reward", "exact", "samples_per_s", "newest_s"))


class ListedRuns:
    """Returns the rows of the list of runs. Reads a run again only if one of its files changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, _ListedRun]] = {}

    def __call__(self, found: Mapping[str, Path]) -> list[dict[str, Any]]:
        """Returns id, name, folder, state, problem and newest metrics of each run.

        A run with unreadable files has the state "unreadable". ``reward`` comes from the newest train step, ``exact``
        from the newest evaluation. An unknown metric is None.
        """
        self._known = {run: known for run, known in self._known.items() if run in found}
        rows, until = [], time.monotonic() + LOOK_S
        for run, path in found.items():
            standing = self._run_status(run, path, until)
            folder = shown_line(str(path))
            metrics = self._known[run][1].figures if run in self._known else NO_METRICS
            rows.append({"id": run, "name": run_name(path), "folder": folder, **standing._asdict(), **metrics})
        return rows

    def _run_status(self, run: str, path: Path, until: float) -> RunStatus:
        standing = run_status(path)
        if standing.problem:
            return standing
        seen = (event_files(path), *(_stat(path / name) for name in FILES))
        known = self._known.get(run)
        if known is None or known[0] != seen:
            if time.monotonic() > until:  # the next list reads this run
                return standing
            known = self._known[run] = (seen, _look(path))
        return RunStatus(UNREADABLE, known[1].problem) if known[1].problem else standing


def _stat(path: Path) -> object:
    try:
        found = path.lstat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def _look(run_dir: Path) -> _ListedRun:
    """Returns the reason why a file of the run cannot be read, or "", and the metrics of the run."""
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for name in FILES:
        try:
            path = inside(run_dir, name)
            if name == CONFIG:
                config = decode_yaml(read_plain_file(path, max_bytes=MAX_CONFIG).decode("utf-8", "replace"))
            if name == SUMMARY:
                summary = decode_json(read_plain_file(path, max_bytes=MAX_SUMMARY), SUMMARY_DECODER)
            if not os.access(path, os.R_OK):
                raise PermissionError("it may not be read")
            if name == LEDGER:
                open_ledger(run_dir).close()
        except FileNotFoundError:
            continue
        except BROKEN as error:
            return _ListedRun(reason(name, error), NO_METRICS)
    return _ListedRun("", _metrics(config, summary, newest_metrics(run_dir)))


def _metrics(
    config: Mapping[str, Any], summary: Mapping[str, Any], records: Mapping[str, MetricRecord]
) -> dict[str, Any]:
    """Returns the columns of the list. ``records`` override ``summary``, except for ``samples_per_s``."""
    trained, evaluated = records.get(ACTOR), records.get(EVAL)
    last, run, evaluations = (_as(summary.get("reward"), dict), _as(config.get("run"), dict), summary.get("eval"))
    last_eval = _as(evaluations[-1], dict) if isinstance(evaluations, list) and evaluations else {}
    return {
        "label": shown_line(_as(config.get("name"), str))[:MAX_NAME],
        "steps_done": trained.step + 1 if trained else _number(summary.get("steps")),
        "steps": _number(run.get("steps")),
        "reward": _number(trained.values.get("reward")) if trained else _number(last.get("last")),
        "exact": _number(evaluated.values.get("exact")) if evaluated else _number(last_eval.get("exact")),
        "samples_per_s": _number(summary.get("samples_per_s"))
        or (_number(trained.values.get("samples_per_s")) if trained else None),
        "newest_s": max((record.time_s for record in (trained, evaluated) if record), default=None),
    }


def _as(value: object, kind: type[Value]) -> Value:
    return value if isinstance(value, kind) else kind()


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 2**53 else None
