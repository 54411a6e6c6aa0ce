"""Holds the metrics of a run's event log as curves, and the locations of the run's evaluations in the log."""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from relax_core.observe.event_log import (
    ACTOR,
    EVAL,
    PROCESS,
    RANK,
    ROLLOUT,
    SKELETONS,
    EventLocation,
    MetricRecord,
    TextRecord,
    is_resume,
    read_event,
)
from relax_core.observe.stragglers import STRAGGLER, Straggler, straggler_of_row

MAX_EVALUATIONS, MAX_STRAGGLERS = 100_000, 10_000
MAX_FORMS = 3  # most frequent forms of right answers per evaluation
MAX_SHOWN, MAX_TEXT = 100, 20_000  # limits of rows in a response, and of characters in a text
MAX_HISTORY = 64  # a prompt is looked up in this number of newest evaluations
MAX_POINTS = 2000
MAX_BYTES = 512 * 2**20  # limit of the numbers in memory
RECORD_BYTES, POINT_BYTES = 250, 16
MAX_TAGS, MAX_TAG = 20_000, 300  # limits of metrics, and of characters in a metric's name
MAX_RESUMES = 1000
MEMORY = ("memory_mb", "children_memory_mb")  # memory metrics of a process
_COUNTS = ("samples", "tokens", "worker")
_OF_ENGINES = "engine/"  # prefix of the rollout's metrics about requests to one engine
_KEPT: dict[str, Callable[[str], bool]] = {  # source → function of a metric's name: True if `Timed` keeps the metric
    ACTOR: lambda name: name.endswith("_ms") or name.startswith("train/"),
    ROLLOUT: lambda name: name.endswith("_ms") or name in _COUNTS or name.startswith(_OF_ENGINES),
    RANK: lambda name: name.endswith("_ms"),
    EVAL: lambda name: False,
}


class Curve(NamedTuple):
    """Holds the points of one metric in order of steps. A value is None if it is not finite."""

    steps: list[int]
    values: list[float | None]


class Timed(NamedTuple):
    """Holds the durations of one piece of work. It ended at ``end_s`` (Unix seconds).

    ``step`` is the train step or weight version. ``resumes`` is the number of resumes before the work. ``ms`` maps
    names to milliseconds; the suffix ``_ms`` is removed from the names. For the rollout, ``ms`` also has ``samples``,
    ``tokens``, ``worker`` and the metrics of single engines.
    """

    source: str
    step: int
    end_s: float
    resumes: int
    ms: dict[str, float]


class PackedTimed(NamedTuple):
    """Holds a `Timed` in a tenth of its memory. Records with equal names share one tuple of names."""

    source: str
    step: int
    end_s: float
    resumes: int
    names: tuple[str, ...]
    values: array[float]

    @property
    def ms(self) -> dict[str, float]:
        """Returns name → value."""
        return dict(zip(self.names, self.values, strict=True))


TimedRecord = Timed | PackedTimed


