"""What the decoder keeps of each running sample, one row a slot; numbers only, moved together on compaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.engines.embedded.scheduler.routing_log import PromptRoutes
from relax_core.engines.embedded.scheduler.token_sampler import SamplingPlan, SamplingSettings, sampling_plan, uniforms

FIRST_TOKENS = 16
STEPS_AHEAD = 8  # steps prepared, and their tokens written down, at one time: of few numbers all is overhead
NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Tokens that are computed once, and the samples that go on from them.

    ``token_ids``: prompt, or prompt and what a retracted sample had already generated. ``keys``: uint64, one a sample;
    ``done``, ``done_logprobs``: what that sample had generated, the end of ``token_ids``. ``routes``: where its experts
    are wanted; ``done_routes``: those of all of ``done`` but its last token, which only the prefill feeds.
    ``done_kept``: the sets that ``done`` was sampled from, where they are wanted.
    """

    token_ids: Sequence[int]
    settings: SamplingSettings
    keys: np.ndarray
    done: Sequence[int] = field(default_factory=list)
    done_logprobs: Sequence[float] = field(default_factory=list)
    routes: PromptRoutes | None = None
    done_routes: np.ndarray | None = None
    done_kept: KeptTokens | None = None

    @property
    def columns(self) -> int:
        """KV columns that each of its samples may come to need."""
        return len(self.token_ids) + self.settings.max_new_tokens - len(self.done)


