"""Reads a run's metrics.jsonl as it grows and gives its numbers as curves of at most 2,000 points."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from relax_core.dashboard.run_folders import METRICS, inside
from relax_core.observe.service.records import ACTOR, RESUMED, RUN

MOST_POINTS = 2000
READ_BYTES = 32 * 2**20


class Curve(NamedTuple):
    """Holds the points of one number in order of step; a value is None where it is not finite."""

    steps: list[int]
    values: list[float | None]


class _Line(msgspec.Struct):
    source: str
    step: int
    time_s: float
    values: dict[str, float | None]


class RunSeries:
    """Keeps every number of a run by its tag ``source/name``, read from a byte offset on.

    ``resumes`` lists the steps from which the run went on. ``problem`` says why the file cannot be read on, else it is
    empty.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._decoder = msgspec.json.Decoder(_Line)
        self._start()

    def _start(self) -> None:
        self._offset, self._inode = 0, -1
        self._points: dict[str, dict[int, float | None]] = defaultdict(dict)
        self._ended: dict[int, float] = {}  # train step → when it ended, in Unix seconds
        self.resumes: list[int] = []
        self.problem = ""

    def refresh(self) -> int:
        """Reads the lines that have come since, and returns how many."""
        try:
            path = inside(self._run_dir, METRICS)
        except (OSError, ValueError):
            return 0
        with path.open("rb") as file:
            inode = path.stat().st_ino
            if inode != self._inode or path.stat().st_size < self._offset:  # another file has its name
                self._start()
                self._inode = inode
            file.seek(self._offset)
            data = file.read(READ_BYTES)
        lines = 0
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            try:
                self._add(self._decoder.decode(line))
                lines += 1
            except msgspec.DecodeError as error:
                self.problem = f"{METRICS}: a line is not a record of Relax ({error})"
        self._offset += end
        return lines

    def _add(self, line: _Line) -> None:
        if line.source == RUN and RESUMED in line.values:
            self._undo(line.step)
            return
        if line.source == ACTOR:
            self._ended[line.step] = line.time_s
        for name, value in line.values.items():
            finite = value if value is not None and math.isfinite(value) else None
            self._points[f"{line.source}/{name}"][line.step] = finite

    def _undo(self, step: int) -> None:
        self.resumes.append(step)
        for points in self._points.values():
            for later in [one for one in points if one >= step]:
                del points[later]
        self._ended = {one: ended for one, ended in self._ended.items() if one < step}

    def tags(self) -> list[str]:
        """Returns all tags, sorted."""
        return sorted(tag for tag, points in self._points.items() if points)

    def curve(self, tag: str, *, most: int = MOST_POINTS) -> Curve:
        """Returns the curve of a tag, empty if there is none."""
        points = sorted(self._points.get(tag, {}).items())
        return thinned([step for step, _ in points], [value for _, value in points], most=most)

    def last(self, tag: str) -> float | None:
        """Returns the newest value of a tag."""
        points = self._points.get(tag)
        return points[max(points)] if points else None

    @property
    def steps_done(self) -> int:
        """Returns the number of train steps that are done."""
        return max(self._ended, default=-1) + 1

    def step_s(self, newest: int = 50) -> float | None:
        """Returns the median seconds of the newest steps, None before there are two."""
        times = sorted(self._ended.items())[-newest - 1 :]
        gaps = sorted(after[1] - before[1] for before, after in pairwise(times))
        return gaps[len(gaps) // 2] if gaps else None

    def ended_s(self) -> float | None:
        """Returns when the newest step ended, in Unix seconds."""
        return self._ended[max(self._ended)] if self._ended else None


def thinned(steps: list[int], values: list[float | None], *, most: int = MOST_POINTS) -> Curve:
    """Returns at most ``most`` points: of each piece of a longer curve, its least and its largest value in order."""
    if len(steps) <= most:
        return Curve(steps, values)
    pieces = most // 2
    chosen: list[int] = []
    for piece in range(pieces):
        first, behind = piece * len(steps) // pieces, (piece + 1) * len(steps) // pieces
        finite = [place for place in range(first, behind) if values[place] is not None]
        if not finite:
            chosen.append(first)
            continue
        least = min(finite, key=lambda place: values[place] or 0.0)
        largest = max(finite, key=lambda place: values[place] or 0.0)
        chosen += sorted({least, largest})
    return Curve([steps[place] for place in chosen], [values[place] for place in chosen])
