"""Computes log-probs of chosen tokens, entropy and top-k tokens; the logits of all rows are never in memory at once.

At 4,096 rows and a vocabulary of 151,936 the logits take 2.5 GB, and a plain log_softmax keeps three buffers of this
size. This module allocates one buffer of ``[chunk_rows, vocab]``. The forward pass fills the buffer chunk by chunk and
saves no chunk; the backward pass computes each chunk again. If one chunk has all rows, the backward pass reuses it.
Tiny inputs use plain operations, because chunks would cost more Python time than they save memory.

**Tensor parallelism.** With ``group`` the weight is this rank's shard of the vocabulary, ``[vocab / tp, hidden]``. It
begins at token id ``rank * vocab / tp``. Every rank computes its chunks as if its shard were the whole vocabulary. At
the end the ranks exchange a few numbers per row. Let Z_r be the normalizer of a shard and Z the normalizer of the whole
vocabulary. Then p = p_r Z_r / Z, so one number per row converts the shard's probabilities to probabilities over the
whole vocabulary, also in the backward pass.

**Common arguments.** ``hidden`` ``[rows, hidden]`` and ``weight`` have one floating dtype. ``targets`` ``[rows]`` are
int64 in 0..vocab-1. Rows of the weight from ``vocab_size`` on are padding and have probability 0. Logits and the values
computed from them are float32 for bfloat16 inputs, too (float64 stays float64). On a CPU the factors of the matrix
products are float32 copies of the weight and of a chunk. On a GPU the factors keep the inputs' dtype and the sums are
float32. The logits' gradient is then rounded to that dtype, and the weight's gradient is copied to it at the end. All
ranks of ``group`` must have equal inputs (except the weight) and equal incoming gradients; their results are then
equal. The gradient of ``hidden`` is summed over the ranks, and the gradient of ``weight`` belongs to the shard. Each
gradient has its tensor's dtype.

**Truncation.** With ``truncation`` the softmax of each row covers only the row's kept tokens. Both passes set the
logits of the excluded tokens in a chunk to `OUTSIDE`. An excluded token has the log-prob `OUTSIDE` and no gradient. The
targets must be kept tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.train.device import add_wide_product, training_device, wide_product

_MASKS = 32  # The number of bitmasks that are unpacked at the same time, to one byte per token of the vocabulary.


class KeptRows:
    """Holds the encoded kept sets of the rows of the output layer; `leave_out` decodes them chunk by chunk.

    Bitmasks are on the device. Ids are on the host, because counting ids on the device would synchronize with it.
    """

    def __init__(self, kept: KeptTokens, device: torch.device) -> None:
        sets = kept.arrays()
        self._vocab_size = kept.vocab_size
        self._listed, self._masked = np.flatnonzero(sets.listed), np.flatnonzero(sets.masked)
        self._ids, self._rows_of_ids = sets.ids, np.repeat(self._listed, sets.counts[sets.listed])
        self._bits = torch.from_numpy(sets.bits.copy()).to(device)
        self._powers = 1 << torch.arange(8, dtype=torch.uint8, device=device)

    def leave_out(self, logits: Tensor, rows: slice, *, first: int) -> None:
        """Sets the logits ``[rows, width]`` of excluded tokens to `OUTSIDE`.

        ``first`` is the id of the first column's token.
        """
        listed, masked = self._listed[_inside(self._listed, rows)], _inside(self._masked, rows)
        if len(listed):
            self._leave_out_listed(logits, rows, listed - rows.start, first=first)
        if masked.stop > masked.start:
            self._leave_out_masked(logits, masked.start, self._masked[masked] - rows.start, first=first)

    def _leave_out_listed(self, logits: Tensor, rows: slice, at: np.ndarray, *, first: int) -> None:
        """Saves the few kept logits, fills the rows with `OUTSIDE` and writes the kept logits back.

        This needs no buffer as wide as a row.
        """
        some = _inside(self._rows_of_ids, rows)
        columns = self._ids[some] - first
        here = (columns >= 0) & (columns < logits.shape[1])
        pairs = np.stack([self._rows_of_ids[some][here] - rows.start, columns[here]])
        kept = torch.from_numpy(pairs).to(logits.device).unbind(0)
        values = logits[kept]
        if len(at) == len(logits):
            logits.fill_(OUTSIDE)
        else:
            logits.index_fill_(0, torch.from_numpy(at).to(logits.device), OUTSIDE)
        logits[kept] = values

    def _leave_out_masked(self, logits: Tensor, number: int, at: np.ndarray, *, first: int) -> None:
        """Applies bitmasks ``number``, ``number`` + 1, … to the rows ``at`` of the logits.

        Tokens beyond the sets' vocabulary are excluded.
        """
        width = max(0, min(logits.shape[1], self._vocab_size - first))
        logits[torch.from_numpy(at).to(logits.device), width:] = OUTSIDE
        begin, end = first // 8, -(-(first + width) // 8)
        for run in np.split(np.arange(len(at)), np.flatnonzero(np.diff(at) > 1) + 1):
            for piece in np.split(run, range(_MASKS, len(run), _MASKS)):
                start, row = number + int(piece[0]), int(at[piece[0]])
                some = self._bits[start : start + len(piece), begin:end]
                outside = (some[:, :, None] & self._powers).eq_(0).view(torch.bool).flatten(1)
                neighbours = logits[row : row + len(piece), :width]
                neighbours.masked_fill_(outside[:, first - 8 * begin :][:, :width], OUTSIDE)


def _inside(numbers: np.ndarray, rows: slice) -> slice:
    """Returns the slice of ``numbers`` (ascending) with the row numbers in ``rows``."""
    start, stop = np.searchsorted(numbers, (rows.start, rows.stop)).tolist()
    return slice(start, stop)


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Holds the rows' kept sets if top_k, top_p or min_p excluded tokens, and the ids ``banned`` in all rows."""

    kept: KeptRows | None
    banned: Sequence[int]

    @staticmethod
    def of(kept: KeptTokens | None, banned: Sequence[int], device: torch.device) -> Truncation | None:
        """Returns None if no token is excluded."""
        if kept is None and not banned:
            return None
        return Truncation(kept=None if kept is None else KeptRows(kept, device), banned=banned)

    def apply(self, logits: Tensor, rows: slice, *, first: int) -> None:
        """Sets the logits ``[rows, width]`` of excluded tokens to `OUTSIDE`; ``first`` is the first column's token."""
        columns = [token - first for token in self.banned if 0 <= token - first < logits.shape[1]]
        if columns:
            logits.index_fill_(1, torch.tensor(columns, device=logits.device), OUTSIDE)
        if self.kept is not None:
            self.kept.leave_out(logits, rows, first=first)


