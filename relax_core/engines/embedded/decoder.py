"""Implements continuous batching over slots: prefills prefixes, decodes one token per sample and step, frees slots.

The decoder does not handle requests, weight versions or HTTP. A slot is an entry of the `SlotTable` and of the
`KVCache`. `score` computes the log-probs of given tokens by a prefill with logits at every scored position. The caller
must enter ``torch.inference_mode`` once, because entering it for each token costs more than an operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media, MediaGone
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.half_products import computing_dtype
from relax_core.engines.embedded.kv_cache import (
    CacheViews,
    DecodeAttention,
    FoundPrefix,
    KeptPrefix,
    KVCache,
    PrefixStore,
)
from relax_core.engines.embedded.prefill import (
    RequestedRows,
    SequenceMedia,
    empty_kv,
    empty_states,
    like_lengths,
    prefill_passes,
)
from relax_core.engines.embedded.recurrent_states import PrefillStates, StateTable
from relax_core.engines.embedded.token_sampler import (
    KeptTable,
    NonFiniteLogits,
    SamplingPlan,
    SamplingSettings,
    sample,
    sampling_plan,
    uniforms,
)
from relax_core.engines.embedded.tower_features import MediaFeatures

FIRST_ROUTES = 16


@dataclass(slots=True)
class PromptRoutes:
    """Holds the experts of a prompt's tokens, uint8 or uint16 ``[prompt, layers, per_token]``.

    The first prefill sets the experts. They do not change when the prompt is prefilled again under other weights.
    """

    experts: np.ndarray | None = None


class RouteTable:
    """Stores the experts of the running samples' response tokens. A sample has the same slot as in the `SlotTable`.

    A token gets experts when it passes through the model. The newest token of a sample has not passed yet.
    """

    def __init__(self, capacity: int, *, layers: int, per_token: int, experts: int) -> None:
        self.dtype = np.dtype(np.uint8 if experts <= 256 else np.uint16)
        self.shape = (layers, per_token)
        self._experts = np.zeros((capacity, 0, *self.shape), dtype=self.dtype)  # grows when experts are requested

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens in every slot. The capacity at least doubles."""
        if tokens > self._experts.shape[1]:
            old = self._experts
            width = max(tokens, 2 * old.shape[1], FIRST_ROUTES)
            self._experts = np.zeros((len(old), width, *self.shape), dtype=self.dtype)
            self._experts[:, : old.shape[1]] = old

    def put(self, slot: int, experts: np.ndarray, *, start: int = 0) -> None:
        """Writes the experts of one sample's tokens from ``start`` on, ``[tokens, layers, per_token]``."""
        self.reserve(start + len(experts))
        self._experts[slot, start : start + len(experts)] = experts

    def record(self, tokens: np.ndarray, chosen: np.ndarray) -> None:
        """Writes ``chosen`` ``[slots, layers, per_token]``: for each slot, the experts of token ``tokens[slot]``."""
        self.reserve(int(tokens.max()) + 1)
        self._experts[np.arange(len(tokens)), tokens] = chosen

    def first(self, slot: int, count: int) -> np.ndarray:
        """Returns a copy of the experts of a sample's first ``count`` tokens."""
        return self._experts[slot, :count].copy()

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Moves samples between slots; ``moves`` lists (from, to)."""
        if moves:
            sources, targets = (list(side) for side in zip(*moves, strict=True))
            self._experts[targets] = self._experts[sources]


FIRST_TOKENS = 16
STEPS_AHEAD = 8  # steps that are prepared and written together, because each small array operation has a fixed cost
NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Describes tokens that are prefilled once, and the samples that continue from these tokens.

    ``token_ids`` is the prompt; for a retracted sample, the prompt and its generated tokens. ``keys`` has the random
    key of each sample, uint64. ``done`` has the generated tokens of a retracted sample, which are the end of
    ``token_ids``, and ``done_logprobs`` their log-probs. ``routes`` is set if experts are requested. ``done_routes``
    are the experts of ``done`` without its last token, which has not passed through the model. ``done_kept`` has the
    kept sets of ``done``, if requested. ``media`` has the media inputs of ``token_ids``, and ``items`` the media items
    with their positions.
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
        """Returns the maximum number of KV columns of one of the samples."""
        return len(self.token_ids) + self.settings.max_new_tokens - len(self.done)


class SlotTable:
    """Stores the running samples in slots 0 to ``count`` - 1.

    `look_ahead` prepares several steps together and draws all their random numbers. No sample reaches its token limit
    before the last prepared step. All earlier steps therefore compare only with stop tokens.
    """

    def __init__(self, capacity: int, *, vocab_size: int) -> None:
        self.count = 0
        self.ahead = 0  # number of prepared steps; 0 after a sample was added or removed
        self.newest_ids = torch.empty(0, dtype=torch.int64)  # newest token of each slot, the input of the next step
        self._vocab_size = vocab_size
        self._settings: list[SamplingSettings] = []
        self._plan: SamplingPlan | None = None
        self.position = np.zeros(capacity, dtype=np.int64)  # the column that the newest token will get in the cache
        self.rotary_shift = np.zeros(capacity)  # offset from a new token's column to its rotary position
        self.columns = np.zeros(capacity, dtype=np.int64)  # maximum number of KV columns of the sample
        self.fresh = np.zeros(capacity, dtype=bool)  # True if the current weights computed the whole cache of the slot
        self._token = np.zeros(capacity, dtype=np.int64)  # the newest token
        self._key = np.zeros(capacity, dtype=np.uint64)
        self._length = np.zeros(capacity, dtype=np.int64)  # generated tokens
        self._limit = np.zeros(capacity, dtype=np.int64)
        self._stop = np.full((capacity, 1), -1, dtype=np.int64)
        self._ids = np.zeros((capacity, FIRST_TOKENS), dtype=np.int64)
        self._logprobs = np.zeros((capacity, FIRST_TOKENS), dtype=np.float32)
        self._draws: list[torch.Tensor] = []  # random numbers of the prepared steps, in reverse order
        self._unsettled = 0  # number of steps in the next two arrays that are not in the arrays above
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
        """Returns uniform random numbers for the next token of the slots from ``first`` on, float64 ``[slots]``."""
        slots = slice(first, self.count)
        return torch.from_numpy(uniforms(self._key[slots], self._length[slots]))

    def record_first(self, first: int, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Records the next token of the slots from ``first`` on. Returns the slots with finished samples."""
        self._write(first, ids[:, None], logprobs[:, None])
        return self._finished(first)

    # -- steps of all samples -----------------------------------------------------------------------------------------
    def look_ahead(self) -> int:
        """Prepares one or more steps and returns their number. Adding or removing a sample discards prepared steps."""
        self.settle()
        slots = slice(0, self.count)
        self.ahead = min(STEPS_AHEAD, int((self._limit[slots] - self._length[slots]).min()))
        assert self.ahead > 0, "a finished sample is still in its slot"
        positions = self._length[slots] + np.arange(self.ahead)[::-1, None]
        self._draws = list(torch.from_numpy(uniforms(self._key[slots], positions)).unbind(0))
        self.newest_ids = torch.from_numpy(self._token[slots])
        return self.ahead

    def draw(self) -> torch.Tensor:
        """Returns uniform random numbers for this step, float64 ``[slots]``."""
        return self._draws.pop()

    def record(self, ids: torch.Tensor, logprobs: np.ndarray) -> np.ndarray:
        """Records the next token of every slot. Returns the slots with finished samples."""
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
        """Writes the tokens of all recent steps to the slots' arrays."""
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
        """Returns the slots, from ``first`` on, with samples that end with their newest token."""
        slots = slice(first, self.count)
        finished = (self._stop[slots] == self._token[slots, None]).any(1)
        finished |= self._length[slots] >= self._limit[slots]
        return np.flatnonzero(finished) + first

    # -- reading ------------------------------------------------------------------------------------------------------
    def length(self, slot: int) -> int:
        """Returns the number of generated tokens of the slot's sample."""
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
        """Returns the token ids and log-probs of a slot's response from token ``start`` on."""
        self.settle()
        stop = self._length[slot]
        return self._ids[slot, start:stop].tolist(), self._logprobs[slot, start:stop].tolist()

    def remove(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Frees slots and moves the last samples into the gaps. Returns the moves as (from, to)."""
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


class Decoder:
    """Decodes up to ``max_samples`` samples. The KV cache has at most ``max_tokens`` tokens, slots times columns.

    ``dtype`` is the dtype of the model's weights. The prefix cache keeps up to ``prefix_cache_tokens`` tokens of ended
    samples, in addition to the KV cache. ``cached`` has the number of tokens without computation for each prefix of the
    newest `admit`: the tokens found in the prefix cache, or all tokens if the call computed an equal prefix.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        dtype: torch.dtype,
        max_samples: int,
        max_tokens: int,
        context_length: int,
        features: MediaFeatures | None = None,
        prefix_cache_tokens: int = 0,
    ) -> None:
        config = model.config
        dtype = computing_dtype(dtype)
        self._model = model
        self.features = features  # None for a model without towers
        self.max_samples = max_samples
        self._max_tokens = max_tokens
        self._dtype = dtype
        self.cache = KVCache(config, dtype, max_tokens=max_tokens, max_slots=max_samples, max_columns=context_length)
        self.states: StateTable | None = None  # None for a model without a gated delta net
        self.state_columns = 0  # size of a sample's state, as a number of cache columns
        if config.delta_net is not None:
            self.states = StateTable(config, dtype)
            column = 2 * len(config.attention_layers) * config.num_kv_heads * config.head_dim * dtype.itemsize
            self.state_columns = -(-StateTable(config, dtype, slots=1).nbytes // column)
        self.prefixes = PrefixStore(prefix_cache_tokens, state_tokens=self.state_columns)
        self.cached: list[int] = []
        self.slots = SlotTable(max_samples, vocab_size=config.vocab_size)
        self.routes: RouteTable | None = None  # None for a model without experts
        if config.experts is not None:
            experts = config.experts
            self.routes = RouteTable(
                max_samples, layers=config.num_layers, per_token=experts.per_token, experts=experts.count
            )
        self.kept = KeptTable(max_samples, vocab_size=config.vocab_size)
        self._recording_routes = False  # True if the experts of a running sample are requested
        self._views = CacheViews(self.cache)
        self._attention: DecodeAttention | None = None  # attention of the prepared steps

    def media_inputs(
        self, sequences: Sequence[tuple[int, Sequence[Media]]]
    ) -> Sequence[SequenceMedia | MediaGone | None]:
        """Returns `MediaFeatures.of_sequences`; for a model without towers, None for each sequence."""
        return [None] * len(sequences) if self.features is None else self.features.of_sequences(sequences)

    # -- admission ------------------------------------------------------------------------------------------------
    def fits(self, *, samples: int, columns: int) -> bool:
        """Returns whether ``samples`` more samples of at most ``columns`` columns can run.

        The states of a gated delta net count as the number of columns with the same memory.
        """
        slots = self.slots.count + samples
        return slots <= self.max_samples and self._needed(slots, columns) <= self._max_tokens

    @property
    def token_usage(self) -> float:
        """Returns the share of ``max_tokens`` that the running samples need at their maximum length."""
        return self._needed(self.slots.count, 0) / self._max_tokens

    @property
    def columns(self) -> int:
        """Returns how many cache columns the newest decode step has read in each layer, over all slots."""
        return 0 if self._attention is None else self._attention.columns

    def _needed(self, slots: int, columns: int) -> int:
        """Returns the cache tokens of ``slots`` slots of max(``columns``, longest running sample) columns each."""
        if self.slots.count:
            columns = max(columns, int(self.slots.columns[: self.slots.count].max()))
        return slots * (columns + self.state_columns)

    def admit(self, prefixes: Sequence[Prefix]) -> np.ndarray:
        """Prefills ``prefixes``, assigns slots to their samples in order, and samples the next token of each sample.

        Returns the slots with samples that this token finishes. If NonFiniteLogits is raised, no new sample has its
        token.
        """
        first = self.slots.count
        self.slots.add(prefixes)
        self._reserve(int(self.slots.position[: self.slots.count].max()) + 1, used_slots=first)
        hidden = torch.empty(len(prefixes), self._model.config.hidden_size, dtype=self._dtype)
        starts = np.cumsum([first] + [len(prefix.keys) for prefix in prefixes])
        alike = self._alike(prefixes)
        found = [self._find([prefixes[index] for index in indices]) for indices in alike]
        known = [0 if prefix is None else prefix.tokens for prefix in found]
        self.cached = [len(prefix.token_ids) for prefix in prefixes]
        for indices, tokens in zip(alike, known, strict=True):
            self.cached[indices[0]] = tokens
        for batch in like_lengths([len(prefixes[indices[0]].token_ids) for indices in alike], known=known):
            owners = [(index, row) for row, key in enumerate(batch) for index in alike[key]]
            kv, states, last = self._prefill(
                [prefixes[alike[key][0]] for key in batch],
                [found[key] for key in batch],
                [(prefixes[index], int(starts[index]), row) for index, row in owners],
            )
            hidden[torch.tensor([index for index, _ in owners])] = last[torch.tensor([row for _, row in owners])]
            self._fill(kv, states, owners, starts)
        copies = torch.tensor([len(prefix.keys) for prefix in prefixes])
        logits = self._model.logits(hidden).repeat_interleave(copies, 0)
        for prefix, slot in zip(prefixes, starts[:-1].tolist(), strict=True):
            for index in range(len(prefix.keys)):
                self.kept.put(slot + index, prefix.done_kept)
        plan = self.slots.plan().part(first, self.slots.count)
        ids, logprobs = self._sample(logits, plan, self.slots.first_draws(first), first=first)
        return self.slots.record_first(first, ids.numpy(), logprobs)

    def _alike(self, prefixes: Sequence[Prefix]) -> list[list[int]]:
        """Returns groups of indices of equal prefixes, which share one computation if the prefix store is on."""
        if not self.prefixes.is_on:
            return [[index] for index in range(len(prefixes))]
        alike: dict[Hashable, list[int]] = {}
        for index, prefix in enumerate(prefixes):
            items = tuple((medium.start, medium.item.digest) for medium in prefix.items)
            alike.setdefault((tuple(prefix.token_ids), items), []).append(index)
        return list(alike.values())

    def _find(self, alike: Sequence[Prefix]) -> FoundPrefix | None:
        experts = any(prefix.routes is not None for prefix in alike)
        return self.prefixes.find(alike[0].token_ids, alike[0].items, experts=experts)

    def _fill(
        self, kv: Tensor, states: PrefillStates | None, owners: Sequence[tuple[int, int]], starts: np.ndarray
    ) -> None:
        """Copies keys, values and states to the samples' slots. Adjacent slots share one copy operation.

        ``owners`` lists (index of a prefix, its row in ``kv``).
        """
        first = 0
        while first < len(owners):
            end = first + 1
            while end < len(owners) and owners[end][0] == owners[end - 1][0] + 1:
                end += 1
            copies = torch.tensor([int(starts[index + 1] - starts[index]) for index, _ in owners[first:end]])
            source = torch.repeat_interleave(torch.tensor([row for _, row in owners[first:end]]), copies)
            slot = int(starts[owners[first][0]])
            self.cache.fill(slot, kv, source)
            if self.states is not None and states is not None:
                self.states.fill(slot, states, source)
            first = end

    def _prefill(
        self,
        prefixes: Sequence[Prefix],
        found: Sequence[FoundPrefix | None],
        owners: Sequence[tuple[Prefix, int, int]],
    ) -> tuple[Tensor, PrefillStates | None, Tensor]:
        """Returns keys and values [layers, 2, prefixes, kv_heads, columns, head_dim], states, and last tokens' outputs.

        ``found`` has the cached part of each prefix, or None. ``owners`` has, for each admitted prefix: the prefix, its
        first slot, and the index of the equal prefix in ``prefixes``.
        """
        token_ids = [prefix.token_ids for prefix in prefixes]
        count, width = len(token_ids), max(len(ids) for ids in token_ids)
        known = [0 if prefix is None else prefix.tokens for prefix in found] if any(found) else []
        columns = width + 1 if known else width  # the last column is for padding
        routes: np.ndarray | None = None
        if self.routes is not None and any(prefix.routes is not None for prefix, _, _ in owners):
            self._recording_routes = True
            routes = np.empty((count, columns, *self.routes.shape), dtype=self.routes.dtype)
        kv = empty_kv(self._model, count=count, width=columns, dtype=self._dtype)
        states = empty_states(self._model, count=count, dtype=self._dtype)
        for row, prefix in enumerate(found):
            if prefix is not None:
                _put(prefix, row, kv=kv, states=states, routes=routes)
        last = RequestedRows(torch.arange(count), torch.tensor([len(ids) - 1 for ids in token_ids]))
        output = torch.empty(count, self._model.config.hidden_size, dtype=self._dtype)
        media = [prefix.media for prefix in prefixes]
        for places, hidden in prefill_passes(
            self._model, token_ids, kv, wanted=last, states=states, routes=routes, media=media, known=known
        ):
            output[places] = hidden
        if routes is not None:
            self._record_prefix_routes(owners, routes)
        return kv[:, :, :, :, :width], states, output

    def _record_prefix_routes(self, owners: Sequence[tuple[Prefix, int, int]], routes: np.ndarray) -> None:
        """Records the experts of a prefill. For ``owners`` see `_prefill`.

        Prompt tokens keep the experts of their first prefill. Generated tokens keep the experts of their first pass
        through the model. For the last token of a retracted sample, this prefill is the first pass.
        """
        assert self.routes is not None
        for prefix, slot, row in owners:
            if prefix.routes is None:
                continue
            found = routes[row]
            done, end = len(prefix.done), len(prefix.token_ids)
            if prefix.routes.experts is None:
                prefix.routes.experts = found[: end - done].copy()
            if done:
                assert len(prefix.keys) == 1 and prefix.done_routes is not None
                self.routes.put(slot, prefix.done_routes)
                self.routes.put(slot, found[end - 1 : end], start=done - 1)

    def score(self, items: Sequence[ScoreItem]) -> list[Scores]:
        """Returns the log-probs of given tokens; uses no slot. Raises NonFiniteLogits and MediaGone."""
        media: list[SequenceMedia | None] = []
        for features in self.media_inputs([(len(item.token_ids), item.media) for item in items]):
            if isinstance(features, MediaGone):
                raise features
            media.append(features)
        return score(self._model, items, dtype=self._dtype, media=media)

    # -- decoding -------------------------------------------------------------------------------------------------
    def step(self) -> np.ndarray:
        """Decodes one more token for every running sample. Returns the slots with finished samples.

        If NonFiniteLogits is raised, no sample has its new token. Samples that stay in their slots get the same token
        in the next step. But states of a gated delta net have already advanced, so samples with states must be
        prefilled again.
        """
        slots = self.slots
        attention = self._next_attention()
        chosen: list[Tensor] | None = [] if self._recording_routes else None
        recur = None if self.states is None else self.states.step(slots.count)
        hidden = self._model.hidden(slots.newest_ids, attention.rotary, attention, recur=recur, routes=chosen)
        if chosen is not None and self.routes is not None:
            self.routes.record(slots.newest(), torch.stack(chosen, 1).numpy())
        ids, logprobs = self._sample(self._model.logits(hidden), slots.plan(), slots.draw())
        return slots.record(ids, logprobs)

    def _sample(
        self, logits: Tensor, plan: SamplingPlan, random: Tensor, *, first: int = 0
    ) -> tuple[Tensor, np.ndarray]:
        """Samples the next token of the slots from ``first`` on; returns ids and log-probs. Raises NonFiniteLogits."""
        kept: list[KeptTokens] = []
        ids, found = sample(logits, plan, random, kept=kept)
        logprobs = _finite(found, first=first)
        if plan.kept is not None and kept:
            self.kept.record((plan.kept + first).tolist(), KeptTokens.joined(kept))
        return ids, logprobs

    def response_routes(self, slot: int) -> np.ndarray:
        """Returns the experts of a sample's response tokens except the newest, ``[tokens - 1, layers, per_token]``."""
        assert self.routes is not None
        return self.routes.first(slot, self.slots.length(slot) - 1)

    def _next_attention(self) -> DecodeAttention:
        """Returns the attention of this step. All prepared steps share one object."""
        slots = self.slots
        if slots.ahead and self._attention is not None:
            self._attention.advance()
        else:
            steps = slots.look_ahead()
            positions = slots.position[: slots.count]
            self._reserve(int(positions.max()) + steps, used_slots=slots.count)
            shift = None if self.features is None else slots.rotary_shift[: slots.count]
            self._attention = DecodeAttention(
                self._views, positions, steps=steps, dtype=self._dtype, rotary_shift=shift
            )
        return self._attention

    def _reserve(self, columns: int, *, used_slots: int) -> None:
        """Makes room for ``columns`` columns in all slots. The first ``used_slots`` slots keep their contents.

        Admission counts the maximum length of samples, but memory is allocated only when samples grow.
        """
        if self.states is not None:
            self.states.reserve(self.slots.count)
        if self.cache.reserve(self.slots.count, columns, used_slots=used_slots):
            self._bind_cache()

    def _bind_cache(self) -> None:
        self._views = CacheViews(self.cache)
        self._attention = None

    # -- kept prefixes --------------------------------------------------------------------------------------------
    def keep(self, slot: int, token_ids: Sequence[int], items: Sequence[Media], routes: PromptRoutes | None) -> None:
        """Keeps an ended sample's prefix for later prompts, unless older weights computed a part of its cache.

        ``token_ids`` are prompt and response; the newest token is not in the cache. ``items`` has the media items with
        their positions, and ``routes`` the experts of the prompt, if requested.
        """
        computed = token_ids[:-1]
        if not self.prefixes.is_on or not self.slots.fresh[slot] or self.prefixes.covers(computed, items):
            return
        states = None
        if self.states is not None:
            states = StateTable(self._model.config, self._dtype, slots=1)
            states.fill(0, self.states, torch.tensor([slot]))
        experts = None
        if routes is not None and routes.experts is not None:
            experts = np.concatenate([routes.experts, self.response_routes(slot)])
        self.prefixes.keep(
            KeptPrefix(
                token_ids=np.array(computed, dtype=np.int64),
                media=tuple(items),
                kv=self.cache.data[:, :, slot, :, : len(computed)].clone(),
                states=states,
                experts=experts,
            )
        )

    def forget(self) -> None:
        """Drops all data that outlives a sample: kept prefixes and features of media items.

        The prefixes of running samples are not kept, either, because the weights may change before the samples end.
        """
        self.prefixes.forget()
        self.slots.fresh[:] = False
        if self.features is not None:
            self.features.forget()

    # -- freeing slots --------------------------------------------------------------------------------------------
    def remove(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Frees slots and moves the last samples into the gaps. Returns the moves as (from, to)."""
        moves = self.slots.remove(slots)
        self._recording_routes = self._recording_routes and self.slots.count > 0
        if moves:
            if self.routes is not None:
                self.routes.move(moves)
            self.kept.move(moves)
            sources, targets = (torch.tensor(side) for side in zip(*moves, strict=True))
            columns = int(self.slots.position[: self.slots.count].max())
            self.cache.move(sources, targets, columns=columns)
            if self.states is not None:
                self.states.move(sources, targets)
        return moves

    def clear(self, slots: Sequence[int]) -> None:
        """Overwrites the cache of slots, which may contain non-finite numbers."""
        self.cache.clear(slots)

    @property
    def nbytes(self) -> int:
        """Returns the size of all keys, values and states in bytes, including kept prefixes."""
        return self.cache.nbytes + self.prefixes.nbytes + (0 if self.states is None else self.states.nbytes)

    def free_cache(self) -> None:
        """Frees the memory of the KV cache. No sample may be running."""
        assert self.slots.count == 0
        self.cache.free()
        if self.states is not None:
            self.states.free()
        self._bind_cache()


def _put(found: FoundPrefix, row: int, *, kv: Tensor, states: PrefillStates | None, routes: np.ndarray | None) -> None:
    """Copies the cached part of a prefix to row ``row`` of a prefill."""
    kv[:, :, row, :, : found.tokens] = found.kept.kv[:, :, :, : found.tokens]
    if states is not None and found.kept.states is not None:
        states.fill(row, found.kept.states, torch.zeros(1, dtype=torch.int64))
    if routes is not None and found.kept.experts is not None:
        routes[row, : found.tokens] = found.kept.experts[: found.tokens]


def _finite(logprobs: Tensor, *, first: int = 0) -> np.ndarray:
    """Returns ``logprobs`` as an array; its first slot is ``first``. Raises NonFiniteLogits if a log-prob is NaN."""
    values = logprobs.numpy()
    if np.count_nonzero(missing := np.isnan(values)):
        raise NonFiniteLogits((np.flatnonzero(missing) + first).tolist())
    return values


_CHUNK_ELEMENTS = 1 << 22  # maximum logits in memory: 16 MiB, and 16 MiB for their log-softmax


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """Describes a sequence with tokens to score from position ``start`` + 1 on, by softmax(logits / ``temperature``).

    The scores include the ``top_k`` most likely tokens at each scored position. The softmax excludes ``banned`` tokens
    and, with ``kept``, all tokens outside the kept set of the scored token. ``media`` has the sequence's media items
    with their positions.
    """

    token_ids: Sequence[int]
    start: int
    top_k: int
    temperature: float
    banned: Sequence[int] = ()
    kept: KeptTokens | None = None
    media: Sequence[Media] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Holds the log-probs of the scored tokens, and the most likely tokens at their positions.

    Each entry of ``top_ids`` and ``top_logprobs`` has ``top_k`` numbers, most likely first, or fewer if the softmax has
    fewer tokens.
    """

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def score(
    model: LanguageModel,
    items: Sequence[ScoreItem],
    *,
    dtype: torch.dtype,
    media: Sequence[SequenceMedia | None] = (),
) -> list[Scores]:
    """Returns the scores of ``items``, in order. All items must have the same banned tokens.

    The items of a call should have similar lengths (`like_lengths`), for speed. ``media`` has the media inputs of each
    item. Raises NonFiniteLogits if the weights yield non-finite logits.
    """
    dtype = computing_dtype(dtype)
    # The last token's logits are not computed, because no token follows it.
    sequences = [item.token_ids[:-1] or item.token_ids for item in items]
    kv = empty_kv(model, count=len(sequences), width=max(map(len, sequences)), dtype=dtype)
    inverse = torch.tensor([1.0 / item.temperature for item in items])
    top_k = max(item.top_k for item in items)
    parts = []
    asked, targets = _asked(items)
    kept, banned = _kept(items), torch.tensor(items[0].banned, dtype=torch.int64)
    step = max(1, _CHUNK_ELEMENTS // model.config.vocab_size)
    states = empty_states(model, count=len(sequences), dtype=dtype)
    for places, hidden in prefill_passes(model, sequences, kv, wanted=asked, states=states, media=media):
        for at in range(0, len(places), step):
            some = places[at : at + step]
            owners = asked.sequences[some]
            logits = model.logits(hidden[at : at + step])
            logits.mul_(inverse[owners, None]).index_fill_(1, banned, float("-inf"))
            if kept is not None:
                _leave_out(logits, kept.take(some.numpy()))
            logprobs = F.log_softmax(logits, -1)
            chosen = logprobs.gather(-1, targets[some, None])[:, 0]
            if bool(chosen.isnan().any()):
                raise NonFiniteLogits
            top = logprobs.topk(top_k, -1)
            parts.append((owners, chosen, top.indices, top.values))
    if not parts:
        return [Scores(logprobs=[], top_ids=[], top_logprobs=[]) for _ in items]
    owner, *columns = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    found = []
    for index, item in enumerate(items):
        logprobs, ids, values = (column[owner == index] for column in columns)
        left = np.isfinite(values[:, : item.top_k]).sum(1).tolist()
        tops = [[line[:some] for line, some in zip(top.tolist(), left, strict=True)] for top in (ids, values)]
        found.append(Scores(logprobs=logprobs.tolist(), top_ids=tops[0], top_logprobs=tops[1]))
    return found


def _kept(items: Sequence[ScoreItem]) -> KeptTokens | None:
    """Returns the kept sets of all scored tokens, item by item; None if no item has kept sets."""
    vocab_size = next((item.kept.vocab_size for item in items if item.kept is not None), None)
    if vocab_size is None:
        return None
    wholes = [len(item.token_ids) - 1 - item.start for item in items]
    return KeptTokens.joined(
        [
            KeptTokens.whole(tokens, vocab_size=vocab_size) if item.kept is None else item.kept
            for item, tokens in zip(items, wholes, strict=True)
        ]
    )


def _leave_out(logits: Tensor, kept: KeptTokens) -> None:
    """Sets the logits of tokens outside ``kept`` to -inf. ``kept`` has one set for each position.

    The vocabularies of the sets and of the logits may be padded to different sizes.
    """
    mask = torch.from_numpy(kept.mask()[:, : logits.shape[1]])
    logits[:, : mask.shape[1]].masked_fill_(~mask, float("-inf"))
    logits[:, mask.shape[1] :] = float("-inf")


def _asked(items: Sequence[ScoreItem]) -> tuple[RequestedRows, Tensor]:
    """Returns the positions that predict the scored tokens, and the scored tokens."""
    sequences: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    for index, item in enumerate(items):
        last = len(item.token_ids) - 1
        sequences += [index] * (last - item.start)
        positions += range(item.start, last)
        targets += item.token_ids[item.start + 1 :]
    wanted = RequestedRows(torch.tensor(sequences, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64))
    return wanted, torch.tensor(targets, dtype=torch.int64)
