"""Prints the newest samples of a run as lines on the terminal, now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from relax_core.contracts.columns import decode_episodes
from relax_core.contracts.shown_text import shown
from relax_core.observe.samples.sample_reader import (
    SampleText,
    TokensRemoved,
    decode_numbers,
    numbers_files,
    read_frames,
    read_made_tree,
)
from relax_core.observe.samples.sample_records import SAMPLES_FOLDER, MadeRecord

PROMPT, ANSWER = 200, 120  # characters of each


class NewestSamples:
    """Gives the newest ``groups`` groups that a run keeps as lines, each time that ``every`` train steps were done.

    What stood in the files before is never given. With 0 groups it reads nothing.
    """

    def __init__(self, run_dir: Path, *, groups: int, every: int, step: int) -> None:
        self._run_dir, self._groups, self._every = run_dir, groups, every
        self._next = _next_multiple(step, every) if groups else 0
        folder = run_dir / SAMPLES_FOLDER
        self._offsets = {name: (folder / name).stat().st_size for name in numbers_files(run_dir)}
        self._text: SampleText | None = None

    def lines(self, step: int) -> list[str]:
        """Returns the lines if it is time for them at this number of train steps, else none."""
        if not self._groups or step < self._next:
            return []
        self._next = _next_multiple(step, self._every)
        found: list[str] = []
        try:
            for record in self._newest():
                found += self._group(record)
        except (OSError, ValueError, TokensRemoved) as error:
            found.append(f"samples cannot be shown: {error}")
        return found

    def _newest(self) -> list[MadeRecord]:
        newest: deque[MadeRecord] = deque(maxlen=self._groups)
        for name in numbers_files(self._run_dir):
            while frames := read_frames(self._run_dir / SAMPLES_FOLDER / name, self._offsets.get(name, 0)):
                self._offsets[name] = frames[-1].offset + frames[-1].size
                newest.extend(
                    record for record in map(decode_numbers, frames) if isinstance(record, MadeRecord) and record.tokens
                )
        return list(newest)

    def _group(self, record: MadeRecord) -> Iterator[str]:
        if self._text is None:
            self._text = SampleText(self._run_dir)
        tree = read_made_tree(self._run_dir, record)
        episodes = decode_episodes(bytes(record.episodes))
        for number, episode in enumerate(episodes):
            rows = tree.rows_of([number])
            sampled = np.flatnonzero(tree.versions[rows] >= 0)
            first = int(sampled[0]) if len(sampled) else len(rows)
            ids = tree.token_ids[rows]
            if number == 0:
                yield f"group {record.group_uid}: {_on_one_line(self._text.text(ids[:first].tolist()), most=PROMPT)}"
            answer = _on_one_line(self._text.text(ids[first:].tolist()), most=ANSWER)
            reward = "–" if episode.reward is None else f"{episode.reward:.3f}"
            yield f"  reward {reward}  {answer}"


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every


def _on_one_line(text: str, *, most: int) -> str:
    """Returns the beginning of a text of a model, in which no character moves the cursor or turns the direction."""
    line = shown(text.replace("\n", "↵")[:most])
    return line if len(text) <= most else f"{line}…"
