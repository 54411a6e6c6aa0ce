"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the group's other rewards as baseline.

A response is one action: its log-probs are summed and never averaged over its own length. The sum is divided by one
constant length, as that of Dr. GRPO, so that the clip of the gradient's norm acts as it does elsewhere. At r = 1 the
gradient of the clipped surrogate is REINFORCE's; the clip only holds what staleness does to the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RlooConfig(P.DeviationConfig, P.TokenClipConfig):
    """Values are documented in conf/algo."""

    name: str = "rloo"
    aggregation: str = "seq_mean_token_sum_norm"
    normalize_std: str = "none"
    kl_estimator: str = "k1"
    kl_placement: str = "reward"


def check(config: RlooConfig) -> None:
    """Raises ValueError that lists every setting that makes no sense, with its fix."""
    problems = P.baseline_problems(config) + P.token_clip_problems(config, usual="0.2 and 0.2 are usual.")
    if config.normalize_std == "others" and config.group_size < 3:
        problems.append(
            f"algo.normalize_std=others with algo.group_size={config.group_size}: one other sample has no standard "
            "deviation. Use algo.group_size=3 or more, or algo.normalize_std=group."
        )
    P.refuse(problems + P.deviation_problems(config, F.LEAVE_ONE_OUT_DEVIATIONS))


def advantages(inputs: AdvantageInputs, config: RlooConfig) -> Tensor:
    """``[tokens]`` float32: the sample's reward minus the mean of the others', over what ``normalize_std`` says."""
    of_samples = F.leave_one_out_advantages(
        rewards=P.penalized_rewards(inputs, config),
        deviation="none" if config.normalize_std == "batch" else config.normalize_std,
        std_epsilon=config.std_epsilon,
    )
    return of_samples[inputs.sample_ids]


SPEC = AlgorithmSpec(
    name="rloo",
    summary="REINFORCE with a leave-one-out baseline",
    config=RlooConfig,
    requirements=P.group_requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=P.normalize_group,
)
