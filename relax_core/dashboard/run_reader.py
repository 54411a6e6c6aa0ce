"""Answers the page's questions about one run from the files in its folder, and keeps what it has read of them."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import msgspec
import yaml

from relax_core.dashboard.batch_lives import SampleLife, batch_lives
from relax_core.dashboard.ledger_drops import event_counts, take_drops
from relax_core.dashboard.run_folders import SUMMARY, NotInside, inside, run_id, run_state
from relax_core.dashboard.run_series import RunSeries
from relax_core.dashboard.run_texts import RunTexts
from relax_core.dashboard.timeline.event_spans import event_spans
from relax_core.observe.alarms.alarm_book import FILE as ALARMS
from relax_core.observe.alarms.alarm_book import read_alarms
from relax_core.observe.samples.sample_index import FORMAT, SampleIndex
from relax_core.observe.samples.sample_records import SAMPLES_FOLDER
from relax_core.observe.service.records import ACTOR

CONFIG, PLAN = "config.yaml", "plan.json"
REST = 100  # a slow answer is computed anew once 100 times as long as it took has passed
NEWEST_S = 1.0  # a call waits so long for the newest samples
END_S = 10.0
MOST_ALARMS = 50
MOST_TEXT_BYTES = 4 * 2**20
Answer = TypeVar("Answer")


class Rested(Generic[Answer]):
    """Keeps an answer for as long as makes its computation 1% of the time, and for a second at least."""

    def __init__(self, compute: Callable[[], Answer]) -> None:
        self._compute, self._until = compute, 0.0
        self._answer: Answer | None = None

    def __call__(self) -> Answer:
        """Returns the answer, computed anew if it is old enough."""
        began = time.monotonic()
        if began >= self._until:
            self._answer = self._compute()
            took = time.monotonic() - began
            self._until = began + max(1.0, REST * took)
        return cast(Answer, self._answer)


class RunReader:
    """Reads one run's folder. Its methods are thread-safe; ``cache`` is the folder of the index files.

    ``samples_share`` is how much of the files of samples was read, from 0 to 1.
    """

    def __init__(self, run_dir: Path, cache: Path | None) -> None:
        self.run_dir, self.run_id = run_dir, run_id(run_dir)
        self._cache = cache
        self._lock = threading.Lock()
        self._read = RunSeries(run_dir)
        self.texts = RunTexts(run_dir)
        self._index: SampleIndex | None = None
        self._indexing: threading.Thread | None = None
        self.samples_share, self._index_problem, self._closing = 0.0, "", False
        self._wanted, self._read_all = threading.Event(), threading.Event()
        self._events = Rested(lambda: event_counts(run_dir))
        self._state = Rested(lambda: run_state(run_dir))
        self._staleness = Rested(self._count_staleness)
        self._counts = Rested(self._count_samples)
        self.engines = Rested(self._count_engines)
        self._drops = Rested(self._take_drops)
        self.faults_and_orders = Rested(lambda: event_spans(run_dir, self.series().timed))

    def series(self) -> RunSeries:
        """Returns the run's numbers as of now."""
        with self._lock:
            while self._read.refresh():
                pass
            return self._read

    def samples(self) -> SampleIndex | None:
        """Returns the index of the run's samples, or None if it has none.

        A thread takes in what the files have gained. The call waits for it a moment, so a small run is read whole;
        of a large one the rest comes later, and `SampleIndex.share` says how much is there.
        """
        with self._lock:
            if self._index is None:
                folder = self.run_dir / SAMPLES_FOLDER
                if not folder.is_dir() or folder.resolve().parent != self.run_dir.resolve():
                    return None
                name = f"{self.run_id}-{folder.stat().st_ino}-{FORMAT}.sqlite"
                self._index = SampleIndex(self.run_dir, None if self._cache is None else self._cache / name)
                self._indexing = threading.Thread(target=self._index_forever, daemon=True, name="samples-index")
                self._indexing.start()
            index = self._index
        self._read_all.clear()
        self._wanted.set()
        self._read_all.wait(NEWEST_S)
        return index

    def _index_forever(self) -> None:
        index = self._index
        assert index is not None, "it is made before the thread starts"
        while not self._closing:
            if not self._wanted.wait(1.0):
                continue
            self._wanted.clear()
            try:
                while not self._closing and index.refresh():
                    self.samples_share = index.share()
                self.samples_share, self._index_problem = 1.0, ""
                self._drops()
            except (OSError, sqlite3.Error) as error:  # the folder has gone, or the cache's disk is full
                self._index_problem = f"The samples cannot be read on: {error}."
            self._read_all.set()

    def overview(self) -> dict[str, Any]:
        """Returns what the head of the page shows: state, progress, expected end, newest values, ledger."""
        series, config, index = self.series(), self.config(), self.samples()
        total = _number(_at(config, "run", "steps"))
        state, step_s, done = self._state(), series.step_s(), series.steps_done
        live = state == "live" and step_s is not None and total is not None
        return {
            "id": self.run_id,
            "folder": str(self.run_dir),
            "name": str(config.get("name") or self.run_dir.name),
            "state": state,
            "steps_done": done,
            "steps": total,
            "step_s": step_s,
            "left_s": step_s * max(0, int(total or 0) - done) if live and step_s is not None else None,
            "ended_s": series.ended_s(),
            "resumes": series.resumes,
            "alarms": self._alarms(),
            "tags": series.tags(),
            "ledger": self._events(),
            "samples": self._counts(),
            "samples_share": 1.0 if index is None else self.samples_share,
            "staleness": self._staleness(),
            "problems": [
                *([series.problem] if series.problem else []),
                *(index.problems() if index else []),
                *filter(None, [self._index_problem]),
            ],
        }

    def _alarms(self) -> list[dict[str, Any]]:
        """Returns the newest messages about the run, the newest first."""
        try:
            found = read_alarms(inside(self.run_dir, ALARMS), newest=MOST_ALARMS)
        except (OSError, NotInside):  # there is none, or it is no file of this folder
            return []
        return [msgspec.to_builtins(one) for one in reversed(found)]

    def pulse(self) -> dict[str, Any]:
        """Returns the little that tells an open page whether there is something new."""
        series = self.series()
        return {"state": self._state(), "steps_done": series.steps_done, "points": len(series.tags())}

    def config(self) -> dict[str, Any]:
        """Returns the run's configuration, empty if there is none that can be read."""
        try:
            found = yaml.safe_load(self.text(CONFIG))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    def summary(self) -> dict[str, Any]:
        """Returns summary.json, empty if there is none that can be read."""
        try:
            return msgspec.json.decode(self.text(SUMMARY).encode(), type=dict[str, Any])
        except (OSError, ValueError):
            return {}

    def text(self, name: str) -> str:
        """Returns a file's text, of a large one the first 4 MiB. Raises FileNotFoundError and NotInside."""
        with inside(self.run_dir, name).open("rb") as file:
            return file.read(MOST_TEXT_BYTES).decode("utf-8", "replace")

    def close(self) -> None:
        """Ends the thread and closes the index."""
        self._closing = True
        if self._indexing is not None:
            self._indexing.join(END_S)
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def _count_staleness(self) -> dict[str, int]:
        if self._index is not None:
            counts = self._index.staleness()
            if counts:
                return counts
        return dict(_at(self.summary(), "staleness", "histogram") or {})

    def batch(self, step: int) -> list[SampleLife]:
        """Returns the lives of the samples that ended at a train step. Raises FileNotFoundError if it has not ended."""
        ends = {one.step: one for one in self.series().timed if one.source == ACTOR and "step" in one.ms}
        if step not in ends:
            raise FileNotFoundError(f"Train step {step} has not ended.")
        staleness = _number(_at(self.config(), "mode", "max_staleness")) or 0
        before = ends.get(step - staleness - 3)
        from_s = 0.0 if before is None else before.end_s - before.ms["step"] / 1e3
        return batch_lives(self.run_dir, step=step, from_s=from_s, to_s=ends[step].end_s)

    def _count_engines(self) -> list[dict[str, Any]]:
        return [] if self._index is None else self._index.engines()

    def _count_samples(self) -> dict[str, Any] | None:
        return None if self._index is None else self._index.overview()

    def _take_drops(self) -> bool:
        assert self._index is not None, "the samples are open"
        take_drops(self.run_dir, self._index)
        return True


def cache_folder() -> Path:
    """Returns the folder in the user's cache that keeps the indices of runs."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "relax" / "dashboard"


def _at(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None
