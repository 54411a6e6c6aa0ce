"""Computes sums and means over the tokens of samples, and aggregates token losses to the loss of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.contracts.algorithm import StepTotals

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")


def sample_sums(*, per_token: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int) -> Tensor:
    """Returns each sample's sum over its trained tokens, ``[samples]``. It is 0 for a sample without trained tokens."""
    masked = per_token.masked_fill(~loss_mask, 0.0)
    return masked.new_zeros(num_samples).index_add(0, sample_ids, masked)


def sample_means(*, per_token: Tensor, loss_mask: Tensor, sample_ids: Tensor, num_samples: int) -> Tensor:
    """Returns each sample's mean over its trained tokens, ``[samples]``.

    It is 0 for a sample without trained tokens.
    """
    sums = sample_sums(per_token=per_token, loss_mask=loss_mask, sample_ids=sample_ids, num_samples=num_samples)
    return sums / _trained_tokens(sums, loss_mask, sample_ids)


def _trained_tokens(like: Tensor, loss_mask: Tensor, sample_ids: Tensor) -> Tensor:
    """Returns each sample's number of trained tokens, at least 1, in the dtype and shape of ``like``."""
    return like.new_zeros(like.shape).index_add(0, sample_ids, loss_mask.to(like.dtype)).clamp(min=1.0)


def aggregate_sum(
    *,
    per_token: Tensor,
    loss_mask: Tensor,
    sample_ids: Tensor,
    num_samples: int,
    aggregation: str,
) -> Tensor:
    """Returns the numerator of a step's loss, a scalar tensor; `aggregate_denominator` returns the denominator.

    ``per_token`` is ``[tokens]`` float. The aggregations ``token_mean`` and ``seq_mean_token_sum_norm`` sum all trained
    tokens. ``seq_mean_token_mean`` sums the means of samples over their trained tokens. The step's numerator is the sum
    over its micro-batches and ranks.
    """
    masked = per_token.masked_fill(~loss_mask, 0.0)
    if aggregation != "seq_mean_token_mean":
        return masked.sum()
    lengths = _trained_tokens(masked.new_empty(num_samples), loss_mask, sample_ids)
    return (masked / lengths[sample_ids]).sum()


def aggregate_denominator(*, totals: StepTotals, aggregation: str, norm_length: float) -> float:
    """Returns the denominator of a step's loss. It is at least 1, so the loss of an empty step is 0.

    For ``token_mean`` it is the number of trained tokens in the whole step, for ``seq_mean_token_mean`` the number of
    samples, and for ``seq_mean_token_sum_norm`` the number of samples times ``norm_length``. ``norm_length`` (tokens)
    is the constant of Dr. GRPO (arXiv 2503.20783). Raises ValueError for an unknown ``aggregation``.
    """
    if aggregation == "token_mean":
        return float(max(totals.tokens, 1))
    if aggregation == "seq_mean_token_mean":
        return float(max(totals.samples, 1))
    if aggregation == "seq_mean_token_sum_norm":
        return max(totals.samples, 1) * norm_length
    raise ValueError(f"aggregation {aggregation!r} is not one of {', '.join(AGGREGATIONS)}")
