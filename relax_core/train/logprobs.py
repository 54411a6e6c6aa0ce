"""Log-probs of chosen tokens without ever holding the logits of all rows.

At 4,096 rows and a vocabulary of 151,936 the logits alone are 2.5 GB, and a plain log_softmax keeps three such
buffers. Here one buffer of ``[chunk_rows, vocab]`` is all that exists: the forward pass fills it chunk by chunk and
keeps nothing, the backward pass computes each chunk again. When one chunk holds all rows, the backward pass reuses it.
A tiny problem takes the plain way: there the cost is the Python around the operations, not the memory.
"""

from __future__ import annotations

from typing import Any

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
