"""Computes the attention of decode steps: one query a slot over the slot's columns of the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_core.engines.embedded.model.kv_cache import KVCache


class CacheViews:
    """Holds views of the cache's tensor, which are made once for each allocation.

    ``keys`` is ``[layers, slots * kv_heads, head_dim, columns]``, ``values`` is ``[layers, slots * kv_heads, columns,
    head_dim]``. ``vectors`` holds for each layer all keys and values as ``[2 * slots * kv_heads * columns, head_dim]``.
    """

    def __init__(self, cache: KVCache) -> None:
        layers, _, slots, heads, columns, dim = cache.data.shape
        flat = cache.data.view(layers, 2, slots * heads, columns, dim)
        self.keys = flat[:, 0].transpose(2, 3)
        self.values = flat[:, 1]
        self.vectors = cache.data.view(layers, 2 * slots * heads * columns, dim).unbind(0)
        self.kv_heads, self.head_dim = heads, dim
        head = torch.arange(slots * heads).view(slots, heads)
        # [slots, 2 * kv_heads], the indices into ``vectors`` of column 0
        self.first_vectors = torch.cat((head, head + slots * heads), 1) * columns


class DecodeAttention:
    """Computes the attention of up to ``steps`` steps of the same samples; `advance` goes on to the next step.

    Queries are grouped by key head, because for one token two batched products are faster than the fused kernel, which
    pads the query. ``positions`` ``[slots]`` holds the columns of the tokens that the first step computes;
    ``width`` counts the columns that the current step reads for each slot: those of the longest sample.
    ``rotary_shift`` ``[slots]``, if given, is what to add to them for the rotary positions. ``rotary`` ``[slots]`` has
    the rotary positions of the current step: int64, or float64 if one has a fraction or is greater than its column,
    since a table has those of the columns only.
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
        self.width = int(positions.max()) + 1
        self._left = steps - 1  # steps after this one
        columns = torch.from_numpy(positions)[:, None]
        # The rotary positions, then the places of keys and values.
        moving = torch.cat((columns.view(-1), (views.first_vectors[:count] + columns).view(-1)))
        self._moving = moving  # all indices that a step increases by one
        self.rotary, self._vectors = moving[:count], moving[count:]
        self._apart: Tensor | None = None  # rotary positions that are not among the indices
        if rotary_shift is not None and np.count_nonzero(rotary_shift):
            self._shift_rotary(rotary_shift)
        self._bias: Tensor | None = None
        if int(positions.min()) + 1 < self.width:
            # This is the last step's bias; an earlier step uses a part of it, because the number of masked columns of
            # a slot does not change.
            hidden = torch.arange(self.width + self._left) > columns + self._left
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._bias = bias.repeat_interleave(views.kv_heads, 0)[:, None]
        self._narrow()

    def _shift_rotary(self, rotary_shift: np.ndarray) -> None:
        if (rotary_shift == np.trunc(rotary_shift)).all() and rotary_shift.max() <= 0:
            self.rotary += torch.from_numpy(rotary_shift.astype(np.int64))
        else:
            self.rotary = self._apart = self.rotary + torch.from_numpy(rotary_shift)

    def _narrow(self) -> None:
        """Makes the views of this step's keys, values and bias."""
        self._keys = self._all_keys.narrow(3, 0, self.width).unbind(0)
        self._values = self._all_values.narrow(2, 0, self.width).unbind(0)
        self._step_bias = None if self._bias is None else self._bias.narrow(2, self._left, self.width)

    def advance(self) -> None:
        """Goes on to the next step."""
        self._moving.add_(1)
        if self._apart is not None:
            self._apart.add_(1)
        self.width += 1
        self._left -= 1
        self._narrow()

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Computes attention as `decoder_model.Attend` says; writes the new keys and values to the cache."""
        self._layer_vectors[layer].index_copy_(0, self._vectors, kv.reshape(-1, self._dim))
        scores = torch.bmm(q.reshape(self._used, -1, self._dim), self._keys[layer])
        if self._step_bias is not None:
            scores.add_(self._step_bias)
        return torch.bmm(scores.softmax(-1), self._values[layer]).view(q.shape[0], -1)
