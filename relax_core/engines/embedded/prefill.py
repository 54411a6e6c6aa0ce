"""Computes keys, values and outputs of many token sequences, piece by piece, for prefill and scoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.engines.embedded.decoder_model import Attend, LanguageModel, MediaRows
from relax_core.engines.embedded.recurrent_states import PrefillStates

PREFILL_TOKENS = 512  # maximum tokens of a piece, with padding; products of this size fit the processor's cache
PASS_COLUMNS = (
    8192  # maximum columns of keys and values of the sequences in one pass; they are copied to slots afterwards
)


def like_lengths(lengths: Sequence[int], *, known: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yields the indices of the sequences for each pass. A pass has sequences of similar length, to reduce padding.

    The first ``known[i]`` tokens of sequence i are already computed.
    """
    behind = known or [0] * len(lengths)
    new = [length - skipped for length, skipped in zip(lengths, behind, strict=True)]
    order = sorted(range(len(lengths)), key=lambda index: (new[index], behind[index]))
    batch: list[int] = []
    widest = 0
    for index in order:
        rows, widest = len(batch) + 1, max(widest, lengths[index])
        if batch and (rows * new[index] > PREFILL_TOKENS or rows * widest > PASS_COLUMNS):
            yield batch
            batch, widest = [], lengths[index]
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
    """Returns the initial states of ``count`` sequences; None for a model without a gated delta net."""
    return None if model.config.delta_net is None else PrefillStates(model.config, dtype, slots=count)


class RequestedRows(NamedTuple):
    """Holds the tokens with a requested output: their sequence indices and their positions, both int64 ``[wanted]``."""

    sequences: Tensor
    positions: Tensor


class SequenceMedia(NamedTuple):
    """Holds the media inputs of one sequence.

    ``rows`` int64 ``[rows]``, ascending, are the positions in the sequence that get ``features`` ``[rows, hidden]`` as
    embeddings. ``deepstack[k]`` has the values that are added at these positions after layer k. ``positions`` ``[3,
    tokens]`` are the rotary positions of all tokens of the sequence. ``following`` is the rotary position of the next
    token minus the number of tokens.
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
    wanted: RequestedRows,
    states: PrefillStates | None = None,
    routes: np.ndarray | None = None,
    media: Sequence[SequenceMedia | None] = (),
    known: Sequence[int] = (),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fills ``kv`` piece by piece. For each piece, yields the wanted tokens in the piece and their outputs.

    Yields (indices into ``wanted``, the last layer's output before the final norm ``[indices, hidden]``). Shorter
    sequences are padded on the right. ``states``, for a model with a gated delta net, are the states before the first
    tokens. They are updated to the states after the last token of each sequence. ``routes`` ``[sequences, width,
    layers, per_token]``, if given, is filled with the experts of every token. ``media``, if given, has an entry for
    each sequence. ``known``, if given, is the number of leading tokens of each sequence with results that are already
    in ``kv`` and ``states``. In this case, ``kv`` and ``routes`` need one column more than the longest sequence, for
    the results of padding.
    """
    seen = [(index, sequence_media) for index, sequence_media in enumerate(media) if sequence_media is not None]
    count, width = len(token_ids), max(len(ids) for ids in token_ids)
    padded = np.zeros((count, width + 1), dtype=np.int64)
    for index, ids in enumerate(token_ids):
        padded[index, : len(ids)] = ids
    all_tokens = torch.from_numpy(padded)
    first = torch.tensor(known or [0] * count)
    most = max(len(ids) - start for ids, start in zip(token_ids, first.tolist(), strict=True))
    places = wanted.positions - first[wanted.sequences]
    chunk = max(1, PREFILL_TOKENS // count)
    for start in range(0, most, chunk):
        stop = min(start + chunk, most)
        columns = (first[:, None] + torch.arange(start, stop)).clamp_(max=width)
        positions = columns.clamp(max=width - 1).view(-1)
        tokens = all_tokens.gather(1, columns).view(-1)
        attend = _cached_attention(kv, columns) if known else _causal_attention(kv, start, stop)
        found = ((places >= start) & (places < stop)).nonzero()[:, 0]
        indices = wanted.sequences[found] * (stop - start) + places[found] - start
        rows = _media_rows(seen, first + start, stop - start) if seen else None
        left = [len(ids) - start - skipped for ids, skipped in zip(token_ids, first.tolist(), strict=True)]
        recur = None if states is None else states.piece(left, stop - start)
        if routes is None:
            hidden = model.hidden(tokens, positions, attend, recur=recur, wanted=indices, media=rows)
        else:
            chosen: list[Tensor] = []
            every = model.hidden(tokens, positions, attend, recur=recur, routes=chosen, media=rows)
            hidden = every.index_select(0, indices)
            experts = torch.stack(chosen, 1).view(count, stop - start, *routes.shape[2:])
            routes[np.arange(count)[:, None], columns.numpy()] = experts.numpy()
        yield found, hidden


def _media_rows(seen: Sequence[tuple[int, SequenceMedia]], starts: Tensor, width: int) -> MediaRows:
    """Returns the media inputs of a piece of ``width`` positions. ``seen`` lists (sequence, its media inputs).

    The piece begins at position ``starts[i]`` of sequence i.
    """
    parts = []
    for number, sequence_media in seen:
        start = int(starts[number])
        first, end = torch.searchsorted(sequence_media.rows, torch.tensor([start, start + width])).tolist()
        shift = number * width - start
        last = max(start, min(start + width, sequence_media.positions.shape[1]))
        parts.append(
            (
                sequence_media.rows[first:end] + shift,
                sequence_media.features[first:end],
                [layer[first:end] for layer in sequence_media.deepstack],
                torch.arange(start, last) + shift,
                sequence_media.positions[:, start:last],
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
    """Returns the causal attention of positions [start, stop). The attention writes keys and values to ``kv``.

    Tokens do not attend to padding, because padding comes after a sequence's tokens.
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


def _cached_attention(kv: Tensor, columns: Tensor) -> Attend:
    """Returns the causal attention of the positions ``columns`` ``[count, piece]`` of each sequence.

    The attention writes keys and values to ``kv``. Padding uses the last column of ``kv``. Tokens do not attend to this
    column.
    """
    count, heads, dim = kv.shape[2], kv.shape[3], kv.shape[5]
    piece, span = columns.shape[1], int(columns.max()) + 1
    rows = torch.arange(count)[:, None]
    mask = (torch.arange(span) <= columns[..., None])[:, None]

    def attend(layer: int, q: Tensor, new: Tensor) -> Tensor:
        kv[layer][:, rows, :, columns] = new.reshape(count, piece, 2, heads, dim)
        query = q.reshape(count, piece, -1, dim).transpose(1, 2)
        keys, values = kv[layer, :, :, :, :span]
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True, scale=1.0)
        return found.transpose(1, 2).reshape(count * piece, -1)

    return attend
