"""Log-probs of chosen tokens, entropy and likeliest tokens, without ever holding the logits of all rows.

At 4,096 rows and a vocabulary of 151,936 the logits alone are 2.5 GB, and a plain log_softmax keeps three such
buffers. Here one buffer of ``[chunk_rows, vocab]`` is all that exists: the forward pass fills it chunk by chunk and
keeps nothing, the backward pass computes each chunk again. When one chunk holds all rows, the backward pass reuses it.
A tiny problem takes the plain way: there the cost is the Python around the operations, not the memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_PLAIN_LOGITS = 2**16  # up to here plain operations are faster, and their three buffers are under 1 MB


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, inverse_temperature: float, chunk_rows: int
) -> Tensor:
    """Log-prob of each row's target under ``softmax(hidden @ weight.T * inverse_temperature)``.

    ``hidden`` ``[rows, hidden]`` and ``weight`` ``[vocab, hidden]`` of one floating dtype, ``targets`` ``[rows]`` int64
    in 0..vocab-1. Returns ``[rows]`` float32, with gradients to ``hidden`` and ``weight`` in their own dtype. The maths
    is float32 also for bfloat16 inputs, by float32 copies of the weight and of a chunk (float64 stays float64).
    At most ``[chunk_rows, vocab]`` floats of logits exist at one time (three times that when all are under 2**16).
    Not differentiable twice.
    """
    assert hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1], "want [rows, h], [vocab, h]"
    assert hidden.dtype == weight.dtype and hidden.is_floating_point(), "hidden and weight must have one float dtype"
    assert targets.shape == hidden.shape[:1] and targets.dtype == torch.int64, "want one int64 target a row"
    assert chunk_rows >= 1 and inverse_temperature > 0.0
    if hidden.shape[0] <= chunk_rows and hidden.shape[0] * weight.shape[0] <= _PLAIN_LOGITS:
        return _plain_logprobs(hidden, weight, targets, inverse_temperature)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _ChunkedLogprobs.apply(hidden, weight, targets, inverse_temperature, chunk_rows)
    return _forward(hidden, weight, targets, inverse_temperature, chunk_rows)[0]


class HeadOutputs(NamedTuple):
    """Of each row, float32: the target's log-prob ``[rows]``; the entropy in nats ``[rows]`` and the log-probs of other
    tokens ``[rows, k]``, each None unless asked for."""

    logprobs: Tensor
    entropy: Tensor | None = None
    gathered: Tensor | None = None


class Likeliest(NamedTuple):
    """Of each row: the target's log-prob ``[rows]``, the k likeliest tokens ``[rows, k]`` int64, likeliest first, and
    their log-probs ``[rows, k]``. No gradient."""

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
) -> HeadOutputs:
    """`chunked_logprobs` and, from the same logits, the entropy and the log-probs of the tokens ``gather``.

    ``gather``: int64 ``[rows, k]`` in 0..vocab-1; a row may name a token twice. Gradients flow through all three. With
    neither asked for this is `chunked_logprobs` itself. The entropy's backward pass needs two buffers, so they hold
    half as many rows each: no more than ``[chunk_rows, vocab]`` floats exist here either (``chunk_rows`` 2 or more).
    """
    if gather is None and not entropy:
        return HeadOutputs(
            chunked_logprobs(hidden, weight, targets, inverse_temperature=inverse_temperature, chunk_rows=chunk_rows)
        )
    assert gather is None or (gather.shape[0] == targets.shape[0] and gather.dtype == torch.int64), "want [rows, k]"
    columns = targets[:, None] if gather is None else torch.cat([targets[:, None], gather], dim=1)
    if hidden.shape[0] <= chunk_rows and hidden.shape[0] * weight.shape[0] <= _PLAIN_LOGITS:
        chosen, of_rows = _plain_outputs(hidden, weight, columns, inverse_temperature, entropy)
    else:
        rows = max(1, chunk_rows // 2) if entropy else chunk_rows
        chosen, of_rows = _ChunkedOutputs.apply(hidden, weight, columns, inverse_temperature, rows, entropy)
    return HeadOutputs(chosen[:, 0], of_rows if entropy else None, None if gather is None else chosen[:, 1:])


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, inverse_temperature: float, chunk_rows: int, top_k: int
) -> Likeliest:
    """The log-prob of each row's target and the ``top_k`` likeliest tokens, 1..vocab of them; memory as above."""
    matrix = weight.to(_maths_dtype(weight))
    buffer = matrix.new_empty(min(hidden.shape[0], chunk_rows), matrix.shape[0])
    parts = []
    for start in range(0, hidden.shape[0], chunk_rows):
        rows = slice(start, start + chunk_rows)
        chunk = hidden[rows].to(matrix.dtype)
        logits = buffer[: chunk.shape[0]]
        _logits(chunk, matrix, inverse_temperature, out=logits)
        torch.log_softmax(logits, dim=1, out=logits)
        top = logits.topk(top_k, dim=1)
        parts.append((logits.gather(1, targets[rows, None])[:, 0], top.indices, top.values))
    return Likeliest(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _plain_outputs(
    hidden: Tensor, weight: Tensor, columns: Tensor, inverse_temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    dtype = _maths_dtype(weight)
    logprobs = torch.log_softmax(hidden.to(dtype) @ weight.to(dtype).t() * inverse_temperature, dim=1)
    return logprobs.gather(1, columns), -(logprobs.exp() * logprobs).sum(dim=1) if entropy else None


class _ChunkedOutputs(torch.autograd.Function):
    """Chosen columns of the log-softmax ``[rows, columns]``, and its entropy ``[rows]`` where asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        columns: Tensor,
        inverse_temperature: float,
        chunk_rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        matrix = weight.to(_maths_dtype(weight))
        chosen = matrix.new_empty(columns.shape)
        of_rows = matrix.new_empty(hidden.shape[0]) if entropy else None
        buffer = matrix.new_empty(min(hidden.shape[0], chunk_rows), matrix.shape[0])
        for start in range(0, hidden.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            chunk = hidden[rows].to(matrix.dtype)
            logits = buffer[: chunk.shape[0]]
            _logits(chunk, matrix, inverse_temperature, out=logits)
            torch.log_softmax(logits, dim=1, out=logits)
            torch.gather(logits, 1, columns[rows], out=chosen[rows])
            if of_rows is not None:
                logits.exp_()
                of_rows[rows] = torch.special.entr(logits, out=logits).sum(dim=1)
        ctx.save_for_backward(hidden, weight, columns, of_rows)
        ctx.inverse_temperature, ctx.chunk_rows = inverse_temperature, chunk_rows
        return chosen, of_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_chosen: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        # With p the softmax: d log p_j / d logits = one_hot_j - p, dH / d logits = entr(p) - H p, entr(p) = -p log p.
        hidden, weight, columns, entropy = ctx.saved_tensors
        matrix = weight.to(_maths_dtype(weight))
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
        of_softmax = grad_chosen.sum(dim=1)
        if entropy is not None:
            assert grad_entropy is not None
            of_softmax = of_softmax + grad_entropy * entropy
        buffer = matrix.new_empty(min(hidden.shape[0], ctx.chunk_rows), matrix.shape[0])
        other = torch.empty_like(buffer) if entropy is not None else None
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            chunk = hidden[rows].to(matrix.dtype)
            delta = buffer[: chunk.shape[0]]
            _logits(chunk, matrix, ctx.inverse_temperature, out=delta)
            torch.softmax(delta, dim=1, out=delta)
            if other is not None:
                assert grad_entropy is not None
                surprise = torch.special.entr(delta, out=other[: chunk.shape[0]]).mul_(grad_entropy[rows, None])
                delta.mul_(-of_softmax[rows, None]).add_(surprise)
            else:
                delta.mul_(-of_softmax[rows, None])
            delta.scatter_add_(1, columns[rows], grad_chosen[rows]).mul_(ctx.inverse_temperature)
            if grad_hidden is not None:
                grad_hidden[rows] = delta @ matrix
            if grad_weight is not None:
                grad_weight.addmm_(delta.t(), chunk)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _plain_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: float) -> Tensor:
    dtype = _maths_dtype(weight)
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    if inverse_temperature != 1.0:
        logits = logits * inverse_temperature
    return torch.log_softmax(logits, dim=1).gather(1, targets[:, None])[:, 0]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: float, chunk_rows: int
    ) -> Tensor:
        logprobs, buffer = _forward(hidden, weight, targets, inverse_temperature, chunk_rows)
        ctx.inverse_temperature, ctx.chunk_rows = inverse_temperature, chunk_rows
        if hidden.shape[0] <= chunk_rows:
            ctx.save_for_backward(hidden, weight, targets, _minus_one_hot(buffer.exp_(), targets, logprobs))
        else:
            ctx.save_for_backward(hidden, weight, targets, logprobs)
        ctx.one_chunk = hidden.shape[0] <= chunk_rows
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # d logprob / d logits = one_hot - softmax; the scale goes onto rows as wide as `hidden`, never as `vocab`.
        hidden, weight, targets, saved = ctx.saved_tensors
        matrix = weight.to(_maths_dtype(weight))
        scale = (grad_logprobs * -ctx.inverse_temperature)[:, None]
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
        buffer = saved if ctx.one_chunk else matrix.new_empty(ctx.chunk_rows, matrix.shape[0])
        for start in range(0, hidden.shape[0], ctx.chunk_rows):
            rows = slice(start, start + ctx.chunk_rows)
            chunk = hidden[rows].to(matrix.dtype)
            delta = buffer[: chunk.shape[0]]
            if not ctx.one_chunk:
                _logits(chunk, matrix, ctx.inverse_temperature, out=delta)
                # In place is safe: each row is read before it is written (test_in_place_softmax holds it).
                torch.softmax(delta, dim=1, out=delta)
                _minus_one_hot(delta, targets[rows], saved[rows])
            if grad_hidden is not None:
                torch.mul(delta @ matrix, scale[rows], out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(delta.t(), chunk * scale[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: float, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Log-probs ``[rows]``, and the buffer, which holds the last chunk's log-softmax."""
    matrix = weight.to(_maths_dtype(weight))
    columns = targets[:, None]
    logprobs = matrix.new_empty(columns.shape)
    buffer = matrix.new_empty(min(hidden.shape[0], chunk_rows), matrix.shape[0])
    for start in range(0, hidden.shape[0], chunk_rows):
        rows = slice(start, start + chunk_rows)
        chunk = hidden[rows].to(matrix.dtype)
        logits = buffer[: chunk.shape[0]]
        _logits(chunk, matrix, inverse_temperature, out=logits)
        torch.log_softmax(logits, dim=1, out=logits)
        torch.gather(logits, 1, columns[rows], out=logprobs[rows])
    return logprobs[:, 0], buffer


def _maths_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _logits(chunk: Tensor, matrix: Tensor, inverse_temperature: float, *, out: Tensor) -> None:
    # With beta=0 the first argument is not read: `alpha` scales inside the GEMM.
    torch.addmm(out, chunk, matrix.t(), beta=0, alpha=inverse_temperature, out=out)


def _minus_one_hot(probabilities: Tensor, targets: Tensor, logprobs: Tensor) -> Tensor:
    """``probabilities - one_hot(targets)`` in place; at the target p - 1 = expm1(log p), exact where p is near 1."""
    return probabilities.scatter_(1, targets[:, None], torch.expm1(logprobs)[:, None])
