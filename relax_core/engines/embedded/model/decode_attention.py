"""Attention of decode steps: one query a slot over the slot's columns of the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_core.engines.embedded.model.kv_cache import KVCache


class CacheViews:
    """Views of one rectangle of the cache, made once for it: keys ``[layers, slots * kv_heads, head_dim, columns]``,
    values ``[layers, slots * kv_heads, columns, head_dim]``, and of each layer all rows of ``head_dim``."""

    def __init__(self, cache: KVCache) -> None:
        layers, _, slots, heads, columns, dim = cache.data.shape
        flat = cache.data.view(layers, 2, slots * heads, columns, dim)
        self.keys = flat[:, 0].transpose(2, 3)
        self.values = flat[:, 1]
        self.rows = cache.data.view(layers, 2 * slots * heads * columns, dim).unbind(0)
        self.kv_heads, self.head_dim = heads, dim
        head = torch.arange(slots * heads).view(slots, heads)
        self.first_rows = torch.cat((head, head + slots * heads), 1) * columns  # [slots, 2 * kv_heads], of column 0


class DecodeAttention:
    """For up to ``steps`` steps of the same samples in the same rectangle; `advance` goes to the next.

    Queries are grouped by key head: for one token two batched products beat the fused kernel, which pads the query.
    ``positions`` ``[slots]``: the columns of the tokens that the first step feeds.
    """

    def __init__(self, views: CacheViews, positions: np.ndarray, *, steps: int, dtype: torch.dtype) -> None:
        count = len(positions)
        self._used = count * views.kv_heads
        self._dim = views.head_dim
        self._layer_rows = views.rows
        self._all_keys = views.keys[:, : self._used]
        self._all_values = views.values[:, : self._used]
        self._width = int(positions.max()) + 1
        self._left = steps - 1  # steps behind this one
        columns = torch.from_numpy(positions)[:, None]
        places = torch.cat((columns.view(-1), (views.first_rows[:count] + columns).view(-1)))
        self._places = places  # all that moves by one with a step
        self.positions, self._rows = places[:count], places[count:]
        self._bias: Tensor | None = None
        if int(positions.min()) + 1 < self._width:
            # of the last step; an earlier one's is its right part, for hidden columns stay as many
            hidden = torch.arange(self._width + self._left) > columns + self._left
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            self._bias = bias.repeat_interleave(views.kv_heads, 0)[:, None]
        self._cut()

    def _cut(self) -> None:
        """What this step looks at, layer by layer."""
        self._keys = self._all_keys.narrow(3, 0, self._width).unbind(0)
        self._values = self._all_values.narrow(2, 0, self._width).unbind(0)
        self._step_bias = None if self._bias is None else self._bias.narrow(2, self._left, self._width)

    def advance(self) -> None:
        """To the next step."""
        self._places.add_(1)
        self._width += 1
        self._left -= 1
        self._cut()

    def __call__(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """See `model.Attend`; writes the keys and values of the new tokens to their columns."""
        self._layer_rows[layer].index_copy_(0, self._rows, kv.reshape(-1, self._dim))
        scores = torch.bmm(q.reshape(self._used, -1, self._dim), self._keys[layer])
        if self._step_bias is not None:
            scores.add_(self._step_bias)
        return torch.bmm(scores.softmax(-1), self._values[layer]).view(q.shape[0], -1)
