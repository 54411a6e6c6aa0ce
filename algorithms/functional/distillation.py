"""Computes divergences between student and teacher at each token, over the teacher's top-k tokens and a tail bucket.

A teacher's log-probs over a whole vocabulary are too large to transfer: 150,000 floats per token. Therefore the
distributions of teacher and student are reduced: each of the teacher's ``top_k`` tokens is one bucket, and all other
tokens share the tail bucket. The KL of the reduced distributions is at most the KL of the full distributions (data
processing inequality).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from algorithms.functional.ratios import masked_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

TOP_K_DIVERGENCES = ("forward", "reverse", "mixed", "jsd")
MAX_LOG_MASS = -1e-6  # keeps the top tokens' total mass below 1, because an empty tail has no log


def teacher_log_ratio(*, logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Returns d = log π_S - log π_T of the sampled tokens, clamped and detached, ``[tokens]``, 0 if masked.

    The mean of d over the student's samples estimates the reverse KL(π_S ‖ π_T). In the policy gradient of this KL, -d
    is the advantage (MiniLLM, arXiv 2306.08543, eq. 3). d must not be used as a loss: its gradient is ∇ log π_S, and
    for any teacher the expectation of ∇ log π_S over samples of π_S is ∇ Σ π_S = ∇ 1 = 0.
    """
    return masked_log_ratio(logprobs, teacher_logprobs, loss_mask).detach()


def append_tail_logprob(top_logprobs: Tensor) -> Tensor:
    """Appends the log-prob of all other tokens to ``[tokens, k]`` log-probs. Returns ``[tokens, k + 1]``.

    The appended value is log(1 - Σ p). Σ p is kept below 1 - 1e-6, so an empty tail has the mass 1e-6 and no gradient.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    mass = top_logprobs.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_MASS)
    return torch.cat((top_logprobs, (-mass.expm1()).log()), -1)


def top_k_divergence(
    *, top_logprobs: Tensor, teacher_top_logprobs: Tensor, loss_mask: Tensor, divergence: str, mix: float
) -> Tensor:
    """Returns a divergence of student q and teacher p over the teacher's top-k tokens and the tail, ``[tokens]`` nats.

    ``top_logprobs`` (student, with gradient) and ``teacher_top_logprobs`` are ``[tokens, k]`` log-probs of the
    teacher's k most likely tokens. ``divergence`` is a divergence of GKD (arXiv 2306.13649, §2 and §3), with β =
    ``mix``: "forward" is KL(p ‖ q), "reverse" is KL(q ‖ p), "mixed" is β × forward + (1 - β) × reverse, and "jsd" is
    the generalised Jensen-Shannon divergence β KL(p ‖ m) + (1 - β) KL(q ‖ m) with m = β p + (1 - β) q. Masked tokens
    have the value 0 and no gradient. Raises ValueError for an unknown ``divergence``.
    """
    import torch

    hidden = ~loss_mask[:, None]
    student = append_tail_logprob(top_logprobs.masked_fill(hidden, -20.0))
    teacher = append_tail_logprob(teacher_top_logprobs.masked_fill(hidden, -20.0))
    if divergence == "forward":
        value = _kl(teacher, student)
    elif divergence == "reverse":
        value = _kl(student, teacher)
    elif divergence == "mixed":
        value = mix * _kl(teacher, student) + (1.0 - mix) * _kl(student, teacher)
    elif divergence == "jsd":
        middle = torch.logaddexp(teacher + math.log(mix), student + math.log(1.0 - mix))
        value = mix * _kl(teacher, middle) + (1.0 - mix) * _kl(student, middle)
    else:
        raise ValueError(f"divergence {divergence!r} is not one of {', '.join(TOP_K_DIVERGENCES)}")
    return value.masked_fill(~loss_mask, 0.0)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """Returns KL(left ‖ right), ``[tokens]``, of log-probs ``[tokens, buckets]``."""
    return (left.exp() * (left - right)).sum(-1)
