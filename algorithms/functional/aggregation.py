"""Sums and means over samples, and how a step's loss is put together from its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.contracts.algorithm import StepTotals

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def sum_of_samples(*, per_token: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int) -> Tensor:
    """``[samples]``: each sample's sum over its trained tokens; 0 for a sample without one."""
    masked = per_token.masked_fill(~loss_mask, 0.0)
    return masked.new_zeros(num_samples).index_add(0, sample_ids, masked)


def mean_of_samples(*, per_token: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int) -> Tensor:
    """``[samples]``: each sample's mean over its trained tokens; 0 for a sample without one."""
    sums = sum_of_samples(per_token=per_token, loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples)
    return sums / _trained_tokens(sums, loss_mask, sample_ids)


def _trained_tokens(like: Tensor, loss_mask: Tensor, sample_ids: Tensor) -> Tensor:
    """``[samples]`` counts, at least 1, in the dtype and shape of ``like``."""
    return like.new_zeros(like.shape).index_add(0, sample_ids, loss_mask.to(like.dtype)).clamp(min=1.0)


def aggregate_sum(
    *,
    per_token: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    aggregation: str,
) -> Tensor:
    """The numerator of the step's loss, a scalar; `aggregate_denominator` has the other half.

    ``per_token`` ``[tokens]`` float; ``sample_ids`` ``[tokens]`` int64 in 0..num_samples-1. ``token_mean`` and
    ``seq_mean_token_sum_norm`` sum the tokens; ``seq_mean_token_mean`` sums each sample's mean.
    """
    masked = per_token.masked_fill(~loss_mask, 0.0)
    if aggregation != "seq_mean_token_mean":
        return masked.sum()
    lengths = _trained_tokens(masked.new_empty(num_samples), loss_mask, sample_ids)
    return (masked / lengths[sample_ids]).sum()


def aggregate_denominator(*, totals: StepTotals, aggregation: str, norm_length: float) -> float:
    """What the whole step's numerator is divided by: trained tokens, samples, or samples × ``norm_length`` tokens.

    ``norm_length`` (tokens) is the constant of Dr. GRPO (arXiv 2503.20783); only ``seq_mean_token_sum_norm`` reads it.
    Never 0: a step without one trained token has loss 0.
    """
    if aggregation == "token_mean":
        return float(max(totals.tokens, 1))
    if aggregation == "seq_mean_token_mean":
        return float(max(totals.samples, 1))
    if aggregation == "seq_mean_token_sum_norm":
        return max(totals.samples, 1) * norm_length
    raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