class SlotTable:
    """Rows 0..count-1 are running samples.

    Their next steps are prepared together (`look_ahead`): random numbers for all of them, and no more steps than the
    first row needs to reach its limit, so that on the way only stop tokens are to be looked for.
    """

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self.count = 0
        self.ahead = 0  # steps that are prepared; 0 whenever a row came or went
        self.newest_ids = torch.empty(0, dtype=torch.int64)  # of all rows, for the next of these steps
        self._vocab_size = vocab_size
        self._settings: list[SamplingSettings] = []
        self._plan: SamplingPlan | None = None
        self.position = np.zeros(capacity, dtype=np.int64)  # the newest token's column, which is not yet in the cache
        self.columns = np.zeros(capacity, dtype=np.int64)  # the most it may come to need
        self._token = np.zeros(capacity, dtype=np.int64)  # the newest
        self._key = np.zeros(capacity, dtype=np.uint64)
        self._length = np.zeros(capacity, dtype=np.int64)  # tokens generated
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._stop = np.full((capacity, 1), -1, dtype=np.int64)
        self._ids = np.zeros((capacity, FIRST_TOKENS), dtype=np.int64)
        self._logprobs = np.zeros((capacity, FIRST_TOKENS), dtype=np.float32)
        self._draws: list[torch.Tensor] = []  # random numbers of the steps ahead, the next step's last
        self._unsettled = 0  # steps whose tokens stand in the next two, not yet in the columns above
        self._step_ids = np.zeros((STEPS_AHEAD, capacity), dtype=np.int64)
        self._step_logprobs = np.zeros((STEPS_AHEAD, capacity), dtype=np.float32)

    def add(self, prefixes: Sequence[Prefix]) -> None:
        """Appends the samples of ``prefixes``, in order."""
        self.settle()
        for prefix in prefixes:
            rows = slice(self.count, self.count + len(prefix.keys))
            done, settings = len(prefix.done), prefix.settings
            self._widen_stops(len(settings.stop_token_ids))
            self._widen_output(done)
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
        self.ahead = 0

    def _widen_stops(self, stops: int) -> None:
        if stops > self._stop.shape[1]:
            self._stop = np.pad(self._stop, ((0, 0), (0, stops - self._stop.shape[1])), constant_values=-1)

    def _widen_output(self, tokens: int) -> None:
        width = self._ids.shape[1]
        if tokens > width:
            more = ((0, 0), (0, max(tokens, 2 * width) - width))
            self._ids, self._logprobs = np.pad(self._ids, more), np.pad(self._logprobs, more)

    def plan(self) -> SamplingPlan:
        if self._plan is None:
            self._plan = sampling_plan(self._settings, vocab_size=self._vocab_size)
        return self._plan

    # -- the first token of new rows --------------------------------------------------------------------------------
    def first_draws(self, first: int) -> torch.Tensor:
        """Uniform numbers for the next token of rows first..count-1."""
        rows = slice(first, self.count)
        return torch.from_numpy(uniforms(self._key[rows], self._length[rows]))

    def record_first(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Takes the next token of rows first..count-1; returns the rows that are finished by it."""
        self._write(first, ids[:, None], logprobs[:, None])
        return self._finished(first)

    # -- steps of all rows ------------------------------------------------------------------------------------------
    def look_ahead(self) -> int:
        """Prepares the next steps, at least one, while no row comes or goes; returns how many."""
        self.settle()
        rows = slice(0, self.count)
        self.ahead = min(STEPS_AHEAD, int((self._limit[rows] - self._length[rows]).min()))
        assert self.ahead > 0, "a finished sample is still in its row"
        places = self._length[rows] + np.arange(self.ahead)[::-1, None]
        self._draws = list(torch.from_numpy(uniforms(self._key[rows], places)).unbind(0))
        self.newest_ids = torch.from_numpy(self._token[rows])
        return self.ahead

    def draw(self) -> torch.Tensor:
        """Uniform numbers for this step, float64 ``[rows]``."""
        return self._draws.pop()

    def record(self, ids: torch.Tensor, logprobs: np.ndarray) -> np.ndarray:
        """Takes the next token of every row; returns the rows that are finished by it."""
        tokens = ids.numpy()
        self.newest_ids = ids
        self._step_ids[self._unsettled, : self.count] = tokens
        self._step_logprobs[self._unsettled, : self.count] = logprobs
        self._unsettled += 1
        self.ahead -= 1
        if self.ahead and not np.count_nonzero(self._stop[: self.count] == tokens[:, None]):
            return NO_ROWS
        self.settle()
        return self._finished(0)

    def settle(self) -> None:
        """Writes the tokens of the last steps to their columns: many at one time."""
        if self._unsettled:
            steps, self._unsettled = self._unsettled, 0
            self._write(0, self._step_ids[:steps, : self.count].T, self._step_logprobs[:steps, : self.count].T)

    def _write(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """``[rows, tokens]`` of rows first..count-1."""
        rows, tokens = slice(first, self.count), ids.shape[1]
        length = self._length[rows]
        self._widen_output(int(length.max()) + tokens)
        where = np.arange(first, self.count)[:, None], length[:, None] + np.arange(tokens)
        self._ids[where] = ids
        self._logprobs[where] = logprobs
        length += tokens
        self.position[rows] += tokens
        self._token[rows] = ids[:, -1]

    def _finished(self, first: int) -> np.ndarray:
        """Of rows first..count-1, those that their newest token finishes."""
        rows = slice(first, self.count)
        finished = (self._stop[rows] == self._token[rows, None]).any(1)
        finished |= self._length[rows] >= self._limit[rows]
        return np.flatnonzero(finished) + first

    # -- what there is ----------------------------------------------------------------------------------------------
    def length(self, row: int) -> int:
        return int(self._length[row]) + self._unsettled

    def newest(self) -> np.ndarray:
        """Number of each running sample's newest token, which the next step feeds."""
        newest: np.ndarray = self._length[: self.count] + (self._unsettled - 1)
        return newest

    def newest_tokens(self) -> np.ndarray:
        """Token id of each running sample's newest token, ``[rows]`` int64."""
        self.settle()
        return self._token[: self.count]

    def output(self, row: int, start: int = 0) -> tuple[list[int], list[float]]:
        """Token ids and log-probs of a row from its token ``start`` on."""
        self.settle()
        stop = self._length[row]
        return self._ids[row, start:stop].tolist(), self._logprobs[row, start:stop].tolist()

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drops rows and closes the gaps with the last ones; returns the moves as (from, to)."""
        self.settle()
        gone = set(rows)
        kept = self.count - len(gone)
        movers = [row for row in range(kept, self.count) if row not in gone]
        holes = sorted(row for row in gone if row < kept)
        moves = list(zip(movers, holes, strict=True))
        if moves:
            columns = (self._token, self.position, self.columns, self._key, self._length, self._limit)
            for column in (*columns, self._stop, self._ids, self._logprobs):
                column[holes] = column[movers]
            for source, target in moves:
                self._settings[target] = self._settings[source]
        del self._settings[kept:]
        self.count = kept
        self._plan = None
        self.ahead = 0
        return moves
