"""GRPO in plain Python floats, one token at a time: the independent derivation that the tests compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Token:
    """The loss's inputs for one response token."""

    sample: int
    trained: bool
    new: float
    old: float
    rollout: float
    reference: float
    advantage: float


def group_advantages(rewards: Sequence[float], *, normalize_std: bool, std_epsilon: float) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + std_epsilon) for value in centred]


def token_loss(
    token: Token,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    tis: tuple[float, float] | None = None,
) -> float:
    ratio = math.exp(token.new - token.old)
    clipped = min(max(ratio, 1 - clip_low), 1 + clip_high)
    loss = -min(ratio * token.advantage, clipped * token.advantage)
    if tis is not None:
        loss *= min(max(math.exp(token.old - token.rollout), tis[0]), tis[1])
    x = token.new - token.reference
    kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) + x - 1}[kl_estimator]
    return loss + kl_coef * kl


def mean_loss(tokens: Sequence[Token], losses: Sequence[float], *, aggregation: str, norm_length: float = 0.0) -> float:
    """Returns the loss as each aggregation's paper writes it: a mean and not a numerator."""
    pairs = [(token.sample, loss) for token, loss in zip(tokens, losses, strict=True) if token.trained]
    if aggregation == "token_mean":
        return math.fsum(loss for _, loss in pairs) / len(pairs)
    samples = sorted({token.sample for token in tokens})
    of_samples = []
    for sample in samples:
        own = [loss for owner, loss in pairs if owner == sample]
        length = norm_length if aggregation == "seq_mean_token_sum_norm" else max(len(own), 1)
        of_samples.append(math.fsum(own) / length)
    return math.fsum(of_samples) / len(samples)
