"""Computes the advantages of samples from the rewards of their group. Statistics are float64, results float32."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DEVIATIONS = ("group", "batch", "none")
LEAVE_ONE_OUT_DEVIATIONS = ("none", "group", "others", "batch")
LARGEST_OF_OTHERS = 10.0  # bound of an advantage that is divided by the std of the other rewards
ROUNDING = 1e-6  # a std below this share of the largest reward is only float32 rounding


def group_relative_advantages(*, rewards: Tensor, normalize_std: bool, std_epsilon: float) -> Tensor:
    """Returns the advantages of one group relative to its mean, ``[samples]`` float32, from ``[samples]`` rewards.

    With ``normalize_std`` they are (r - mean) / (std + ε) with the unbiased std (GRPO, arXiv 2402.03300), else r - mean
    (Dr. GRPO, arXiv 2503.20783). ``std_epsilon`` is ε. Equal rewards give exactly 0. Raises ValueError for a group of
    one sample, because such a group has no baseline.
    """
    _require_group(rewards)
    if _all_equal(rewards):  # a tiny std would blow up the rounding error of the mean
        return rewards.new_zeros(rewards.shape).float()
    values = rewards.double()
    centred = values - values.mean()
    if normalize_std:
        centred = centred / (values.std(correction=1) + std_epsilon)
    return centred.float()


def leave_one_out_advantages(*, rewards: Tensor, deviation: str = "none", std_epsilon: float = 0.0) -> Tensor:
    """Returns each reward minus the mean of the group's other rewards (RLOO, arXiv 2402.14740), ``[samples]`` float32.

    For n rewards, this equals n / (n - 1) × (r - mean). ``deviation`` selects the divisor. "none": 1. "group": the
    group's unbiased std + ``std_epsilon``. "others": the unbiased std of the other rewards + ``std_epsilon``, so a
    reward does not influence its scale. With "others", an advantage is not divided if the other rewards are equal up to
    `ROUNDING`, and it is clipped to ±`LARGEST_OF_OTHERS`. The reason: an advantage of -1 / 1e-6 from nearly equal
    rewards would dominate the step. A higher reward never gives a lower advantage. Equal rewards give exactly 0. Raises
    ValueError for a group of one sample.
    """
    _require_group(rewards)
    values, count = rewards.double(), rewards.numel()
    centred = values - (values.sum() - values) / (count - 1)
    if deviation != "none" and _all_equal(rewards):
        return rewards.new_zeros(rewards.shape).float()
    if deviation == "group":
        centred = centred / (values.std(correction=1) + std_epsilon)
    elif deviation == "others":
        for index in range(count if count > 2 else 0):  # a single other reward has no deviation
            peers = values[[peer for peer in range(count) if peer != index]]
            std = peers.std(correction=1)
            if std > ROUNDING * peers.abs().max():
                centred[index] = (centred[index] / (std + std_epsilon)).clamp(-LARGEST_OF_OTHERS, LARGEST_OF_OTHERS)
    return centred.float()


def pass_at_k_advantages(*, rewards: Tensor, k: int, normalize_std: bool, std_epsilon: float) -> Tensor:
    """Returns the advantages of pass@k training (arXiv 2508.10751), ``[samples]`` float32, from ``[samples]`` rewards.

    The reward of a subset of ``k`` samples is the reward of its best sample. A sample's advantage is the mean reward of
    the subsets that contain the sample, minus the mean reward of all subsets. With ``normalize_std``, it is divided by
    the population std of the subset rewards + ``std_epsilon``. For rewards of 0 and 1 the result equals the paper's
    closed forms. The sums over sorted rewards below extend these forms to any rewards. With ``k`` = 1 the advantages
    are r - mean, divided by the population std. The result is 0 for a group of at most ``k`` samples and for equal
    rewards.
    """
    count = rewards.numel()
    if count <= k or _all_equal(rewards):
        return rewards.new_zeros(rewards.shape).float()
    values, order = rewards.double().sort(stable=True)
    subsets, subsets_of_one = comb(count, k), comb(count - 1, k - 1)
    # The sample of rank j (from 0) is the best of a subset if the other samples are among the j lower samples.
    best = values.new_tensor([comb(j, k - 1) / subsets for j in range(count)])
    own = values.new_tensor([comb(j, k - 1) / subsets_of_one for j in range(count)])
    # In a subset with a given lower sample, it is the best if the other k - 2 samples are among the j - 1 further lower
    # samples.
    above = values.new_tensor([comb(j - 1, k - 2) / subsets_of_one if j and k > 1 else 0.0 for j in range(count)])
    better = values * above
    of_sample = values * own + (better.sum() - better.cumsum(0))
    mean = (best * values).sum()
    advantages = of_sample - mean
    if normalize_std:
        advantages = advantages / ((best * (values - mean).square()).sum().sqrt() + std_epsilon)
    return advantages.new_empty(count).index_copy(0, order, advantages).float()


def divide_by_step_deviation(
    *, advantages: Sequence[Tensor], rewards: Sequence[Tensor], std_epsilon: float
) -> list[Tensor]:
    """Returns (r - mean of the group) / (std of the batch + ε) (Lite PPO, arXiv 2508.08221) in float32.

    ``advantages`` has one ``[tokens]`` tensor of r - mean per group, and ``rewards`` one ``[samples]`` tensor per group
    of a train step. The std is the unbiased std of all rewards in the step, and ``std_epsilon`` is ε.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    std = torch.cat(list(rewards)).double().std(correction=1)
    return [(values.double() / (std + std_epsilon)).float() for values in advantages]


def _require_group(rewards: Tensor) -> None:
    if rewards.numel() < 2:
        raise ValueError(f"a group of {rewards.numel()} has no baseline: group-relative advantages need 2 or more")


def _all_equal(rewards: Tensor) -> bool:
    return bool((rewards == rewards[0]).all())
