"""From the rewards of a group to one advantage a sample. Statistics in float64, results in float32."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DEVIATIONS = ("group", "batch", "none")
LEAVE_ONE_OUT_DEVIATIONS = ("none", "group", "others", "batch")


def group_relative_advantages(*, rewards: Tensor, normalize_std: bool, std_epsilon: float) -> Tensor:
    """``[samples]`` rewards of one group → ``[samples]`` advantages, float32.

    ``(r - mean) / (std + std_epsilon)`` with the unbiased std (GRPO); without ``normalize_std`` only ``r - mean``
    (Dr. GRPO). Equal rewards give exactly 0. Raises ValueError for a group of one, which has no baseline.
    """
    _require_group(rewards)
    if _all_equal(rewards):  # rounding of the mean would be blown up by the tiny std
        return rewards.new_zeros(rewards.shape).float()
    values = rewards.double()
    centred = values - values.mean()
    if normalize_std:
        centred = centred / (values.std(correction=1) + std_epsilon)
    return centred.float()


def leave_one_out_advantages(*, rewards: Tensor, deviation: str = "none", std_epsilon: float = 0.0) -> Tensor:
    """RLOO (arXiv 2402.14740): ``[samples]`` rewards → each reward minus the mean of the group's OTHER rewards.

    That is n / (n - 1) × (r - mean). ``deviation`` "group" divides by the group's unbiased std + ``std_epsilon``;
    "others" by that of the other rewards, so that a reward has no say in its own scale. An advantage whose others are
    all equal, or are one alone, stays as it is. Equal rewards give exactly 0. Raises ValueError for a group of one,
    which has no others.
    """
    _require_group(rewards)
    values, count = rewards.double(), rewards.numel()
    centred = values - (values.sum() - values) / (count - 1)
    if deviation != "none" and _all_equal(rewards):
        return rewards.new_zeros(rewards.shape).float()
    if deviation == "group":
        centred = centred / (values.std(correction=1) + std_epsilon)
    elif deviation == "others":
        for place in range(count):
            others = values[[other for other in range(count) if other != place]]
            if not _all_equal(others):
                centred[place] /= others.std(correction=1) + std_epsilon
    return centred.float()


def pass_at_k_advantages(*, rewards: Tensor, k: int, normalize_std: bool, std_epsilon: float) -> Tensor:
    """Pass@k training (arXiv 2508.10751): ``[samples]`` rewards → ``[samples]`` advantages, float32.

    Each of the group's subsets of ``k`` samples has the reward of its best sample. A sample's advantage is the mean
    reward of the subsets that it is in, less the mean of all subsets; with ``normalize_std`` over their population
    standard deviation + ``std_epsilon``. With rewards of 0 and 1 these are the paper's closed forms; the sums over
    sorted rewards below are the same means for any rewards. A group of ``k`` samples or fewer has one subset, and equal
    rewards have no spread: all 0.
    """
    count = rewards.numel()
    if count <= k or _all_equal(rewards):
        return rewards.new_zeros(rewards.shape).float()
    values, order = rewards.double().sort(stable=True)
    subsets, subsets_of_one = comb(count, k), comb(count - 1, k - 1)
    # The sample of rank j, from 0, is the best of a subset whose others come from the j samples below it.
    best = values.new_tensor([comb(j, k - 1) / subsets for j in range(count)])
    own = values.new_tensor([comb(j, k - 1) / subsets_of_one for j in range(count)])
    # It is the best of a lower sample's subset when the other k - 2 come from the j - 1 that are left below it.
    above = values.new_tensor([comb(j - 1, k - 2) / subsets_of_one if j else 0.0 for j in range(count)])
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
    """The division of (r - mean of the group) / std of the batch, as Lite PPO has it (arXiv 2508.08221).

    The std is the unbiased one of all rewards of a train step, and ``std_epsilon`` is added to it. ``advantages``: one
    ``[tokens]`` tensor a group; ``rewards``: one ``[samples]`` tensor a group. Float32 comes out.
    """
    import torch  # here, because the settings are checked in processes that have no torch

    std = torch.cat(list(rewards)).double().std(correction=1)
    return [(values.double() / (std + std_epsilon)).float() for values in advantages]


def _require_group(rewards: Tensor) -> None:
    if rewards.numel() < 2:
        raise ValueError(f"a group of {rewards.numel()} has no baseline: group-relative advantages need 2 or more")


def _all_equal(rewards: Tensor) -> bool:
    return bool((rewards == rewards[0]).all())
