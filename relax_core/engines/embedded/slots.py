"""Holds the decoder's data of each running sample, one entry a slot: numbers, kept sets and routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.engines.embedded.prefill import SequenceMedia
from relax_core.engines.embedded.token_sampler import SamplingPlan, SamplingSettings, sampling_plan, uniforms


class KeptTable:
    """Holds the kept sets of the running samples' response tokens, one entry a slot, moved with the `SlotTable`."""

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sets = [(bytearray(), bytearray()) for _ in range(capacity)]  # counts and words of each slot

    def put(self, slot: int, kept: KeptTokens | None) -> None:
        """Starts a sample in this slot; ``kept`` holds the sets of the tokens that it has already, or is None."""
        self._sets[slot] = (
            (bytearray(), bytearray()) if kept is None else (bytearray(kept.counts), bytearray(kept.words))
        )

    def record(self, slots: Sequence[int], kept: KeptTokens) -> None:
        """Appends the set of one more token to each of ``slots``."""
        ends = kept.word_ends().tolist()
        start = 0
        for number, (slot, end) in enumerate(zip(slots, ends, strict=True)):
            counts, words = self._sets[slot]
            counts += kept.counts[4 * number : 4 * number + 4]
            words += kept.words[4 * start : 4 * end]
            start = end

    def of_slot(self, slot: int, start: int = 0) -> KeptTokens:
        """Returns the sets of a sample's tokens from its token ``start`` on."""
        counts, words = self._sets[slot]
        kept = KeptTokens(self._vocab_size, bytes(counts), bytes(words))
        return kept.take(np.arange(start, kept.tokens)) if start else kept

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves samples between slots; ``moves`` holds (from, to)."""
        for source, target in moves:
            self._sets[target], self._sets[source] = self._sets[source], (bytearray(), bytearray())


FIRST_ROUTES = 16


@dataclass(slots=True)
class PromptRoutes:
    """Holds the experts of a prompt's tokens, uint8 or uint16 ``[prompt, layers, per_token]``.

    The first prefill sets them. They stay when the prompt is computed anew under other weights.
    """

    experts: np.ndarray | None = None


class RouteTable:
    """Holds the experts of the running samples' response tokens, one entry a slot, moved with the `SlotTable`.

    A token is routed when it passes through the model, so that the newest token of a sample has no experts yet.
    """

    def __init__(self, capacity: int, *, layers: int, per_token: int, experts: int) -> None:
        self.dtype = np.dtype(np.uint8 if experts <= 256 else np.uint16)
        self.shape = (layers, per_token)
        self._experts = np.zeros((capacity, 0, *self.shape), dtype=self.dtype)  # grows once experts are asked for

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens of every slot; the room grows by doubling."""
        if tokens > self._experts.shape[1]:
            old = self._experts
            width = max(tokens, 2 * old.shape[1], FIRST_ROUTES)
            self._experts = np.zeros((len(old), width, *self.shape), dtype=self.dtype)
            self._experts[:, : old.shape[1]] = old

    def put(self, slot: int, experts: np.ndarray, *, start: int = 0) -> None:
        """Writes the experts ``[tokens, layers, per_token]`` of one sample's tokens from ``start`` on."""
        self.reserve(start + len(experts))
        self._experts[slot, start : start + len(experts)] = experts

    def record(self, tokens: np.ndarray, chosen: np.ndarray) -> None:
        """Writes ``chosen`` ``[slots, layers, per_token]``: of each slot the experts of its token ``tokens[slot]``."""
        self.reserve(int(tokens.max()) + 1)
        self._experts[np.arange(len(tokens)), tokens] = chosen

    def first(self, slot: int, count: int) -> np.ndarray:
        """Returns a copy of the experts of a sample's first ``count`` tokens."""
        return self._experts[slot, :count].copy()

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves samples between slots; ``moves`` holds (from, to)."""
        if moves:
            sources, targets = (list(side) for side in zip(*moves, strict=True))
            self._experts[targets] = self._experts[sources]


FIRST_TOKENS = 16
STEPS_AHEAD = 8  # steps prepared and written at one time, because each small array operation costs a fixed time
NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Holds tokens that are computed once, and the samples that go on from them.

    ``token_ids`` is the prompt, or the prompt and what a retracted sample had already generated. ``keys`` holds one
    uint64 for each sample. ``done`` and ``done_logprobs`` are what the retracted sample had generated, the end of
    ``token_ids``. ``routes`` is given if the experts are asked for. ``done_routes`` are the experts of ``done`` except
    its last token, which only the prefill computes. ``done_kept`` holds the sets that ``done`` was sampled from, if
    they are asked for. ``media`` holds what the images and videos of ``token_ids`` change; ``items`` says which they
    are.
    """

    token_ids: Sequence[int]
    settings: SamplingSettings
    keys: np.ndarray
    done: Sequence[int] = field(default_factory=list)
    done_logprobs: Sequence[float] = field(default_factory=list)
    routes: PromptRoutes | None = None
    done_routes: np.ndarray | None = None
    done_kept: KeptTokens | None = None
    media: SequenceMedia | None = None
    items: tuple[Media, ...] = ()

    @property
    def columns(self) -> int:
        """Returns the most KV columns that each of its samples may need."""
        return len(self.token_ids) + self.settings.max_new_tokens - len(self.done)


