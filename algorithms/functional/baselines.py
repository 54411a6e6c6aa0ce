"""Advantages of samples from the rewards of their group, with statistics in float64 and results in float32."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DEVIATIONS = ("group", "batch", "none")
LEAVE_ONE_OUT_DEVIATIONS = ("none", "group", "others", "batch")
LARGEST_OF_OTHERS = 10.0  # the bound of an advantage that is divided by the std of the other rewards
ROUNDING = 1e-6  # share of the largest reward; a smaller std is only float32 rounding


def group_relative_advantages(*, rewards: Tensor, normalize_std: bool, std_epsilon: float) -> Tensor:
    """Returns the advantages of one group relative to its mean, ``[samples]`` float32, from ``[samples]`` rewards.

    They are (r - mean) / (std + ε) with the unbiased std (GRPO, arXiv 2402.03300) if ``normalize_std``, else r - mean
    (Dr. GRPO, arXiv 2503.20783). ``std_epsilon`` is ε. Equal rewards give exactly 0. Raises ValueError for a group of
    one sample, because it has no baseline.
    """
    _require_group(rewards)
    if _all_equal(rewards):  # otherwise the tiny std would blow up the rounding error of the mean
        return rewards.new_zeros(rewards.shape).float()
    values = rewards.double()
    centred = values - values.mean()
    if normalize_std:
        centred = centred / (values.std(correction=1) + std_epsilon)
    return centred.float()


def leave_one_out_advantages(*, rewards: Tensor, deviation: str = "none", std_epsilon: float = 0.0) -> Tensor:
    """Returns each reward less the mean of the group's other rewards (RLOO, arXiv 2402.14740), ``[samples]`` float32.

    That is n / (n - 1) × (r - mean) of n rewards. ``deviation`` selects the divisor: "none" for 1, "group" for the
    group's unbiased std + ``std_epsilon``, "others" for the unbiased std of the other rewards + ``std_epsilon``, so
    that a reward does not influence its own scale. With "others" an advantage is not divided if the other rewards are
    equal up to `ROUNDING`, and it is clipped to ±`LARGEST_OF_OTHERS`, because the std of nearly equal rewards is no
    usable scale: an advantage of -1 / 1e-6 would outweigh a whole step. A higher reward still never gives a lower
    advantage. Equal rewards give exactly 0. Raises ValueError for a group of one sample.
    """
    _require_group(rewards)
    values, count = rewards.double(), rewards.numel()
    centred = values - (values.sum() - values) / (count - 1)
    if deviation != "none" and _all_equal(rewards):
        return rewards.new_zeros(rewards.shape).float()
    if deviation == "group":
        centred = centred / (values.std(correction=1) + std_epsilon)
    elif deviation == "others":
        for index in range(count if count > 2 else 0):  # one other reward has no deviation
            peers = values[[peer for peer in range(count) if peer != index]]
            std = peers.std(correction=1)
            if std > ROUNDING * peers.abs().max():
                centred[index] = (centred[index] / (std + std_epsilon)).clamp(-LARGEST_OF_OTHERS, LARGEST_OF_OTHERS)
    return centred.float()


def pass_at_k_advantages(*, rewards: Tensor, k: int, normalize_std: bool, std_epsilon: float) -> Tensor:
    """Returns the advantages of pass@k training (arXiv 2508.10751), ``[samples]`` float32, from ``[samples]`` rewards.

    Every subset of ``k`` of the group's samples has the reward of its best sample. A sample's advantage is the mean
    reward of the subsets that contain it, less the mean reward of all subsets. ``normalize_std`` divides it by the
    subsets' population std + ``std_epsilon``. For rewards of 0 and 1 the result equals the paper's closed forms; the
    sums over sorted rewards below extend them to any rewards. With ``k`` = 1 the advantages are r - mean,
    divided by the population std. The result is 0 for a group of at most ``k`` samples and for equal rewards.
    """
    count = rewards.numel()
    if count <= k or _all_equal(rewards):
        return rewards.new_zeros(rewards.shape).float()
    values, order = rewards.double().sort(stable=True)
    subsets, subsets_of_one = comb(count, k), comb(count - 1, k - 1)
    # The sample of rank j, from 0, is the best of the subsets whose other samples are among the j samples below it.
    best = values.new_tensor([comb(j, k - 1) / subsets for j in range(count)])
    own = values.new_tensor([comb(j, k - 1) / subsets_of_one for j in range(count)])
    # It is also the best of a subset that contains a given lower sample if the other k - 2 samples are among the
    # remaining j - 1 samples below it.
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
    """Returns (r - mean of the group) / (std of the batch + ε), as Lite PPO (arXiv 2508.08221) does, in float32.

    ``advantages`` holds one ``[tokens]`` tensor of r - mean per group, and ``rewards`` one ``[samples]`` tensor per
    group of a train step. The std is the unbiased std of all these rewards, and ``std_epsilon`` is ε.
    """
    import torch  # imported here, because settings are checked in processes that have no torch

    std = torch.cat(list(rewards)).double().std(correction=1)
    return [(values.double() / (std + std_epsilon)).float() for values in advantages]


def _require_group(rewards: Tensor) -> None:
    if rewards.numel() < 2:
        raise ValueError(f"a group of {rewards.numel()} has no baseline: group-relative advantages need 2 or more")


def _all_equal(rewards: Tensor) -> bool:
    return bool((rewards == rewards[0]).all())
