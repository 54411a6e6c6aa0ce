"""Finds a run's answers of evaluations and stragglers in its event log, and reads the run's log files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from relax_core.observe.event_log import EVAL, Place, TextRecord, read_event
from relax_core.observe.stragglers import STRAGGLER, Straggler, straggler_of_row
from relax_core.server.run_folders import files_in, inside, open_inside

MOST_EVALUATIONS, MOST_STRAGGLERS = 100_000, 10_000
MOST_SHOWN, MOST_TEXT = 100, 20_000  # rows of an answer, and characters of a text
MOST_HISTORY = 64  # evaluations, the newest, in which a prompt is looked up

LOGS = "logs"
CHUNK = 64 * 2**10
SEARCHED_BYTES, MOST_FOUND, MOST_LINE = 64 * 2**20, 500, 2000
MOST_READ_LINE = 2**20  # bytes of a line that are looked at as one
MOST_FILES = 5000


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Is one evaluation of the weights of ``step``: where its line stands, its rows, and how many are fully right."""

    step: int
    place: Place
    rows: int
    exact: int


class RunTexts:
    """Keeps where the evaluations of a run stand in its event log; of a step that was done again the newest counts.

    The methods are thread-safe.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._lock = run_dir, threading.Lock()
        self._found: dict[int, Evaluation] = {}
        self._stragglers: dict[tuple[str, int], Straggler] = {}

    def add(self, text: TextRecord, place: Place) -> None:
        """Takes the next text of the run. Raises ValueError for one that is beyond a bound or of another form."""
        with self._lock:
            if text.kind == STRAGGLER:
                if len(self._stragglers) >= MOST_STRAGGLERS:
                    raise ValueError(f"there are more than {MOST_STRAGGLERS} stragglers")
                for slow in map(straggler_of_row, text.rows):
                    self._stragglers[slow.who, slow.from_step] = slow
            if text.kind == EVAL:
                if len(self._found) >= MOST_EVALUATIONS:
                    raise ValueError(f"there are more than {MOST_EVALUATIONS} evaluations")
                exact = sum(bool(row.get("exact")) for row in text.rows)
                self._found[text.step] = Evaluation(step=text.step, place=place, rows=len(text.rows), exact=exact)

    def evaluations(self) -> list[Evaluation]:
        """Returns all evaluations, in order of step."""
        with self._lock:
            return [self._found[step] for step in sorted(self._found)]

    def stragglers(self) -> list[Straggler]:
        """Returns who was slower than its equals, as the run has told it until now."""
        with self._lock:
            return list(self._stragglers.values())

    def rows(self, step: int, *, exact: bool | None, words: str, first: int) -> dict[str, Any]:
        """Returns the rows of an evaluation that fit: fully right or not, and with ``words`` in any of their texts.

        Raises FileNotFoundError if there is no such evaluation.
        """
        chosen = next((one for one in self.evaluations() if one.step == step), None)
        if chosen is None:
            raise FileNotFoundError(f"There is no evaluation of the weights {step}.")
        wanted = words.casefold()
        fitting = [
            row
            for row in self._read(chosen)
            if (exact is None or bool(row.get("exact")) == exact)
            and (not wanted or any(wanted in str(value).casefold() for value in row.values()))
        ]
        return {"count": len(fitting), "rows": [_shortened(row) for row in fitting[first : first + MOST_SHOWN]]}

    def history(self, prompt: str) -> list[dict[str, Any]]:
        """Returns how this prompt was answered in the newest evaluations, each with its step; the newest first."""
        found = []
        for one in reversed(self.evaluations()[-MOST_HISTORY:]):
            found += [{"step": one.step, **_shortened(row)} for row in self._read(one) if row.get("prompt") == prompt]
        return found

    def _read(self, one: Evaluation) -> list[dict[str, Any]]:
        text = read_event(self._run_dir, one.place)
        if not isinstance(text, TextRecord):
            raise ValueError(f"{one.place.name}: the event at byte {one.place.offset} is another one by now")
        return text.rows


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:MOST_TEXT] if isinstance(value, str) else value for name, value in row.items()}


# -- logs --------------------------------------------------------------------------------------------------------------
def log_files(run_dir: Path) -> list[dict[str, Any]]:
    """Returns name and size in bytes of each log file, at most `MOST_FILES`.

    Left out are links that lead out of the run's folder, what is no plain file, and names that are no text.
    """
    found = []
    for path in files_in(run_dir, LOGS, most=MOST_FILES):
        try:
            size = inside(run_dir, LOGS, path.name).stat().st_size
            path.name.encode()
        except (OSError, ValueError):  # it is no plain file, or its name is no text
            continue
        found.append({"name": path.name, "size": size})
    return found


def log_chunk(run_dir: Path, name: str, start: int | None) -> dict[str, Any]:
    """Returns at most 64 KiB of text from byte ``start`` on, of the file's end without it, and where it stops.

    A piece ends behind a line unless one line is larger, so a line that is being written comes with a later call.
    Raises what `inside` raises.
    """
    with open_inside(run_dir, LOGS, name) as file:
        size = os.fstat(file.fileno()).st_size
        first = max(0, size - CHUNK) if start is None or start > size else max(0, start)
        file.seek(first)
        data = file.read(CHUNK)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == CHUNK:
        end = len(data)
    return {"text": data[:end].decode("utf-8", "replace"), "from": first, "next": first + end, "size": size}


def search_log(run_dir: Path, name: str, words: str) -> dict[str, Any]:
    """Returns the lines that contain ``words``, in any case, of the file's last 64 MiB; at most the last 500."""
    wanted = words.casefold()
    found: list[str] = []
    with open_inside(run_dir, LOGS, name) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - SEARCHED_BYTES))
        while line := file.readline(MOST_READ_LINE):
            text = line.decode("utf-8", "replace").rstrip("\n")
            if wanted in text.casefold():
                found.append(text[:MOST_LINE])
                del found[:-MOST_FOUND]
    return {"text": "\n".join(found), "found": len(found), "size": size}
