"""One forward pass over many token rows, in pieces of columns: what prefill and scoring share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.model.decoder_model import Attend, LanguageModel

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


def empty_kv(model: LanguageModel, *, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Room for keys and values, [layers, 2, count, kv_heads, width, head_dim]."""
    config = model.config
    return torch.zeros((config.num_layers, 2, count, config.num_kv_heads, width, config.head_dim), dtype=dtype)


class Wanted(NamedTuple):
    """Places whose output is asked for, int64 ``[wanted]`` each."""

    rows: Tensor
    columns: Tensor


def prefill_passes(
    model: LanguageModel,
    token_ids: Sequence[Sequence[int]],
    kv: Tensor,
    *,
    wanted: Wanted,
    routes: np.ndarray | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fills ``kv`` and yields piece by piece (which of the wanted places, their output ``[places, hidden]``, not yet
    normed).

    Shorter rows are padded on the right. ``routes`` ``[rows, width, layers, per_token]``, where given, is filled with
    the experts of every place.
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
        tokens = rows[:, start:stop].reshape(-1)
        attend = _causal_attention(kv, start, stop)
        found = ((wanted.columns >= start) & (wanted.columns < stop)).nonzero()[:, 0]
        places = wanted.rows[found] * (stop - start) + wanted.columns[found] - start
        if routes is None:
            hidden = model.hidden(tokens, positions, attend, wanted=places)
        else:
            chosen: list[Tensor] = []
            hidden = model.hidden(tokens, positions, attend, routes=chosen).index_select(0, places)
            routes[:, start:stop] = torch.stack(chosen, 1).view(count, stop - start, *routes.shape[2:]).numpy()
        yield found, hidden


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