_MIN_LOGPROB, _LEAST = -87.0, 2e-38  # exp(_MIN_LOGPROB) is a normal float32 number below _LEAST.
# Up to this number of logits plain operations are faster, and their three buffers take less than 1 MB.
_PLAIN_LOGITS = 2**16


class HeadOutputs(NamedTuple):
    """Holds the float32 outputs of each row; the entropy (in nats) and the log-probs of other tokens are optional."""

    logprobs: Tensor  # [rows]
    entropy: Tensor | None = None  # [rows]
    gathered: Tensor | None = None  # [rows, k]


class TopK(NamedTuple):
    """Holds each row's target log-prob ``[rows]`` and its k most likely tokens, without gradient.

    ``top_ids`` are int64 ``[rows, k]``, most likely first, and ``top_logprobs`` ``[rows, k]`` are their log-probs. If
    fewer than k tokens are kept, the remaining ids are -1 and the remaining log-probs are `OUTSIDE`.
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def head_outputs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    inverse_temperature: float,
    chunk_rows: int,
    gather: Tensor | None = None,
    entropy: bool = False,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    truncation: Truncation | None = None,
) -> HeadOutputs:
    """Returns the log-prob of each row's target under ``softmax(hidden @ weight.T * inverse_temperature)``.

    If requested, also returns the entropy and the log-probs of the tokens ``gather`` from the same logits. At most
    ``[chunk_rows, vocab]`` floats of logits exist at the same time (three times this number for at most 2**16 logits).
    The result is differentiable once.

    ``gather`` is int64 ``[rows, k]`` in 0..vocab-1; a row may name a token twice. With ``truncation`` it may contain -1
    for no token, which is treated as an excluded token. Gradients flow through all three outputs. The backward pass of
    the entropy needs two buffers. Each of these buffers has half the rows, so the bound of ``[chunk_rows, vocab]``
    floats holds for both together (if ``chunk_rows`` is at least 2).
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1], "want [rows, h], [vocab, h]"
    assert hidden.dtype == weight.dtype and hidden.is_floating_point(), "hidden and weight must have one float dtype"
    assert targets.shape == hidden.shape[:1] and targets.dtype == torch.int64, "expected one int64 target per row"
    assert gather is None or (gather.shape[0] == targets.shape[0] and gather.dtype == torch.int64), "want [rows, k]"
    assert chunk_rows >= 1 and inverse_temperature > 0.0
    columns = targets[:, None] if gather is None else torch.cat([targets[:, None], gather], dim=1)
    few = hidden.shape[0] <= chunk_rows and hidden.shape[0] * weight.shape[0] <= _PLAIN_LOGITS
    if group is None and truncation is None and few:
        chosen, of_rows = _plain_outputs(hidden, weight[:vocab_size], columns, inverse_temperature, entropy)
    else:
        shard = _Shard.of(weight, group, vocab_size=vocab_size)
        rows = max(1, chunk_rows // 2) if entropy else chunk_rows
        keep = torch.is_grad_enabled() and not entropy and hidden.shape[0] <= chunk_rows
        settings = _Settings(inverse_temperature, rows, entropy, keep, truncation)
        chosen, of_rows = _HeadOutputs.apply(hidden, weight, columns, shard, settings)
    return HeadOutputs(chosen[:, 0], of_rows, None if gather is None else chosen[:, 1:])


@torch.no_grad()
def top_k_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    inverse_temperature: float,
    chunk_rows: int,
    top_k: int,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    truncation: Truncation | None = None,
) -> TopK:
    """Returns each row's target log-prob and ``top_k`` most likely tokens; memory is bounded as in `head_outputs`.

    ``top_k`` is between 1 and the vocabulary size.
    """
    shard = _Shard.of(weight, group, vocab_size=vocab_size)
    matrix = shard.matrix(weight)
    owned, columns = shard.own(targets[:, None])
    settings = _Settings(inverse_temperature, chunk_rows, False, False, truncation)
    dtype = _maths_dtype(weight)
    chosen = matrix.new_zeros(columns.shape, dtype=dtype)
    # A shard with fewer tokens than ``top_k`` has -inf in the remaining columns; the final top-k never selects these
    # columns.
    values = matrix.new_full((len(hidden), top_k), -torch.inf, dtype=dtype)
    ids = targets.new_zeros(len(hidden), top_k)
    own_k = min(top_k, shard.size)
    normalizers = shard.normalizers(matrix, len(hidden))
    for rows, logprobs in _log_softmax_chunks(hidden, matrix, shard.first, settings, normalizers):
        torch.gather(logprobs, 1, columns[rows], out=chosen[rows])
        top = logprobs.topk(own_k, dim=1)
        values[rows, :own_k], ids[rows, :own_k] = top.values, top.indices + shard.first
    if normalizers is not None:
        above = shard.whole_above_own(normalizers)[:, None]
        chosen = shard.add(torch.where(owned, chosen - above, 0.0))
        candidates = shard.gather(values - above).transpose(0, 1).flatten(1)
        values, winners = candidates.topk(top_k, dim=1)
        ids = shard.gather(ids).transpose(0, 1).flatten(1).gather(1, winners)
    if truncation is not None:
        none = _left_out(values)
        ids, values = ids.masked_fill(none, -1), values.masked_fill(none, OUTSIDE)
    return TopK(chosen[:, 0], ids, values)


