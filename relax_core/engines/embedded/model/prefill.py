"""Computes keys, values and outputs of many token sequences, piece by piece; prefill and scoring share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.model.decoder_model import Attend, LanguageModel, MediaRows
from relax_core.engines.embedded.model.recurrent_states import PrefillStates

PREFILL_TOKENS = 512  # tokens of one pass, with padding; the products of so many stay in the processor's cache


def like_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices of sequences that go through a pass together, of similar length so that padding is short."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def empty_kv(model: LanguageModel, *, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns zeros for keys and values, [layers, 2, count, kv_heads, width, head_dim]."""
    config = model.config
    return torch.zeros(
        (len(config.attention_layers), 2, count, config.num_kv_heads, width, config.head_dim), dtype=dtype
    )


def empty_states(model: LanguageModel, *, count: int, dtype: torch.dtype) -> PrefillStates | None:
    """Returns the states before any token of ``count`` sequences, None for a model without a gated delta net."""
    return None if model.config.delta_net is None else PrefillStates(model.config, dtype, slots=count)


class Wanted(NamedTuple):
    """Names the tokens whose output is asked for by their sequences and positions, int64 ``[wanted]`` each."""

    sequences: Tensor
    positions: Tensor


class SequenceMedia(NamedTuple):
    """Holds the images and videos of one sequence.

    ``rows`` int64 ``[rows]``, ascending, are its positions whose embeddings are ``features`` ``[rows, hidden]``;
    ``deepstack[k]`` has their rows for layer k. ``positions`` ``[3, tokens]`` are the rotary positions of all of its
    tokens, and ``following`` is that of the token after them, less their number.
    """

    rows: Tensor
    features: Tensor
    deepstack: tuple[Tensor, ...]
    positions: Tensor
    following: float


def prefill_passes(
    model: LanguageModel,
    token_ids: Sequence[Sequence[int]],
    kv: Tensor,
    *,
    wanted: Wanted,
    states: PrefillStates | None = None,
    routes: np.ndarray | None = None,
    media: Sequence[SequenceMedia | None] = (),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fills ``kv`` piece by piece; yields for each piece which wanted tokens it has, and their outputs.

    The yielded pair is (indices into ``wanted``, the last layer's output before its norm ``[indices, hidden]``).
    Shorter sequences are padded on the right. ``states`` are those before the first tokens, for a model with a gated
    delta net; they become those behind each sequence's last token. ``routes`` ``[sequences, width, layers,
    per_token]``, if given, is filled with the experts of every token. ``media``, if given, has an entry for each
    sequence.
    """
    seen = [(index, one) for index, one in enumerate(media) if one is not None]
    count, width = len(token_ids), kv.shape[4]
    padded = np.zeros((count, width), dtype=np.int64)
    for index, ids in enumerate(token_ids):
        padded[index, : len(ids)] = ids
    all_tokens = torch.from_numpy(padded)
    chunk = max(1, PREFILL_TOKENS // count)
    for start in range(0, width, chunk):
        stop = min(start + chunk, width)
        positions = torch.arange(start, stop).repeat(count)
        tokens = all_tokens[:, start:stop].reshape(-1)
        attend = _causal_attention(kv, start, stop)
        found = ((wanted.positions >= start) & (wanted.positions < stop)).nonzero()[:, 0]
        indices = wanted.sequences[found] * (stop - start) + wanted.positions[found] - start
        rows = _media_rows(seen, start, stop) if seen else None
        recur = None if states is None else states.piece([len(ids) - start for ids in token_ids], stop - start)
        if routes is None:
            hidden = model.hidden(tokens, positions, attend, recur=recur, wanted=indices, media=rows)
        else:
            chosen: list[Tensor] = []
            every = model.hidden(tokens, positions, attend, recur=recur, routes=chosen, media=rows)
            hidden = every.index_select(0, indices)
            routes[:, start:stop] = torch.stack(chosen, 1).view(count, stop - start, *routes.shape[2:]).numpy()
        yield found, hidden


def _media_rows(seen: Sequence[tuple[int, SequenceMedia]], start: int, stop: int) -> MediaRows:
    """Returns what the items of some sequences, given with their numbers, change at positions [start, stop)."""
    parts = []
    for number, one in seen:
        first, end = torch.searchsorted(one.rows, torch.tensor([start, stop])).tolist()
        shift = number * (stop - start) - start
        last = max(start, min(stop, one.positions.shape[1]))
        parts.append(
            (
                one.rows[first:end] + shift,
                one.features[first:end],
                [layer[first:end] for layer in one.deepstack],
                torch.arange(start, last) + shift,
                one.positions[:, start:last],
            )
        )
    rows, features, deepstack, placed, positions = zip(*parts, strict=True)
    return MediaRows(
        rows=torch.cat(rows),
        features=torch.cat(features),
        deepstack=[torch.cat(layer) for layer in zip(*deepstack, strict=True)],
        placed=torch.cat(placed),
        positions=torch.cat(positions, 1),
    )


def _causal_attention(kv: Tensor, start: int, stop: int) -> Attend:
    """Returns the attention of positions [start, stop) over all positions up to their own; it fills ``kv`` there.

    Padding stands after a sequence's tokens, so that no token attends to it.
    """
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
