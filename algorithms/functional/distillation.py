"""Divergences of student and teacher at each token, over the teacher's top-k tokens and one bucket for the rest.

Full-vocabulary log-probs of a teacher are too much to carry: 150k floats a token. So both distributions are cut the
same way: the teacher's ``top_k`` tokens one by one, and all others in one tail bucket with what is left of each. A KL
of distributions that were put into buckets is never more than the KL of the whole ones (data processing inequality),
and is equal to it with every token in a bucket of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from algorithms.functional.ratios import masked_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

TOP_K_DIVERGENCES = ("forward", "reverse", "mixed", "jsd")
MAX_LOG_MASS = -1e-6  # of the top tokens together: rounding may give 0 or more, and a tail of nothing has no log


def teacher_log_ratio(*, logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """``[tokens]``: d = log π_S - log π_T of the sampled tokens, clamped, detached; 0 where masked.

    Its mean over the student's own samples estimates the reverse KL(π_S ‖ π_T). It belongs into the advantage (MiniLLM,
    arXiv 2306.08543, eq. 3: the policy gradient of the reverse KL). As a loss it teaches nothing: its gradient is
    ∇ log π_S, and the mean of that over samples of π_S is ∇ Σ π_S = ∇ 1 = 0, whatever the teacher says.
    """
    return masked_log_ratio(logprobs, teacher_logprobs, loss_mask).detach()


def with_tail(top_logprobs: Tensor) -> Tensor:
    """``[tokens, k]`` log-probs of some tokens → ``[tokens, k + 1]``: the last is log(1 - their sum).

    The mass of the k is kept below 1 - 1e-6, so an empty tail has 1e-6 and no gradient instead of log 0.
    """
    import torch  # here, because the settings are checked in processes that have no torch

    mass = top_logprobs.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_MASS)
    return torch.cat((top_logprobs, (-mass.expm1()).log()), -1)


def top_k_divergence(
    *, top_logprobs: Tensor, teacher_top_logprobs: Tensor, loss_mask: Tensor, divergence: str, mix: float
) -> Tensor:
    """``[tokens]`` divergence of student q and teacher p over the teacher's top tokens and the tail, in nats.

    ``top_logprobs``, ``teacher_top_logprobs``: ``[tokens, k]`` at the teacher's k top-k tokens; the first has the
    gradient. GKD (arXiv 2306.13649, §2 and §3): "forward" KL(p ‖ q), "reverse" KL(q ‖ p), and "jsd", its generalised
    Jensen-Shannon divergence with β = ``mix``: β KL(p ‖ m) + (1 - β) KL(q ‖ m), m = β p + (1 - β) q. "mixed" is
    mix × forward + (1 - mix) × reverse. 0 without gradient where masked.
    """
    import torch

    hidden = ~loss_mask[:, None]
    student = with_tail(top_logprobs.masked_fill(hidden, -20.0))
    teacher = with_tail(teacher_top_logprobs.masked_fill(hidden, -20.0))
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
    """``[tokens]`` KL(left ‖ right) of log-probs ``[tokens, buckets]``."""
    return (left.exp() * (left - right)).sum(-1)
