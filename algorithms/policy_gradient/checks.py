"""Checks of the common settings: one sentence a problem, with key, value and fix. No torch."""

from __future__ import annotations

from algorithms import functional as F
from algorithms.policy_gradient.config import (
    ClipConfig,
    DeviationConfig,
    GroupConfig,
    PolicyGradientConfig,
    TokenClipConfig,
)
from algorithms.policy_gradient.correction_checks import choice_problems, correction_problems

KL_PLACEMENTS = (*F.KL_LOSSES, "reward")
OLD_LOGPROBS = ("rollout", "actor_fwd", "current")


def refuse(problems: list[str]) -> None:
    """Raises ValueError with one problem a line, where there is any."""
    if problems:
        raise ValueError("\n".join(problems))


def group_problems(config: GroupConfig) -> list[str]:
    """`baseline_problems`, and what is wrong with the deviation and with ``pass_k``."""
    problems = baseline_problems(config) + deviation_problems(config, F.DEVIATIONS)
    if not 1 <= config.pass_k < max(2, config.group_size):
        problems.append(
            f"algo.pass_k={config.pass_k} with algo.group_size={config.group_size}: need 1 <= pass_k < group_size, as "
            "a group has one subset of all its samples. 1 is the usual advantage."
        )
    if config.pass_k > 1 and config.normalize_std == "batch":
        problems.append(
            f"algo.pass_k={config.pass_k} with algo.normalize_std=batch: the deviation is that of the group's subsets. "
            "Use algo.normalize_std=group or none."
        )
    return problems


def baseline_problems(config: PolicyGradientConfig) -> list[str]:
    """`common_problems`, and a group too small to be its own baseline."""
    problems = common_problems(config)
    if config.group_size < 2:
        problems.append(f"algo.group_size={config.group_size}: a group of one has no baseline. Use 2 or more.")
    return problems


def deviation_problems(config: DeviationConfig, allowed: tuple[str, ...]) -> list[str]:
    """``allowed``: what the algorithm may divide by."""
    return choice_problems("algo.normalize_std", config.normalize_std, allowed) + above_zero(config, std_epsilon=1e-6)


def common_problems(config: PolicyGradientConfig) -> list[str]:
    """What is wrong with the common settings, one sentence each with key, value and fix."""
    problems = [
        *choice_problems("algo.aggregation", config.aggregation, F.AGGREGATIONS),
        *choice_problems("algo.kl_estimator", config.kl_estimator, F.KL_ESTIMATORS),
        *choice_problems("algo.kl_placement", config.kl_placement, KL_PLACEMENTS),
        *choice_problems("algo.old_logprobs", config.old_logprobs, OLD_LOGPROBS),
    ]
    if config.kl_coef < 0:
        problems.append(f"algo.kl_coef={config.kl_coef}: must not be negative. Use 0 for no KL term.")
    if config.kl_coef > 0 and config.kl_placement == "loss" and config.kl_estimator == "k1":
        problems.append(
            f"algo.kl_estimator=k1 with algo.kl_coef={config.kl_coef}: as a loss, k1 has zero expected gradient. "
            "Use k2 or k3, or another algo.kl_placement."
        )
    if config.aggregation == "seq_mean_token_sum_norm" and not config.norm_length > 0:
        problems.append(
            f"algo.norm_length={config.norm_length} with algo.aggregation={config.aggregation}: each sample's sum is "
            "divided by it. Use algo.norm_length=${rollout.max_new_tokens}, as the presets do."
        )
    if config.entropy_coef < 0:
        problems.append(f"algo.entropy_coef={config.entropy_coef}: must not be negative. Use 0 for no bonus.")
    return problems + _update_problems(config) + correction_problems(config)


def _update_problems(config: PolicyGradientConfig) -> list[str]:
    if config.old_logprobs != "current" or config.mini_batches * config.epochs <= 1:
        return []
    return [
        f"algo.old_logprobs=current with algo.mini_batches={config.mini_batches}, algo.epochs={config.epochs}: every "
        "update would take its own weights for the old ones, so the ratio is always 1 and nothing is clipped. Use "
        "algo.old_logprobs=rollout or actor_fwd."
    ]


def above_zero(config: PolicyGradientConfig, **usual: float) -> list[str]:
    """Of settings that must be above 0, by name with the value that is usual."""
    return [
        f"algo.{key}={getattr(config, key)}: must be above 0. Use {value:g}."
        for key, value in usual.items()
        if getattr(config, key) <= 0
    ]


def clip_problems(config: ClipConfig, *, usual: str) -> list[str]:
    """``usual``: the values that the algorithm's paper has, in words."""
    problems = []
    if not 0 < config.clip_low <= 1:
        problems.append(f"algo.clip_low={config.clip_low}: must lie in (0, 1]. {usual}")
    if config.clip_high <= 0:
        problems.append(f"algo.clip_high={config.clip_high}: must be above 0. {usual}")
    if config.dual_clip != 0 and config.dual_clip <= 1 + config.clip_high:
        problems.append(
            f"algo.dual_clip={config.dual_clip}: must be above 1 + algo.clip_high={1 + config.clip_high:g}. "
            "3 is usual, 0 is off."
        )
    return problems


def token_clip_problems(config: TokenClipConfig, *, usual: str) -> list[str]:
    """`clip_problems`, and a trust region that does not exist or that nothing could leave."""
    problems = clip_problems(config, usual=usual) + choice_problems(
        "algo.trust_region", config.trust_region, F.TRUST_REGIONS
    )
    if config.trust_region != "ratio" and config.clip_high >= 1:
        problems.append(
            f"algo.clip_high={config.clip_high} with algo.trust_region={config.trust_region}: no probability moves by "
            "1 or more. 0.2 is usual."
        )
    return problems
