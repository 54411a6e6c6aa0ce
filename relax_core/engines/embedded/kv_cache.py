"""The KV cache of the running samples, the attention of decode steps over the cache, and the prefix cache.

The prefix cache (`PrefixStore`) keeps keys and values of finished responses: the next turn of an episode prefills only
its new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.contracts.media import Media
from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.engines.embedded.recurrent_states import StateTable
from relax_core.engines.engine_pool import prefix_blocks

FIRST_COLUMNS = 64


class KVCache:
    """Stores ``data`` [layers, 2, slots, kv_heads, columns, head_dim]. The token at position p is in column p.

    Slots times columns never exceed ``max_tokens``. All numbers must be finite, because masked columns are multiplied
    by 0.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, *, max_tokens: int, max_slots: int, max_columns: int
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._max_slots = max_slots
        self._max_columns = max_columns
        self.data = self._allocate(0, 0)

    def _allocate(self, slots: int, columns: int) -> Tensor:
        config = self._config
        shape = (len(config.attention_layers), 2, slots, config.num_kv_heads, columns, config.head_dim)
        return torch.zeros(shape, dtype=self._dtype)

    @property
    def slots(self) -> int:
        """Returns the number of slots."""
        return self.data.shape[2]

    @property
    def columns(self) -> int:
        """Returns the number of columns, in tokens."""
        return self.data.shape[4]

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return self.data.numel() * self.data.element_size()

    def reserve(self, slots: int, columns: int, *, used_slots: int) -> bool:
        """Makes room for ``slots`` by ``columns`` and keeps the first ``used_slots``. Returns whether ``data`` is new.

        The product of ``slots`` and ``columns`` must not exceed ``max_tokens``.
        """
        assert slots * columns <= self._max_tokens and columns <= self._max_columns
        if slots <= self.slots and columns <= self.columns:
            return False
        new_columns = self.columns
        if columns > new_columns:
            new_columns = min(self._max_columns, max(columns, 2 * new_columns, FIRST_COLUMNS))
        new_slots = self.slots
        if slots > new_slots:
            new_slots = min(self._max_slots, max(slots, 2 * new_slots))
        if new_slots * new_columns > self._max_tokens:
            new_slots, new_columns = slots, min(self._max_columns, self._max_tokens // slots)
        old, self.data = self.data, self._allocate(new_slots, new_columns)
        kept = min(old.shape[4], new_columns)
        self.data[:, :, :used_slots, :, :kept] = old[:, :, :used_slots, :, :kept]
        return True

    def move(self, sources: Tensor, targets: Tensor, *, columns: int) -> None:
        """Copies the first ``columns`` columns of slots ``sources`` to slots ``targets`` (int64, disjoint)."""
        part = self.data[:, :, :, :, :columns]
        part[:, :, targets] = part[:, :, sources]

    def fill(self, first_slot: int, prefix: Tensor, source: Tensor) -> None:
        """Copies prefix ``source[i]`` to slot ``first_slot`` + i.

        ``prefix`` is [layers, 2, prefixes, kv_heads, columns, head_dim], ``source`` int64 ``[slots]``.
        """
        width, count = prefix.shape[4], source.shape[0]
        self.data[:, :, first_slot : first_slot + count, :, :width] = prefix.index_select(2, source)

    def clear(self, slots: Sequence[int]) -> None:
        """Fills slots with zeros, because non-finite numbers would reach the next sample in the slot."""
        self.data[:, :, torch.tensor(slots, dtype=torch.int64)] = 0

    def free(self) -> None:
        """Frees the memory."""
        self.data = self._allocate(0, 0)


MAX_SLOTS_ALONE = 16  # maximum number of slots with separate attention
ALONE_COLUMNS = 1500  # extra cost of separate attention for a slot, in columns


def slots_alone(lengths: np.ndarray) -> np.ndarray:
    """Returns the longest slots for which separate attention is faster, int64. ``lengths`` ``[slots]``: columns.

    All other slots are computed together, padded to the longest of these slots.
    """
    most = min(MAX_SLOTS_ALONE, len(lengths) - 1)
    longest = np.argsort(-lengths, kind="stable")[: most + 1]
    alone = np.concatenate(([0], np.cumsum(lengths[longest[:most]] + ALONE_COLUMNS)))
    return longest[: int(np.argmin(len(lengths) * lengths[longest] + alone))]


def columns_read(lengths: np.ndarray) -> int:
    """Returns how many cache columns one step reads in each layer. ``lengths`` ``[slots]``: columns."""
    alone = slots_alone(lengths)
    return len(lengths) * int(np.delete(lengths, alone).max()) + int(lengths[alone].sum())


class CacheViews:
    """Holds views of the cache's tensor, made once per allocation.

    ``keys`` is ``[layers, slots * kv_heads, head_dim, columns]``, ``values`` is ``[layers, slots * kv_heads, columns,
    head_dim]``. ``vectors`` has, for each layer, all keys and values as ``[2 * slots * kv_heads * columns, head_dim]``.
    """

    def __init__(self, cache: KVCache) -> None:
        layers, _, slots, heads, columns, dim = cache.data.shape
        flat = cache.data.view(layers, 2, slots * heads, columns, dim)
        self.keys = flat[:, 0].transpose(2, 3)
        self.values = flat[:, 1]
        self.vectors = cache.data.view(layers, 2 * slots * heads * columns, dim).unbind(0)
        self.kv_heads, self.head_dim = heads, dim
        head = torch.arange(slots * heads).view(slots, heads)
        # [slots, 2 * kv_heads]: indices of column 0 in ``vectors``
        self.first_vectors = torch.cat((head, head + slots * heads), 1) * columns


class DecodeAttention:
    """Computes the attention of up to ``steps`` steps of the same samples. `advance` moves to the next step.

    Queries are grouped by key head: for one token, two batched products are faster than the fused kernel, which pads
    the query. Slots that are much longer than the other slots get separate attention, to avoid padding all slots to
    their length (`slots_alone`). ``positions`` ``[slots]`` are the columns of the tokens in the first step. The rotary
    positions are ``positions`` plus ``rotary_shift`` ``[slots]``, if given. ``rotary`` ``[slots]`` has the rotary
    positions of the current step. They are int64, or float64 if a position has a fraction or exceeds its column,
    because the rotary table covers only the columns.
    """

    def __init__(
        self,
        views: CacheViews,
        positions: np.ndarray,
        *,
        steps: int,
        dtype: torch.dtype,
        rotary_shift: np.ndarray | None = None,
    ) -> None:
        count = len(positions)
        self._used = count * views.kv_heads
        self._dim = views.head_dim
        self._layer_vectors = views.vectors
        self._all_keys = views.keys[:, : self._used]
        self._all_values = views.values[:, : self._used]
        self._alone = [(int(slot), int(positions[slot]) + 1) for slot in slots_alone(positions + 1)]
        apart = [slot for slot, _ in self._alone]
        self._width = int(np.delete(positions, apart).max()) + 1  # columns of the slots without separate attention
        self._kv_heads = views.kv_heads
        self._left = steps - 1  # number of steps after this step
        columns = torch.from_numpy(positions)[:, None]
        # rotary positions, then indices of keys and values in ``vectors``
        moving = torch.cat((columns.view(-1), (views.first_vectors[:count] + columns).view(-1)))
        self._moving = moving  # all indices that grow by one per step
        self.rotary, self._vectors = moving[:count], moving[count:]
        self._apart: Tensor | None = None  # rotary positions, if they are float64
        if rotary_shift is not None and np.count_nonzero(rotary_shift):
            self._shift_rotary(rotary_shift)
        self._bias: Tensor | None = None
        if int(positions.min()) + 1 < self._width:
            # The bias is for the last step. Earlier steps use a part of it: a slot's number of masked columns is
            # constant.
            hidden = torch.arange(self._width + self._left) > columns + self._left
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._bias = bias.repeat_interleave(views.kv_heads, 0)[:, None]
        self._narrow()

    def _shift_rotary(self, rotary_shift: np.ndarray) -> None:
        if (rotary_shift == np.trunc(rotary_shift)).all() and rotary_shift.max() <= 0:
            self.rotary += torch.from_numpy(rotary_shift.astype(np.int64))
        else:
            self.rotary = self._apart = self.rotary + torch.from_numpy(rotary_shift)

    def _narrow(self) -> None:
        """Makes views of the keys, values and bias of this step."""
        self._keys = self._all_keys.narrow(3, 0, self._width).unbind(0)
        self._values = self._all_values.narrow(2, 0, self._width).unbind(0)
        self._step_bias = None if self._bias is None else self._bias.narrow(2, self._left, self._width)
        self._views_alone = []
        for slot, length in self._alone:
            heads = slice(slot * self._kv_heads, (slot + 1) * self._kv_heads)
            keys, values = self._all_keys[:, heads, :, :length], self._all_values[:, heads, :length]
            self._views_alone.append((heads, keys.unbind(0), values.unbind(0)))

    @property
    def columns(self) -> int:
        """Returns how many cache columns the current step reads in each layer; see `columns_read`."""
        return self._used // self._kv_heads * self._width + sum(length for _, length in self._alone)

    def advance(self) -> None:
        """Moves to the next step."""
        self._moving.add_(1)
        if self._apart is not None:
            self._apart.add_(1)
        self._width += 1
        self._alone = [(slot, length + 1) for slot, length in self._alone]
        self._left -= 1
        self._narrow()

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Writes the new keys and values to the cache, and computes attention (`decoder_model.Attend`)."""
        self._layer_vectors[layer].index_copy_(0, self._vectors, kv.reshape(-1, self._dim))
        queries = q.reshape(self._used, -1, self._dim)
        scores = torch.bmm(queries, self._keys[layer])
        if self._step_bias is not None:
            scores.add_(self._step_bias)
        attended = torch.bmm(scores.softmax(-1), self._values[layer])
        for heads, keys, values in self._views_alone:
            attended[heads] = torch.bmm(torch.bmm(queries[heads], keys[layer]).softmax(-1), values[layer])
        return attended.view(q.shape[0], -1)


BLOCK = 32  # minimum tokens of a common prefix: for fewer tokens, finding and copying takes as long as the prefill


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptPrefix:
    """Holds the keys, values and states of one sequence under the current weights.

    ``token_ids`` is int64 ``[tokens]``. ``media`` has the sequence's media items with their positions. ``kv`` is
    ``[layers, 2, kv_heads, tokens, head_dim]``. ``states`` are the states after the last token, for a model with a
    gated delta net. ``experts`` ``[tokens, layers, per_token]`` is set if the experts of all tokens are known.
    """

    token_ids: np.ndarray
    media: tuple[Media, ...]
    kv: Tensor
    states: StateTable | None = None
    experts: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        """Returns the size of keys, values and states, in bytes."""
        return self.kv.nbytes + (0 if self.states is None else self.states.nbytes)

    def common(self, token_ids: np.ndarray, media: Sequence[Media]) -> int:
        """Returns the length of the common prefix with another sequence, in tokens."""
        most = min(len(token_ids), len(self.token_ids))
        differ = np.flatnonzero(self.token_ids[:most] != token_ids[:most])
        if len(differ):
            most = int(differ[0])
        ours, theirs = (_placed(items, most) for items in (self.media, media))
        return min((start for start, _ in ours ^ theirs), default=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """Describes a kept prefix that has its first ``tokens`` tokens in common with a prompt."""

    kept: KeptPrefix
    tokens: int

    @property
    def whole(self) -> bool:
        """Returns whether the prompt continues the complete kept prefix, like the next turn of an episode."""
        return self.tokens == len(self.kept.token_ids)


class PrefixStore:
    """Keeps up to ``tokens`` tokens of prefixes. Drops the least recently used prefixes.

    All kept prefixes come from the current weights: call `forget` before the weights change. A state uses the
    capacity of ``state_tokens`` tokens (0 for a model without states). With states, only complete prefixes can be used,
    because states exist only at the end of a prefix.
    """

    def __init__(self, tokens: int, *, state_tokens: int = 0) -> None:
        self.nbytes = 0
        self._most = tokens
        self._state_tokens = state_tokens
        self._used = 0
        self._blocks: dict[KeptPrefix, list[int]] = {}  # blocks of each prefix, least recently used prefix first
        self._by_block: dict[int, dict[KeptPrefix, None]] = {}

    @property
    def is_on(self) -> bool:
        """Returns whether the store can keep prefixes."""
        return self._most > 0

    def find(self, token_ids: Sequence[int], media: Sequence[Media], *, experts: bool = False) -> FoundPrefix | None:
        """Returns the kept prefix that shares the most tokens with a prompt. A prompt's last token is always computed.

        With ``experts``, only prefixes with experts are considered.
        """
        if not self._blocks:
            return None
        asked = np.array(token_ids[:-1], dtype=np.int64)
        chain = [block for block in prefix_blocks(token_ids[:-1], media, block=BLOCK) if block in self._by_block]
        for block in reversed(chain):
            found = [
                FoundPrefix(kept=kept, tokens=kept.common(asked, media))
                for kept in self._by_block[block]
                if kept.experts is not None or not experts
            ]
            if self._state_tokens:
                found = [prefix for prefix in found if prefix.whole]
            if found and (best := max(found, key=lambda prefix: prefix.tokens)).tokens >= BLOCK:
                self._touch(best.kept)
                return best
        return None

    def covers(self, token_ids: Sequence[int], media: Sequence[Media]) -> bool:
        """Returns whether `keep` skips a sequence, because it is too short, too long, or already kept completely."""
        if not BLOCK <= len(token_ids) <= self._most - self._state_tokens:
            return True
        found = self.find([*token_ids, 0], media)
        return found is not None and found.tokens == len(token_ids) and (found.whole or not self._state_tokens)

    def keep(self, new: KeptPrefix) -> None:
        """Keeps a prefix, and drops kept prefixes that this prefix continues. `covers` must be False for the prefix."""
        blocks = prefix_blocks(new.token_ids.tolist(), new.media, block=BLOCK)
        for old in [kept for block in blocks for kept in self._by_block.get(block, ()) if self._ends_at(kept, block)]:
            if old.common(new.token_ids, new.media) == len(old.token_ids):
                self._drop(old)
        self._blocks[new] = blocks
        for block in blocks:
            self._by_block.setdefault(block, {})[new] = None
        self._used += self._size(new)
        self.nbytes += new.nbytes
        while self._used > self._most:
            self._drop(next(iter(self._blocks)))

    def forget(self) -> None:
        """Drops everything."""
        self._blocks.clear()
        self._by_block.clear()
        self._used = self.nbytes = 0

    def _size(self, kept: KeptPrefix) -> int:
        return len(kept.token_ids) + self._state_tokens

    def _ends_at(self, kept: KeptPrefix, block: int) -> bool:
        return self._blocks[kept][-1] == block

    def _touch(self, kept: KeptPrefix) -> None:
        self._blocks[kept] = self._blocks.pop(kept)

    def _drop(self, kept: KeptPrefix) -> None:
        for block in self._blocks.pop(kept):
            del self._by_block[block][kept]
            if not self._by_block[block]:
                del self._by_block[block]
        self._used -= self._size(kept)
        self.nbytes -= kept.nbytes


def _placed(media: Sequence[Media], tokens: int) -> set[tuple[int, str]]:
    """Returns start and digest of each item that begins in the first ``tokens`` tokens."""
    return {(medium.start, medium.item.digest) for medium in media if medium.start < tokens}
