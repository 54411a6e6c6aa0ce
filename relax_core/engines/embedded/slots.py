"""What the decoder keeps of each running sample, one row a slot; numbers only, moved together on compaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from relax_core.engines.embedded.routes import PromptRoutes
from relax_core.engines.embedded.sampler import SamplingPlan, SamplingSettings, sampling_plan, uniforms

FIRST_TOKENS = 16
DRAWN_TOKENS = 8  # random numbers that are drawn at one time: a hash of few numbers is all overhead


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens that are computed once, and the samples that go on from them.

    ``token_ids``: prompt, or prompt and what a retracted sample had already generated. ``keys``: uint64, one a sample;
    ``done``, ``done_logprobs``: what that sample had generated, the end of ``token_ids``. ``routes``: where its experts
    are wanted; ``done_routes``: those of all of ``done`` but its last token, which only the prefill feeds.
    """

    token_ids: Sequence[int]
    settings: SamplingSettings
    keys: np.ndarray
    done: Sequence[int] = field(default_factory=list)
    done_logprobs: Sequence[float] = field(default_factory=list)
    routes: PromptRoutes | None = None
    done_routes: np.ndarray | None = None

    @property
    def columns(self) -> int:
        """KV columns that each of its samples may come to need."""
        return len(self.token_ids) + self.settings.max_new_tokens - len(self.done)


class SlotTable:
    """Rows 0..count-1 are running samples."""

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self.count = 0
        self._vocab_size = vocab_size
        self._settings: list[SamplingSettings] = []
        self._plan: SamplingPlan | None = None
        self.token = np.zeros(capacity, dtype=np.int64)  # the newest token, not yet in the cache
        self.position = np.zeros(capacity, dtype=np.int64)  # its column
        self.columns = np.zeros(capacity, dtype=np.int64)  # the most it may come to need
        self._key = np.zeros(capacity, dtype=np.uint64)
        self._length = np.zeros(capacity, dtype=np.int64)  # tokens generated
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._stop = np.full((capacity, 1), -1, dtype=np.int64)
        self._ids = np.zeros((capacity, FIRST_TOKENS), dtype=np.int64)
        self._logprobs = np.zeros((capacity, FIRST_TOKENS), dtype=np.float32)
        self._random = np.zeros((DRAWN_TOKENS, capacity)).T  # [capacity, tokens], of the next tokens
        self._used = DRAWN_TOKENS  # of them, by every row alike
        self._room = FIRST_TOKENS  # tokens that every row can take at least before the two are full

    def add(self, prefixes: Sequence[Prefix]) -> None:
        """Appends the samples of ``prefixes``, in order."""
        for prefix in prefixes:
            rows = slice(self.count, self.count + len(prefix.keys))
            done, settings = len(prefix.done), prefix.settings
            self._widen_stops(len(settings.stop_token_ids))
            if done >= self._ids.shape[1]:
                self._widen_output(done + 1)
            self._room = min(self._room, self._ids.shape[1] - done)
            self.position[rows] = len(prefix.token_ids) - 1
            self.columns[rows] = prefix.columns
            self._key[rows] = prefix.keys
            self._length[rows] = done
            self._limit[rows] = settings.max_new_tokens
            self._stop[rows] = -1
            self._stop[rows, : len(settings.stop_token_ids)] = settings.stop_token_ids
            self._ids[rows, :done] = prefix.done
            self._logprobs[rows, :done] = prefix.done_logprobs
            self._settings.extend([settings] * len(prefix.keys))
            self.count = rows.stop
        self._plan = None
        self._used = DRAWN_TOKENS

    def _widen_stops(self, stops: int) -> None:
        if stops > self._stop.shape[1]:
            self._stop = np.pad(self._stop, ((0, 0), (0, stops - self._stop.shape[1])), constant_values=-1)

    def _widen_output(self, tokens: int) -> None:
        more = ((0, 0), (0, max(tokens, 2 * self._ids.shape[1]) - self._ids.shape[1]))
        self._ids, self._logprobs = np.pad(self._ids, more), np.pad(self._logprobs, more)

    def plan(self) -> SamplingPlan:
        if self._plan is None:
            self._plan = sampling_plan(self._settings, vocab_size=self._vocab_size)
        return self._plan

    def random(self, first: int) -> torch.Tensor:
        """Uniform numbers for the next tokens of rows first..count-1, which are then to be recorded."""
        rows = slice(first, self.count)
        if first:
            return torch.from_numpy(uniforms(self._key[rows], self._length[rows]))
        if self._used == DRAWN_TOKENS:
            next_tokens = self._length[rows, None] + np.arange(DRAWN_TOKENS)
            self._random[rows] = uniforms(self._key[rows, None], next_tokens)
            self._used = 0
        self._used += 1
        return torch.from_numpy(self._random[rows, self._used - 1])

    def record(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Takes the next tokens of rows first..count-1; returns the rows that are finished by them."""
        rows = slice(first, self.count)
        if self._room == 0:
            longest = int(self._length[: self.count].max())
            if longest == self._ids.shape[1]:
                self._widen_output(longest + 1)
            self._room = self._ids.shape[1] - longest
        self._room -= 1
        length = self._length[rows]
        where = np.arange(first, self.count), length
        self._ids[where] = ids
        self._logprobs[where] = logprobs
        length += 1
        self.position[rows] += 1
        self.token[rows] = ids
        finished = (self._stop[rows] == ids[:, None]).any(1)
        finished |= length >= self._limit[rows]
        return np.flatnonzero(finished) + first

    def length(self, row: int) -> int:
        return int(self._length[row])

    def newest(self) -> np.ndarray:
        """Number of each running sample's newest token, which the next step feeds."""
        newest: np.ndarray = self._length[: self.count] - 1
        return newest

    def output(self, row: int, start: int = 0) -> tuple[list[int], list[float]]:
        """Token ids and log-probs of a row from its token ``start`` on."""
        stop = self._length[row]
        return self._ids[row, start:stop].tolist(), self._logprobs[row, start:stop].tolist()

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drops rows and closes the gaps with the last ones; returns the moves as (from, to)."""
        gone = set(rows)
        kept = self.count - len(gone)
        movers = [row for row in range(kept, self.count) if row not in gone]
        holes = sorted(row for row in gone if row < kept)
        moves = list(zip(movers, holes, strict=True))
        if moves:
            columns = (self.token, self.position, self.columns, self._key, self._length, self._limit)
            for column in (*columns, self._stop, self._ids, self._logprobs, self._random):
                column[holes] = column[movers]
            for source, target in moves:
                self._settings[target] = self._settings[source]
        del self._settings[kept:]
        self.count = kept
        self._plan = None
        return moves
