"""Reads texts.jsonl of a run as it grows: the answers of evaluations, by evaluation and by prompt, and stragglers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from relax_core.dashboard.run_folders import inside
from relax_core.observe.service.records import EVAL
from relax_core.observe.service.sinks import TEXTS_FILE
from relax_core.observe.stragglers.straggler_records import STRAGGLER, Straggler, straggler_of_row

READ_BYTES = 32 * 2**20
MOST_SHOWN, MOST_TEXT = 100, 20_000  # rows of an answer, and characters of a text
MOST_HISTORY = 64  # evaluations, the newest, in which a prompt is looked up


class _Line(msgspec.Struct):
    kind: str
    step: int
    rows: list[dict[str, str | int | float | bool | None]]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Is one evaluation of the weights of ``step``: where its line stands, its rows, and how many are fully right."""

    step: int
    offset: int
    size: int
    rows: int
    exact: int


class RunTexts:
    """Keeps where the evaluations of a run stand in texts.jsonl; of a step that was done again the newest counts.

    ``problem`` says why a line cannot be read, else it is empty. The methods are thread-safe.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._lock = run_dir, threading.Lock()
        self._decoder = msgspec.json.Decoder(_Line)
        self._offset = 0
        self._found: dict[int, Evaluation] = {}
        self._stragglers: dict[tuple[str, int], Straggler] = {}
        self.problem = ""

    def evaluations(self) -> list[Evaluation]:
        """Returns all evaluations as of now, in order of step."""
        with self._lock:
            while self._refresh():
                pass
            return [self._found[step] for step in sorted(self._found)]

    def stragglers(self) -> list[Straggler]:
        """Returns who was slower than its equals, as the run has told it until now."""
        with self._lock:
            while self._refresh():
                pass
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

    def _refresh(self) -> bool:
        try:
            with inside(self._run_dir, TEXTS_FILE).open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # another file has its name
                    self._offset, self._found, self._stragglers = 0, {}, {}
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except (OSError, ValueError):
            return False
        end = data.rfind(b"\n") + 1
        at = self._offset
        for line in data[:end].splitlines(keepends=True):
            try:
                self._add(self._decoder.decode(line), at, len(line))
            except msgspec.DecodeError as error:
                self.problem = f"{TEXTS_FILE}: a line is not a record of Relax ({error})"
            at += len(line)
        self._offset += end
        return end > 0

    def _add(self, line: _Line, offset: int, size: int) -> None:
        if line.kind == STRAGGLER:
            for slow in map(straggler_of_row, line.rows):
                self._stragglers[slow.who, slow.from_step] = slow
        if line.kind == EVAL:
            exact = sum(bool(row.get("exact")) for row in line.rows)
            one = Evaluation(step=line.step, offset=offset, size=size, rows=len(line.rows), exact=exact)
            self._found[line.step] = one

    def _read(self, one: Evaluation) -> list[dict[str, Any]]:
        with inside(self._run_dir, TEXTS_FILE).open("rb") as file:
            file.seek(one.offset)
            return self._decoder.decode(file.read(one.size)).rows


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:MOST_TEXT] if isinstance(value, str) else value for name, value in row.items()}