class _Points:
    """Holds the points of one metric in order of steps, 16 bytes per point. A value is NaN if it is not finite."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def set(self, step: int, value: float) -> None:
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)
            return
        place = bisect_left(self.steps, step)
        if self.steps[place] != step:
            self.steps.insert(place, step)
            self.values.insert(place, value)
        self.values[place] = value

    def cut(self, step: int) -> None:
        place = bisect_left(self.steps, step)
        del self.steps[place:], self.values[place:]


class RunSeries:
    """Holds the metrics of a run. A metric's tag is ``source/name``.

    The many metrics of the trainer's ranks are only in ``timed``. ``resumes`` lists the resumed steps. ``timed`` has
    the records of the trainer, its ranks, the rollout and the evaluations in order, including undone records. Only one
    thread may add records; any thread may read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[str, _Points] = defaultdict(_Points)
        self._ended: dict[int, float] = {}  # train step → end time in Unix seconds
        self.resumes: list[int] = []
        self.timed: list[TimedRecord] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._bytes = 0  # approximate memory of the numbers

    def add(self, record: MetricRecord) -> None:
        """Adds the next record of the run. Raises ValueError for a record above a limit."""
        if self._bytes > MAX_BYTES:
            raise ValueError(f"the numbers take more than {MAX_BYTES} bytes of memory; further numbers are left out")
        self._bytes += RECORD_BYTES + POINT_BYTES * len(record.values)
        if len(record.source) > MAX_TAG:
            raise ValueError(f"a source has more than {MAX_TAG} characters")
        with self._lock:
            self._add(record)

    def _add(self, record: MetricRecord) -> None:
        if is_resume(record):
            self._undo(record.step)
            return
        if record.source == ACTOR:
            self._ended[record.step] = record.time_s
        if record.source in _KEPT:
            kept = _KEPT[record.source]
            ms = {
                name.removesuffix("_ms"): value
                for name, value in record.values.items()
                if value and kept(name) and not math.isnan(value)
            }
            if record.source != RANK:
                self.timed.append(Timed(record.source, record.step, record.time_s, len(self.resumes), ms))
            else:
                names = self._names.setdefault(tuple(ms), tuple(ms))
                numbers = array("f", ms.values())
                self.timed.append(PackedTimed(RANK, record.step, record.time_s, len(self.resumes), names, numbers))
                return  # no curves for the many metrics of ranks; only the timeline shows them
        new = sum(f"{record.source}/{name}" not in self._points for name in record.values)
        if new and (len(self._points) + new > MAX_TAGS or max(map(len, record.values)) > MAX_TAG):
            raise ValueError(f"there are more than {MAX_TAGS} numbers, or a name has more than {MAX_TAG} characters")
        for name, value in record.values.items():
            self._points[f"{record.source}/{name}"].set(record.step, value)

    def _undo(self, step: int) -> None:
        if len(self.resumes) >= MAX_RESUMES:
            raise ValueError(f"there are more than {MAX_RESUMES} resumes")
        self.resumes.append(step)
        for points in self._points.values():
            points.cut(step)
        self._ended = {ended_step: ended for ended_step, ended in self._ended.items() if ended_step < step}

    def tags(self) -> list[str]:
        """Returns all tags, sorted."""
        with self._lock:
            return sorted(tag for tag, points in self._points.items() if points.steps)

    def curve(self, tag: str, *, most: int = MAX_POINTS) -> Curve:
        """Returns the curve of a tag. Empty for an unknown tag."""
        with self._lock:
            points = self._points.get(tag)
            if points is None:
                return Curve([], [])
            steps, values = np.array(points.steps), np.array(points.values)
        return thinned(steps, values, most=most)

    def newest(self, tag: str) -> float | None:
        """Returns the newest value of a tag, or None if it is missing or not finite."""
        with self._lock:
            points = self._points.get(tag)
            value = points.values[-1] if points is not None and points.values else np.nan
        return float(value) if np.isfinite(value) else None

    @property
    def steps_done(self) -> int:
        """Returns the number of finished train steps."""
        return max(self._ended, default=-1) + 1

    def step_s(self, newest: int = 50) -> float | None:
        """Returns the median duration of the newest steps in seconds, or None before the second step."""
        times = sorted(self._ended.items())[-newest - 1 :]
        gaps = sorted(after[1] - before[1] for before, after in pairwise(times))
        return gaps[len(gaps) // 2] if gaps else None

    def ended_s(self) -> float | None:
        """Returns the end time of the newest step in Unix seconds."""
        return self._ended[max(self._ended)] if self._ended else None


def process_rows(series: RunSeries) -> list[dict[str, Any]]:
    """Returns name, newest metrics and peak memory in MB of each process.

    The peak memory includes the peak of its child processes.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    most: dict[str, float] = defaultdict(float)
    for tag in series.tags():
        source, _, rest = tag.partition("/")
        name, _, number = rest.rpartition("/")
        if source != PROCESS or not name:
            continue
        newest = series.newest(tag)
        if newest is not None:
            found[name][number] = newest
        if number in MEMORY:
            most[name] += max((value for value in series.curve(tag).values if value is not None), default=0.0)
    return [{"name": name, "numbers": numbers, "most_memory_mb": most[name]} for name, numbers in sorted(found.items())]


def thinned(
    steps: Sequence[int] | np.ndarray, values: Sequence[float] | np.ndarray, *, most: int = MAX_POINTS
) -> Curve:
    """Reduces a curve to at most ``most`` points: the smallest and the largest value of each piece, in order.

    A value that is not finite is neither smallest nor largest, and becomes None.
    """
    x, y = np.asarray(steps, dtype=np.int64), np.asarray(values, dtype=np.float64)
    finite = np.isfinite(y)
    if len(x) > most:
        size = -(-len(x) // (most // 2))
        pieces = -(-len(x) // size)
        ends = [np.full(pieces * size, end) for end in (np.inf, -np.inf)]
        for padded in ends:
            padded[: len(x)][finite] = y[finite]
        first = np.arange(pieces) * size
        least, largest = (
            first + of(padded.reshape(pieces, size), axis=1)
            for of, padded in zip((np.argmin, np.argmax), ends, strict=True)
        )
        chosen = np.unique(np.concatenate([least, largest]))
        x, y, finite = x[chosen], y[chosen], finite[chosen]
    # Six digits are enough for a screen, and take half the bytes of a float's repr.
    shown = [float(f"{value:.6g}") if good else None for value, good in zip(y.tolist(), finite.tolist(), strict=True)]
    return Curve(x.tolist(), shown)


# -- Texts -------------------------------------------------------------------------------------------------------------
class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Describes one evaluation of the weights of ``step``: event location, number of rows, number of exact rows."""

    step: int
    place: EventLocation
    rows: int
    exact: int


class RunTexts:
    """Holds the locations of a run's evaluations in the event log, and the run's stragglers.

    If a step was repeated, only its newest evaluation is used. The methods are thread-safe.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._lock = run_dir, threading.Lock()
        self._found: dict[int, Evaluation] = {}
        self._looks: dict[int, list[dict[str, Any]]] = {}  # step → most frequent forms of right answers
        self._stragglers: dict[tuple[str, int], Straggler] = {}

    def add(self, text: TextRecord, place: EventLocation) -> None:
        """Adds the next text record of the run. Raises ValueError if it exceeds a limit or is malformed."""
        with self._lock:
            if text.kind == STRAGGLER:
                if len(self._stragglers) >= MAX_STRAGGLERS:
                    raise ValueError(f"there are more than {MAX_STRAGGLERS} stragglers")
                for slow in map(straggler_of_row, text.rows):
                    self._stragglers[slow.who, slow.from_step] = slow
            if text.kind == SKELETONS and len(self._looks) < MAX_EVALUATIONS:
                self._looks[text.step] = [_shortened(row) for row in text.rows[:MAX_FORMS]]
            if text.kind == EVAL:
                if len(self._found) >= MAX_EVALUATIONS:
                    raise ValueError(f"there are more than {MAX_EVALUATIONS} evaluations")
                exact = sum(bool(row.get("exact")) for row in text.rows)
                self._found[text.step] = Evaluation(step=text.step, place=place, rows=len(text.rows), exact=exact)

    def evaluations(self) -> list[Evaluation]:
        """Returns all evaluations, in order of steps."""
        with self._lock:
            return [self._found[step] for step in sorted(self._found)]

    def stragglers(self) -> list[Straggler]:
        """Returns the stragglers that the run has reported so far."""
        with self._lock:
            return list(self._stragglers.values())

    def rows(self, step: int, *, exact: bool | None, words: str, first: int) -> dict[str, Any]:
        """Returns the matching rows of an evaluation. Filters are: exact or not, and ``words`` in any text of the row.

        Raises FileNotFoundError if the evaluation does not exist.
        """
        chosen = next((evaluation for evaluation in self.evaluations() if evaluation.step == step), None)
        if chosen is None:
            raise FileNotFoundError(f"There is no evaluation of the weights {step}.")
        wanted = words.casefold()
        fitting = [
            row
            for row in self._read(chosen)
            if (exact is None or bool(row.get("exact")) == exact)
            and (not wanted or any(wanted in str(value).casefold() for value in row.values()))
        ]
        with self._lock:
            look = self._looks.get(step, [])
        return {
            "count": len(fitting),
            "look": look,
            "rows": [_shortened(row) for row in fitting[first : first + MAX_SHOWN]],
        }

    def history(self, prompt: str) -> list[dict[str, Any]]:
        """Returns the answers to a prompt in the newest evaluations, with their steps, newest first."""
        found = []
        for evaluation in reversed(self.evaluations()[-MAX_HISTORY:]):
            found += [
                {"step": evaluation.step, **_shortened(row)}
                for row in self._read(evaluation)
                if row.get("prompt") == prompt
            ]
        return found

    def _read(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        text = read_event(self._run_dir, evaluation.place)
        if not isinstance(text, TextRecord):
            raise ValueError(f"{evaluation.place.name}: the event at byte {evaluation.place.offset} has changed")
        return text.rows


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in row.items()}
