"""Computes advantages relative to the group: of whole episodes, and of turns if ``algo.credit`` is "gigpo".

A KL penalty is first subtracted from the rewards. GiGPO (arXiv 2505.10978) adds a step-level advantage to each turn. It
compares the turn's discounted return with the returns of the group's turns that began in the same state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from algorithms import functional as F
from algorithms.policy_gradient.config import CreditConfig, GroupConfig, PolicyGradientConfig
from relax_core.contracts.algorithm import AdvantageInputs

if TYPE_CHECKING:
    from torch import Tensor


def token_penalties(inputs: AdvantageInputs, config: PolicyGradientConfig) -> Tensor | None:
    """Returns kl_coef × KL(sampling policy ‖ reference) of each token, ``[tokens]``, for ``kl_placement`` "reward".

    Returns None if ``kl_coef`` is 0, or for another ``kl_placement``.
    """
    if config.kl_coef == 0 or config.kl_placement != "reward":
        return None
    assert inputs.old_logprobs is not None and inputs.reference_logprobs is not None, (
        "requirements() requests a reference"
    )
    return config.kl_coef * F.kl_estimate(
        logprobs=inputs.old_logprobs,
        reference_logprobs=inputs.reference_logprobs,
        loss_mask=inputs.loss_mask,
        estimator=config.kl_estimator,
    )


def penalized_rewards(inputs: AdvantageInputs, config: PolicyGradientConfig) -> Tensor:
    """Returns the ``[samples]`` rewards, minus each sample's summed KL penalty if ``kl_placement`` is "reward"."""
    penalties = token_penalties(inputs, config)
    if penalties is None:
        return inputs.rewards
    return inputs.rewards - F.sample_sums(
        per_token=penalties,
        loss_mask=inputs.loss_mask,
        sample_ids=inputs.sample_ids,
        num_samples=inputs.rewards.numel(),
    )


def sample_advantages(rewards: Tensor, config: GroupConfig) -> Tensor:
    """Returns one group's advantages, ``[samples]`` float32. ``pass_k`` > 1 selects pass@k training."""
    normalize_std, std_epsilon = config.normalize_std == "group", config.std_epsilon
    if config.pass_k > 1:
        return F.pass_at_k_advantages(
            rewards=rewards, k=config.pass_k, normalize_std=normalize_std, std_epsilon=std_epsilon
        )
    return F.group_relative_advantages(rewards=rewards, normalize_std=normalize_std, std_epsilon=std_epsilon)


def credited_advantages(
    inputs: AdvantageInputs,
    config: CreditConfig,
    relative: Callable[[Tensor], Tensor],
    *,
    punishments: Tensor | None = None,
) -> Tensor:
    """Returns the advantages of a group, ``[tokens]`` float32, for ``algo.credit``.

    ``relative`` is the algorithm's group-relative advantage function: it maps two or more rewards to the same number of
    advantages. With "episode", every token gets the advantage of its sample's reward: `penalized_rewards` plus
    ``punishments`` ``[samples]``. With "gigpo", the tokens of a turn also get ``gigpo_weight`` times the turn's
    `step_advantages`.
    """
    rewards = penalized_rewards(inputs, config)
    advantages = relative(rewards if punishments is None else rewards + punishments)[inputs.sample_ids]
    if config.credit != "gigpo":
        return advantages
    assert inputs.turns is not None, "requirements() requests the turns"
    penalties = token_penalties(inputs, config)
    of_turns = step_advantages(inputs, config, relative, penalties=penalties, punishments=punishments)
    return advantages + config.gigpo_weight * of_turns[inputs.turns.of_tokens]


def step_advantages(
    inputs: AdvantageInputs,
    config: CreditConfig,
    relative: Callable[[Tensor], Tensor],
    *,
    penalties: Tensor | None = None,
    punishments: Tensor | None = None,
) -> Tensor:
    """Returns the advantages of a group's turns, relative to turns that began in the same state, ``[turns]`` float32.

    The compared value is the return of a turn: the sum of rewards from the turn to the end of the episode, discounted
    by ``gigpo_gamma`` per turn. The ``penalties`` ``[tokens]`` of a turn's tokens are subtracted from the turn's
    reward. The ``punishments`` ``[samples]`` of an episode are added to the reward of its last turn.
    """
    turns = inputs.turns
    assert turns is not None, "requirements() requests the turns"
    rewards = turns.rewards.clone()
    if penalties is not None:
        rewards -= F.sample_sums(
            per_token=penalties,
            loss_mask=inputs.loss_mask,
            sample_ids=turns.of_tokens,
            num_samples=rewards.numel(),
        )
    if punishments is not None:
        last = turns.samples != turns.samples.roll(-1)
        last[-1:] = True
        rewards[last] += punishments[turns.samples[last]].double()
    returns = F.turn_returns(turn_rewards=rewards, turn_samples=turns.samples, gamma=config.gigpo_gamma)
    return F.anchor_advantages(returns=returns, state_keys=turns.state_keys, relative=relative)


def group_advantages(inputs: AdvantageInputs, config: GroupConfig, *, punishments: Tensor | None = None) -> Tensor:
    """Returns `credited_advantages` with `sample_advantages` as ``relative``, ``[tokens]`` float32."""
    relative = partial(sample_advantages, config=config)
    return credited_advantages(inputs, config, relative, punishments=punishments)
