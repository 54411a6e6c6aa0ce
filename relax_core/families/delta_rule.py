"""Computes the gated delta rule (Yang et al. 2024, arXiv 2412.06464) over segments of rows with initial states.

Each head has a recurrent matrix S ``[key dim, value dim]``. Row t has query q, key k, value v, decay exp(g) and writing
strength b:

    S_t = exp(g) S_(t-1) + k (b (v - exp(g) S_(t-1)^T k))^T        output = S_t^T q

Rows are computed in chunks: one triangular system gives the rows of a chunk, and each chunk passes its state to the
next (section 3.3 of the paper). With chunks of one row this is the recurrence above. All values are float32.

The trainer and the embedded engine use this module. It is plain torch and runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Segments:
    """Describes the layout of consecutive segments of rows in chunks of ``width`` rows.

    ``grid`` int64 ``[chunks * width]`` has the row at each position of the chunks. At a pad it has the number of rows,
    the index of an added row of zeros. ``place`` int64 ``[rows]`` has the position of each row. Chunks are ordered by
    step: step j has chunk j of the ``counts[j]`` longest segments. ``order`` int64 ``[segments]`` has the indexes of
    the segments, longest first.
    """

    grid: Tensor
    place: Tensor
    counts: tuple[int, ...]
    order: Tensor
    width: int

    @staticmethod
    def of(lengths: Sequence[int], *, chunk_rows: int = CHUNK_ROWS, device: torch.device | str = "cpu") -> Segments:
        """Plans segments of ``lengths`` rows; each segment has at least one row."""
        sizes = np.asarray(lengths, dtype=np.int64)
        assert len(sizes) and sizes.min() > 0, "a segment has no rows"
        # Narrower chunks need no more calls if all segments fit, so a chunk is at most as wide as the longest segment.
        width = min(chunk_rows, int(sizes.max()))
        order = np.argsort(-sizes, kind="stable")
        chunks = -(-sizes[order] // width)
        counts = tuple(int((chunks > step).sum()) for step in range(int(chunks[0])))
        before = np.cumsum([0, *counts[:-1]])  # number of chunks before each step
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        segment = np.repeat(np.arange(len(sizes)), sizes)
        inside = np.arange(len(segment)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = (before[inside // width] + rank[segment]) * width + inside % width
        grid = np.full(sum(counts) * width, len(segment), dtype=np.int64)
        grid[place] = np.arange(len(segment))
        put = [torch.from_numpy(array).to(device) for array in (grid, place, order)]
        return Segments(put[0], put[1], counts, put[2], width)

    def chunked(self, rows: Tensor) -> Tensor:
        """Copies ``[rows, heads, …]`` into chunks ``[chunks, heads, width, …]``, with zeros at pads."""
        with_zero = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return with_zero.index_select(0, self.grid).unflatten(0, (-1, self.width)).transpose(1, 2)

    def rows(self, chunks: Tensor) -> Tensor:
        """Copies ``[chunks, heads, width, dim]`` back to ``[rows, heads, dim]``."""
        return chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.place)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor, segments: Segments, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the outputs, float32 ``[rows, value heads, value dim]``, and the states after the segments.

    ``query`` and ``key`` are ``[rows, key heads, key dim]``; this function scales them to length 1. ``value`` is
    ``[rows, value heads, value dim]``. ``decay`` (the logarithm, at most 0) and ``strength`` are ``[rows, value
    heads]``. ``states`` are the states before the segments, float32 ``[segments, value heads, key dim, value dim]``.
    """
    repeats = value.shape[1] // key.shape[1]
    scale = key.shape[-1] ** -0.5
    query = (unit_length(query.float()) * scale).repeat_interleave(repeats, 1)
    key = unit_length(key.float()).repeat_interleave(repeats, 1)
    query, key, value = (segments.chunked(tensor) for tensor in (query, key, value.float()))
    decay, strength = (segments.chunked(tensor.float()[..., None])[..., 0] for tensor in (decay, strength))
    total = decay.cumsum(-1)  # [chunks, heads, width]
    upper = torch.ones(segments.width, segments.width, dtype=torch.bool, device=key.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(upper, float("-inf")).exp()
    written = key * strength[..., None]
    system = written @ key.transpose(-1, -2) * between
    inputs = torch.cat([value * strength[..., None], written * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, inputs, upper=False, unitriangular=True)
    values, reading = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside = query @ key.transpose(-1, -2) * between
    outwards = query * total.exp()[..., None]
    kept = key * (total[..., -1:] - total).exp()[..., None]
    outputs, states = _scan(values, reading, inside, outwards, kept, total[..., -1].exp(), segments, states)
    return segments.rows(outputs), states


def _scan(
    values: Tensor,
    reading: Tensor,
    inside: Tensor,
    outwards: Tensor,
    kept: Tensor,
    decay: Tensor,
    segments: Segments,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Passes the states from chunk to chunk; returns the outputs of all chunks and the states after the segments."""
    state = states.index_select(0, segments.order)
    outputs: list[Tensor] = []
    ended: list[Tensor] = []  # states of the segments that ended, the shortest segments first
    first = 0
    for count in segments.counts:
        if count < len(state):
            ended.append(state[count:])
            state = state[:count]
        chunks = slice(first, first + count)
        new = values[chunks] - reading[chunks] @ state
        outputs.append(outwards[chunks] @ state + inside[chunks] @ new)
        state = state * decay[chunks, :, None, None] + kept[chunks].transpose(-1, -2) @ new
        first += count
    in_order = torch.cat([state, *reversed(ended)]) if ended else state
    return torch.cat(outputs), torch.empty_like(in_order).index_copy(0, segments.order, in_order)


def unit_length(heads: Tensor) -> Tensor:
    """Divides each vector of ``[…, dim]`` by its length, with the same formula as flash-linear-attention."""
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


def log_decay(a_log: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
    """Returns the logarithm of the decay, float32 ``[rows, heads]``, from the decay's projection ``[rows, heads]``."""
    return -a_log.float().exp() * F.softplus(rows.float() + bias)


def gated_norm(heads: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Returns the RMSNorm of ``[…, dim]`` times SiLU of ``gate``, in the dtype of ``gate``."""
    normed = F.rms_norm(heads.float(), heads.shape[-1:], eps=eps).to(gate.dtype)
    return (weight * normed * F.silu(gate.float())).to(gate.dtype)
