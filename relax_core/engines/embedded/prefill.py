"""One forward pass over many token rows, in pieces of columns: what prefill and scoring share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.model import Attend, Qwen3Model

PREFILL_ROWS = 512  # token rows, pads included, of one pass of a prefill: its products then stay in the cache


def like_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows, by number, that go through a pass together: of like length, so that few of their tokens are pads."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > PREFILL_ROWS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def empty_kv(model: Qwen3Model, *, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Room for keys and values, [layers, 2, count, kv_heads, width, head_dim]."""
    config = model.config
    return torch.zeros((config.num_layers, 2, count, config.num_kv_heads, width, config.head_dim), dtype=dtype)


def prefill_passes(
    model: Qwen3Model, token_ids: Sequence[Sequence[int]], kv: Tensor, routes: np.ndarray | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """Fills ``kv`` and yields (start, stop, output ``[rows, stop - start, hidden]``, not yet normed) piece by piece.

    Shorter rows are padded on the right: what a pad's output is says nothing. ``routes`` ``[rows, width, layers,
    per_token]``, where given, is filled with the experts of every place.
    """
    count, width = len(token_ids), kv.shape[4]
    padded = np.zeros((count, width), dtype=np.int64)
    for row, ids in enumerate(token_ids):
        padded[row, : len(ids)] = ids
    rows = torch.from_numpy(padded)
    chunk = max(1, PREFILL_ROWS // count)
    for start in range(0, width, chunk):
        stop = min(start + chunk, width)
        positions = torch.arange(start, stop).repeat(count)
        chosen: list[Tensor] | None = None if routes is None else []
        attend = _causal_attention(kv, start, stop)
        hidden = model.hidden(rows[:, start:stop].reshape(-1), positions, attend, chosen)
        if routes is not None and chosen is not None:
            routes[:, start:stop] = torch.stack(chosen, 1).view(count, stop - start, *routes.shape[2:]).numpy()
        yield start, stop, hidden.view(count, stop - start, -1)


def _causal_attention(kv: Tensor, start: int, stop: int) -> Attend:
    """Columns [start, stop) over all columns before them; writes them into ``kv``. Pads stand behind their row, so
    nothing real looks at them."""
    count, heads, dim = kv.shape[2], kv.shape[3], kv.shape[5]
    mask = None
    if start:
        mask = torch.ones(stop - start, stop, dtype=torch.bool).tril_(start)

    def attend(layer: int, q: Tensor, new: Tensor) -> Tensor:
        keys, values = kv[layer]
        kv[layer, :, :, :, start:stop] = new.reshape(count, -1, 2, heads, dim).permute(2, 0, 3, 1, 4)
        query = q.reshape(count, stop - start, -1, dim).transpose(1, 2)
        found = F.scaled_dot_product_attention(
            query,
            keys[:, :, :stop],
            values[:, :, :stop],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
            scale=1.0,
        )
        return found.transpose(1, 2).reshape(count * (stop - start), -1)

    return attend