# -- One rank's part of the vocabulary ------------------------------------------------------------------------------
class _Shard(NamedTuple):
    """Describes this rank's token ids, ``first`` … ``first + size - 1`` without padding.

    The last ranks may have size 0.
    """

    first: int
    size: int
    group: ProcessGroup | None

    @staticmethod
    def of(weight: Tensor, group: ProcessGroup | None, *, vocab_size: int | None) -> _Shard:
        width = weight.shape[0]
        first = 0 if group is None else group.rank() * width
        return _Shard(first, width if vocab_size is None else min(max(vocab_size - first, 0), width), group)

    def matrix(self, weight: Tensor) -> Tensor:
        """Returns ``[size, hidden]`` in the dtype of the factors; only on a GPU torch sums bfloat16 in float32."""
        return weight[: self.size].to(weight.dtype if training_device().gpu else _maths_dtype(weight))

    def own(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a mask of the token ids in this shard, and their columns in the shard (0 for other tokens)."""
        local = columns - self.first
        owned = (local >= 0) & (local < self.size)
        return owned, torch.where(owned, local, 0)

    def normalizers(self, matrix: Tensor, rows: int) -> Tensor | None:
        """Allocates the tensor for the log-sum-exp of each row's logits in this shard; returns None without a group."""
        return None if self.group is None else matrix.new_full((rows,), -torch.inf, dtype=_maths_dtype(matrix))

    def whole_above_own(self, normalizers: Tensor) -> Tensor:
        """Returns the log-sum-exp over all shards minus this shard's log-sum-exp: ``[rows]``, not negative."""
        return self.gather(normalizers).logsumexp(dim=0) - normalizers

    def gather(self, own: Tensor) -> Tensor:
        """Gathers the ranks' tensors ``[...]`` into ``[ranks, ...]``."""
        assert self.group is not None
        gathered = own.new_empty(self.group.size(), *own.shape)
        dist.all_gather(list(gathered.unbind(0)), own.contiguous(), group=self.group)
        return gathered

    def add(self, own: Tensor) -> Tensor:
        """Sums a tensor over the ranks in place."""
        dist.all_reduce(own, group=self.group)
        return own


# -- Chunks ---------------------------------------------------------------------------------------------------------
class _Settings(NamedTuple):
    """Holds a pass's settings.

    With ``keep`` all rows are one chunk, and the backward pass reuses the chunk's softmax.
    """

    inverse_temperature: float
    chunk_rows: int
    entropy: bool
    keep: bool
    truncation: Truncation | None


def _logit_chunks(
    hidden: Tensor, matrix: Tensor, first: int, settings: _Settings
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields the rows of each chunk, their hidden states ``[chunk, hidden]`` and their logits ``[chunk, size]``.

    ``first`` is the id of the shard's first token. The hidden states have the matrix's dtype. All logits share one
    buffer: the next chunk overwrites it. An empty shard yields no chunk.
    """
    if not len(matrix):
        return
    buffer = matrix.new_empty(min(len(hidden), settings.chunk_rows), len(matrix), dtype=_maths_dtype(matrix))
    for start in range(0, len(hidden), settings.chunk_rows):
        rows = slice(start, min(start + settings.chunk_rows, len(hidden)))
        chunk = hidden[rows].to(matrix.dtype)
        logits = buffer[: len(chunk)]
        if logits.dtype == matrix.dtype:
            # With beta=0 addmm ignores the first argument; `alpha` scales the matrix product.
            torch.addmm(logits, chunk, matrix.t(), beta=0, alpha=settings.inverse_temperature, out=logits)
        else:
            wide_product(chunk, matrix.t(), logits.dtype, out=logits).mul_(settings.inverse_temperature)
        if settings.truncation is not None:
            settings.truncation.apply(logits, rows, first=first)
        yield rows, chunk, logits


def _log_softmax_chunks(
    hidden: Tensor, matrix: Tensor, first: int, settings: _Settings, normalizers: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of each chunk and their log-softmax, and writes log-sum-exps to ``normalizers`` ``[rows]``."""
    for rows, _, logits in _logit_chunks(hidden, matrix, first, settings):
        highest = None if normalizers is None else logits.amax(dim=1)
        # The softmax can run in place, because each row is read before it is written (test_in_place_softmax).
        torch.log_softmax(logits, dim=1, out=logits)
        if normalizers is not None:
            assert highest is not None
            normalizers[rows] = highest - logits.amax(dim=1)  # The second term is small, so the difference is exact.
        yield rows, logits


def _exponentials(logprobs: Tensor, settings: _Settings) -> Tensor:
    """Turns the log-softmax of a chunk into its softmax in place."""
    if settings.truncation is None or training_device().gpu:
        return logprobs.exp_()
    # Truncation excludes many tokens, and on a CPU torch.exp takes ten times as long for values that underflow.
    return torch.nn.functional.threshold(logprobs.clamp_(min=_MIN_LOGPROB).exp_(), _LEAST, 0.0, inplace=True)


def _left_out(logprobs: Tensor) -> Tensor:
    """Returns True at the log-probs of excluded tokens, even if a normalizer was subtracted from the log-probs."""
    return logprobs < OUTSIDE / 2


def _maths_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# -- Forward and backward -------------------------------------------------------------------------------------------
def _plain_outputs(
    hidden: Tensor, weight: Tensor, columns: Tensor, inverse_temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    dtype = _maths_dtype(weight)
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    if inverse_temperature != 1.0:
        logits = logits * inverse_temperature
    logprobs = torch.log_softmax(logits, dim=1)
    return logprobs.gather(1, columns), -(logprobs.exp() * logprobs).sum(dim=1) if entropy else None


class _HeadOutputs(torch.autograd.Function):
    """Computes chosen columns of the log-softmax ``[rows, columns]``, and its entropy ``[rows]`` if requested."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, columns: Tensor, shard: _Shard, settings: _Settings
    ) -> tuple[Tensor, Tensor | None]:
        matrix = shard.matrix(weight)
        owned, local = shard.own(columns)
        dtype = _maths_dtype(weight)
        chosen = matrix.new_zeros(columns.shape, dtype=dtype)
        entropy = matrix.new_zeros(len(hidden), dtype=dtype) if settings.entropy else None
        normalizers = shard.normalizers(matrix, len(hidden))
        kept = None
        for rows, logprobs in _log_softmax_chunks(hidden, matrix, shard.first, settings, normalizers):
            torch.gather(logprobs, 1, local[rows], out=chosen[rows])
            if entropy is not None:
                entropy[rows] = torch.special.entr(_exponentials(logprobs, settings), out=logprobs).sum(dim=1)
            elif settings.keep:
                kept = _exponentials(logprobs, settings)
        above = None
        if normalizers is not None:
            above = shard.whole_above_own(normalizers)
            chosen = shard.add(torch.where(owned, chosen - above[:, None], 0.0))
            if entropy is not None:  # the mean entropy within the shards plus the entropy of the shards' shares
                share = above.neg().exp()
                entropy = shard.add(share * entropy + torch.special.entr(share))
        outside = None
        if settings.truncation is not None:
            outside = _left_out(chosen) | (columns < 0)
            chosen.masked_fill_(outside, OUTSIDE)
        ctx.save_for_backward(hidden, weight, columns, entropy, above, kept, outside)
        ctx.shard, ctx.settings = shard, settings
        return chosen, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # With p the softmax: d log p_j / d logits = one_hot_j - p, dH / d logits = entr(p) - H p, entr(p) = -p log p.
        # Each row's factor is multiplied into rows as wide as `hidden`, not into rows as wide as the vocabulary.
        hidden, weight, columns, entropy, above, kept, outside = ctx.saved_tensors
        shard, settings, scale = ctx.shard, ctx.settings, ctx.settings.inverse_temperature
        matrix = shard.matrix(weight)
        dtype = _maths_dtype(weight)
        owned, local = shard.own(columns)
        grad_hidden, grad_weight = None, None
        if ctx.needs_input_grad[0]:
            grad_hidden = hidden.new_zeros(hidden.shape, dtype=hidden.dtype if shard.group is None else dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = matrix.new_zeros(weight.shape, dtype=dtype)
        if outside is not None:
            grad_chosen = grad_chosen.masked_fill(outside, 0.0)
        of_columns = torch.where(owned, grad_chosen * scale, 0.0)
        of_softmax, of_surprisal = -scale * grad_chosen.sum(dim=1, keepdim=True), None
        on_delta = of_softmax
        if entropy is not None:
            assert grad_entropy is not None
            of_surprisal = scale * grad_entropy[:, None]
            # In a shard entr(p share) = share (entr(p) + p above).
            of_softmax = of_softmax - of_surprisal * (entropy if above is None else entropy - above)[:, None]
            on_delta = torch.ones_like(of_softmax)
            spare = matrix.new_empty(min(len(hidden), settings.chunk_rows), len(matrix), dtype=dtype)
        if above is not None:
            on_delta = on_delta * above.neg().exp()[:, None]
        for rows, chunk, softmax in _softmax_chunks(hidden, matrix, shard.first, settings, kept):
            delta, taken = softmax, [*zip(local[rows].unbind(1), of_columns[rows, :, None].unbind(1), strict=True)]
            if of_surprisal is not None:
                delta = torch.special.entr(softmax, out=spare[: len(chunk)])
                delta.mul_(of_surprisal[rows]).addcmul_(softmax, of_softmax[rows])
            delta = delta.to(matrix.dtype)
            if grad_weight is not None:
                own, scaled = grad_weight[: shard.size], chunk * on_delta[rows]
                if matrix.dtype == dtype:
                    own.addmm_(delta.t(), scaled)
                else:
                    add_wide_product(own, delta.t(), scaled.to(matrix.dtype))
                for column, incoming in taken:
                    grad_weight.index_put_((column,), chunk * incoming, accumulate=True)
            if grad_hidden is not None:
                of_chunk = wide_product(delta, matrix, dtype).mul_(on_delta[rows])
                for column, incoming in taken:
                    of_chunk.addcmul_(matrix[column], incoming)
                grad_hidden[rows] = of_chunk
            del softmax, delta  # The chunk's buffers are free before the weight's gradient is copied below.
        if grad_hidden is not None and shard.group is not None:
            grad_hidden = shard.add(grad_hidden).to(hidden.dtype)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _softmax_chunks(
    hidden: Tensor, matrix: Tensor, first: int, settings: _Settings, kept: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields like `_logit_chunks`, but the softmax instead of the logits.

    ``kept`` is the softmax of all rows, or None.
    """
    if kept is not None:
        yield slice(None), hidden.to(matrix.dtype), kept
        return
    for rows, chunk, logits in _logit_chunks(hidden, matrix, first, settings):
        yield rows, chunk, torch.softmax(logits, dim=1, out=logits)