class SlotTable:
    """Holds the running samples in slots 0 to ``count`` - 1.

    `look_ahead` prepares several steps together: random numbers for all of them, and at most as many steps as the
    first sample needs to reach its token limit, so that the steps on the way only compare with stop tokens.
    """

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self.count = 0
        self.ahead = 0  # prepared steps; 0 whenever a sample was added or removed
        self.newest_ids = torch.empty(0, dtype=torch.int64)  # newest token of all slots, input of the next step
        self._vocab_size = vocab_size
        self._settings: list[SamplingSettings] = []
        self._plan: SamplingPlan | None = None
        self.position = np.zeros(capacity, dtype=np.int64)  # the newest token's column, which the cache does not hold
        self.rotary_shift = np.zeros(capacity)  # what to add to a new token's column for its rotary position
        self.columns = np.zeros(capacity, dtype=np.int64)  # the most KV columns that the sample may need
        self.fresh = np.zeros(capacity, dtype=bool)  # whether the weights in force computed all of the slot's cache
        self._token = np.zeros(capacity, dtype=np.int64)  # the newest token
        self._key = np.zeros(capacity, dtype=np.uint64)
        self._length = np.zeros(capacity, dtype=np.int64)  # generated tokens
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._stop = np.full((capacity, 1), -1, dtype=np.int64)
        self._ids = np.zeros((capacity, FIRST_TOKENS), dtype=np.int64)
        self._logprobs = np.zeros((capacity, FIRST_TOKENS), dtype=np.float32)
        self._draws: list[torch.Tensor] = []  # random numbers of the prepared steps; the next step's are last
        self._unsettled = 0  # steps whose tokens are only in the next two arrays, not yet in those above
        self._step_ids = np.zeros((STEPS_AHEAD, capacity), dtype=np.int64)
        self._step_logprobs = np.zeros((STEPS_AHEAD, capacity), dtype=np.float32)

    def add(self, prefixes: Sequence[Prefix]) -> None:
        """Appends the samples of ``prefixes``, in order."""
        self.settle()
        for prefix in prefixes:
            slots = slice(self.count, self.count + len(prefix.keys))
            done, settings = len(prefix.done), prefix.settings
            self._widen_stops(len(settings.stop_token_ids))
            self._widen_output(done)
            self.position[slots] = len(prefix.token_ids) - 1
            self.rotary_shift[slots] = 0.0 if prefix.media is None else prefix.media.following
            self.columns[slots] = prefix.columns
            self.fresh[slots] = True
            self._key[slots] = prefix.keys
            self._length[slots] = done
            self._limit[slots] = settings.max_new_tokens
            self._stop[slots] = -1
            self._stop[slots, : len(settings.stop_token_ids)] = settings.stop_token_ids
            self._ids[slots, :done] = prefix.done
            self._logprobs[slots, :done] = prefix.done_logprobs
            self._settings.extend([settings] * len(prefix.keys))
            self.count = slots.stop
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
        """Returns the sampling plan of all running samples."""
        if self._plan is None:
            self._plan = sampling_plan(self._settings, vocab_size=self._vocab_size)
        return self._plan

    # -- the first token of new samples -------------------------------------------------------------------------------
    def first_draws(self, first: int) -> torch.Tensor:
        """Returns uniform numbers for the next token of the slots from ``first`` on, float64 ``[slots]``."""
        slots = slice(first, self.count)
        return torch.from_numpy(uniforms(self._key[slots], self._length[slots]))

    def record_first(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Records the next token of the slots from ``first`` on; returns the slots that it finishes."""
        self._write(first, ids[:, None], logprobs[:, None])
        return self._finished(first)

    # -- steps of all samples -----------------------------------------------------------------------------------------
    def look_ahead(self) -> int:
        """Prepares the next steps, at least one; returns how many. They are lost if a sample is added or removed."""
        self.settle()
        slots = slice(0, self.count)
        self.ahead = min(STEPS_AHEAD, int((self._limit[slots] - self._length[slots]).min()))
        assert self.ahead > 0, "a finished sample is still in its slot"
        positions = self._length[slots] + np.arange(self.ahead)[::-1, None]
        self._draws = list(torch.from_numpy(uniforms(self._key[slots], positions)).unbind(0))
        self.newest_ids = torch.from_numpy(self._token[slots])
        return self.ahead

    def draw(self) -> torch.Tensor:
        """Returns uniform numbers for this step, float64 ``[slots]``."""
        return self._draws.pop()

    def record(self, ids: torch.Tensor, logprobs: np.ndarray) -> np.ndarray:
        """Records the next token of every slot; returns the slots that it finishes."""
        tokens = ids.numpy()
        self.newest_ids = ids
        self._step_ids[self._unsettled, : self.count] = tokens
        self._step_logprobs[self._unsettled, : self.count] = logprobs
        self._unsettled += 1
        self.ahead -= 1
        if self.ahead and not np.count_nonzero(self._stop[: self.count] == tokens[:, None]):
            return NO_SLOTS
        self.settle()
        return self._finished(0)

    def settle(self) -> None:
        """Writes the tokens of the last steps to the slots' arrays, all at one time."""
        if self._unsettled:
            steps, self._unsettled = self._unsettled, 0
            self._write(0, self._step_ids[:steps, : self.count].T, self._step_logprobs[:steps, : self.count].T)

    def _write(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Appends tokens ``[slots, tokens]`` to the slots from ``first`` on."""
        slots, tokens = slice(first, self.count), ids.shape[1]
        length = self._length[slots]
        self._widen_output(int(length.max()) + tokens)
        where = np.arange(first, self.count)[:, None], length[:, None] + np.arange(tokens)
        self._ids[where] = ids
        self._logprobs[where] = logprobs
        length += tokens
        self.position[slots] += tokens
        self._token[slots] = ids[:, -1]

    def _finished(self, first: int) -> np.ndarray:
        """Returns the slots from ``first`` on that their newest token finishes."""
        slots = slice(first, self.count)
        finished = (self._stop[slots] == self._token[slots, None]).any(1)
        finished |= self._length[slots] >= self._limit[slots]
        return np.flatnonzero(finished) + first

    # -- reading ------------------------------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        """Returns how many tokens the slot's sample has."""
        return int(self._length[slot]) + self._unsettled

    def newest(self) -> np.ndarray:
        """Returns the index of each sample's newest token in its response, ``[slots]`` int64."""
        newest: np.ndarray = self._length[: self.count] + (self._unsettled - 1)
        return newest

    def newest_tokens(self) -> np.ndarray:
        """Returns the id of each sample's newest token, ``[slots]`` int64."""
        self.settle()
        return self._token[: self.count]

    def output(self, slot: int, start: int = 0) -> tuple[list[int], list[float]]:
        """Returns token ids and log-probs of a slot's sample from its token ``start`` on."""
        self.settle()
        stop = self._length[slot]
        return self._ids[slot, start:stop].tolist(), self._logprobs[slot, start:stop].tolist()

    def remove(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Frees slots and moves the last samples into the gaps; returns the moves as (from, to)."""
        self.settle()
        freed = set(slots)
        kept = self.count - len(freed)
        movers = [slot for slot in range(kept, self.count) if slot not in freed]
        holes = sorted(slot for slot in freed if slot < kept)
        moves = list(zip(movers, holes, strict=True))
        if moves:
            columns = (self._token, self.position, self.columns, self._key, self._length, self._limit)
            for column in (*columns, self.rotary_shift, self.fresh, self._stop, self._ids, self._logprobs):
                column[holes] = column[movers]
            for source, target in moves:
                self._settings[target] = self._settings[source]
        del self._settings[kept:]
        self.count = kept
        self._plan = None
        self.ahead = 0
        return moves
