"""REINFORCE++ (arXiv 2501.03262): PPO's clip without a critic, advantages normalised over the whole step.

``group_baseline=true`` is the paper's "REINFORCE++ w/ Baseline" for several samples per prompt. The group's mean is
first subtracted, and the KL is k2 in the loss. ``group_baseline=false`` with ``kl_placement=reward`` and
``kl_estimator=k1`` is the paper's plain form. The return of a token then includes the KL from this token to the end of
the response. The only baseline of the plain form is the mean over the step, so a group may have one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from algorithms import functional as F
from algorithms import policy_gradient as P
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, Requirements

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReinforcePpConfig(P.CreditConfig, P.TokenClipConfig):
    """Holds the settings of REINFORCE++. conf/algo documents the values."""

    name: str = "reinforce_pp"
    group_baseline: bool = True
    gamma: float = 1.0
    std_epsilon: ClassVar[float] = 1e-8
    kl_estimator: str = "k2"


def requirements(config: ReinforcePpConfig) -> Requirements:
    """Returns `policy_gradient.credit_requirements` with whole steps."""
    return P.credit_requirements(config, whole_step=True)


def check(config: ReinforcePpConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = P.baseline_problems(config) if config.group_baseline else P.common_problems(config)
    problems += P.token_clip_problems(config, usual="REINFORCE++ uses 0.2 and 0.2.")
    problems += P.credit_problems(config)
    if config.credit == "gigpo" and not config.group_baseline:
        problems.append(
            "algo.credit=gigpo with algo.group_baseline=false: GiGPO compares a group's turns and also its episodes. "
            "Use algo.group_baseline=true, or algo.credit=episode."
        )
    if not 0 < config.gamma <= 1:
        problems.append(f"algo.gamma={config.gamma}: must lie in (0, 1]. 1 is usual.")
    P.refuse(problems)


def advantages(inputs: AdvantageInputs, config: ReinforcePpConfig) -> Tensor:
    """Returns the advantages before `normalize`, ``[tokens]`` float32: Σ_k γ^(k - t) r_k of each trained token t.

    The sum is over the sample's trained tokens k >= t. r_k is minus the token's KL penalty; at the last trained token,
    r_k also includes the sample's reward. With ``credit`` "gigpo", the weighted step-level advantage of the turn is
    added. It contains no KL and is not discounted by ``gamma``.
    """
    of_episodes = _of_episodes(inputs, config)
    if config.credit != "gigpo":
        return of_episodes
    assert inputs.turns is not None, "requirements() requests the turns"
    of_turns = P.step_advantages(inputs, config, _centred)
    return of_episodes + config.gigpo_weight * of_turns[inputs.turns.of_tokens]


def _centred(rewards: Tensor) -> Tensor:
    return F.group_relative_advantages(rewards=rewards, normalize_std=False, std_epsilon=0.0)


def _of_episodes(inputs: AdvantageInputs, config: ReinforcePpConfig) -> Tensor:
    rewards = _centred(inputs.rewards) if config.group_baseline else inputs.rewards
    penalties = P.token_penalties(inputs, config)
    if config.gamma < 1:
        return F.discounted_rewards(
            token_rewards=F.token_rewards(
                rewards=rewards, penalties=penalties, loss_mask=inputs.loss_mask, sample_ids=inputs.sample_ids
            ),
            loss_mask=inputs.loss_mask,
            sample_ids=inputs.sample_ids,
            num_samples=rewards.numel(),
            gamma=config.gamma,
        )
    of_tokens = rewards.float()[inputs.sample_ids]
    if penalties is None:
        return of_tokens
    return of_tokens - F.reward_to_go(per_token=penalties, loss_mask=inputs.loss_mask, sample_ids=inputs.sample_ids)


def normalize(
    advantages: Sequence[Tensor], inputs: Sequence[AdvantageInputs], config: ReinforcePpConfig
) -> list[Tensor]:
    """Whitens the advantages over all trained tokens of a train step's groups."""
    masks = [group_input.loss_mask for group_input in inputs]
    whitened = F.normalize_over_step(advantages=advantages, loss_masks=masks, std_epsilon=config.std_epsilon)
    return P.normalize_weights(whitened, inputs, config)


SPEC = AlgorithmSpec(
    name="reinforce_pp",
    summary="PPO clip without critic, advantages normalised over the step",
    config=ReinforcePpConfig,
    requirements=requirements,
    check=check,
    advantages=advantages,
    loss=P.clipped_loss,
    denominator=P.denominator,
    normalize=normalize,
)
