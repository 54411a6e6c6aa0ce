"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the group's other rewards as baseline.

A response is one action, so its log-probs are summed, not averaged over its length. The sum is divided by a constant
length, as in Dr. GRPO, to keep gradient norms in the range of the other algorithms. At r = 1 the clipped surrogate has
the gradient of REINFORCE. The clip only limits ratios that changed by staleness.
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
    """Holds the settings of RLOO. conf/algo documents the values."""

    name: str = "rloo"
    aggregation: str = "seq_mean_token_sum_norm"
    normalize_std: str = "none"
    kl_estimator: str = "k1"
    kl_placement: str = "reward"


def check(config: RlooConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.baseline_problems(config) + P.credit_problems(config)
    problems += P.token_clip_problems(config, usual="0.2 and 0.2 are usual.")
    if config.normalize_std == "others" and config.group_size < 3:
        problems.append(
            f"algo.normalize_std=others with algo.group_size={config.group_size}: one other sample has no standard "
            "deviation. Use algo.group_size=3 or more, or algo.normalize_std=group."
        )
    P.refuse(problems + P.deviation_problems(config, F.LEAVE_ONE_OUT_DEVIATIONS))


def advantages(inputs: AdvantageInputs, config: RlooConfig) -> Tensor:
    """Returns the reward less the mean of the group's other rewards, scaled by ``normalize_std``, ``[tokens]``."""

    def relative(rewards: Tensor) -> Tensor:
        deviation = "none" if config.normalize_std == "batch" else config.normalize_std
        return F.leave_one_out_advantages(rewards=rewards, deviation=deviation, std_epsilon=config.std_epsilon)

    return P.credited_advantages(inputs, config, relative)


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
