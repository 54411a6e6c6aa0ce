"""Checks the shared settings. Each problem is a sentence with key, value and fix. This module does not import torch."""

from __future__ import annotations

from algorithms import functional as F
from algorithms.policy_gradient.config import (
    ClipConfig,
    CreditConfig,
    DeviationConfig,
    GroupConfig,
    PolicyGradientConfig,
    TokenClipConfig,
)
from algorithms.policy_gradient.correction_checks import choice_problems, correction_problems
from relax_core.contracts.algorithm import AlgorithmConfig

KL_PLACEMENTS = (*F.KL_LOSSES, "reward")
OLD_LOGPROBS = ("rollout", "actor_fwd", "current")
CREDITS = ("episode", "gigpo")


def refuse(problems: list[str]) -> None:
    """Raises ValueError with one problem per line if ``problems`` is not empty."""
    if problems:
        raise ValueError("\n".join(problems))


def group_problems(config: GroupConfig) -> list[str]:
    """Returns the problems of `baseline_problems`, and the problems of ``normalize_std``, ``credit`` and ``pass_k``."""
    problems = baseline_problems(config) + deviation_problems(config, F.DEVIATIONS) + credit_problems(config)
    if config.pass_k > 1 and config.credit == "gigpo":
        problems.append(
            f"algo.credit=gigpo with algo.pass_k={config.pass_k}: pass@k compares whole episodes. Use algo.pass_k=1, "
            "or algo.credit=episode."
        )
    if not 1 <= config.pass_k < max(2, config.group_size):
        problems.append(
            f"algo.pass_k={config.pass_k} with algo.group_size={config.group_size}: need 1 <= pass_k < group_size, "
            "because pass_k=group_size leaves only one subset. Use algo.pass_k=1 for the usual advantage."
        )
    if config.pass_k > 1 and config.normalize_std == "batch":
        problems.append(
            f"algo.pass_k={config.pass_k} with algo.normalize_std=batch: pass@k divides by the deviation of the "
            "group's subsets. Use algo.normalize_std=group or none."
        )
    return problems


def baseline_problems(config: PolicyGradientConfig) -> list[str]:
    """Returns the problems of `common_problems`, and a problem if the group is too small for a baseline."""
    problems = common_problems(config)
    if config.group_size < 2:
        problems.append(f"algo.group_size={config.group_size}: a group of one has no baseline. Use 2 or more.")
    return problems


def credit_problems(config: CreditConfig) -> list[str]:
    """Returns the problems of ``credit``, ``gigpo_weight`` and ``gigpo_gamma``."""
    problems = choice_problems("algo.credit", config.credit, CREDITS) + not_positive_problems(config, gigpo_weight=1.0)
    if not 0 < config.gigpo_gamma <= 1:
        problems.append(f"algo.gigpo_gamma={config.gigpo_gamma}: must lie in (0, 1]. GiGPO uses 0.95.")
    return problems


def deviation_problems(config: DeviationConfig, allowed: tuple[str, ...]) -> list[str]:
    """Returns the problems of ``normalize_std``, which must be in ``allowed``."""
    return choice_problems("algo.normalize_std", config.normalize_std, allowed)


def common_problems(config: PolicyGradientConfig) -> list[str]:
    """Returns the problems of the settings of all policy-gradient algorithms."""
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
            "divided by norm_length. Use algo.norm_length=${rollout.max_new_tokens}, as the presets do."
        )
    if config.entropy_coef < 0:
        problems.append(f"algo.entropy_coef={config.entropy_coef}: must not be negative. Use 0 for no bonus.")
    return problems + _update_problems(config) + correction_problems(config)


def _update_problems(config: PolicyGradientConfig) -> list[str]:
    if config.old_logprobs != "current" or config.mini_batches * config.epochs <= 1:
        return []
    return [
        f"algo.old_logprobs=current with algo.mini_batches={config.mini_batches}, algo.epochs={config.epochs}: each "
        "update would compare its weights with themselves, so the ratio would always be 1. Use "
        "algo.old_logprobs=rollout or actor_fwd."
    ]


def offline_problems(config: AlgorithmConfig, *, group_size: int) -> list[str]:
    """Returns the problems of settings that an algorithm on data rows cannot have."""
    problems = []
    if config.group_size != group_size:
        samples = "1 sample" if group_size == 1 else f"{group_size} samples"
        problems.append(
            f"algo.group_size={config.group_size} with algo={config.name}: a data row has {samples}. Use {group_size}."
        )
    if config.routing_replay:
        problems.append(f"algo.routing_replay=true with algo={config.name}: no engine chooses experts. Use false.")
    return problems


def not_positive_problems(config: AlgorithmConfig, **usual: float) -> list[str]:
    """Returns the problems of settings that must be above 0. ``usual`` maps their names to usual values."""
    return [
        f"algo.{key}={getattr(config, key)}: must be above 0. Use {value:g}."
        for key, value in usual.items()
        if getattr(config, key) <= 0
    ]


def clip_problems(config: ClipConfig, *, usual: str) -> list[str]:
    """Returns the problems of ``clip_low``, ``clip_high`` and ``dual_clip``. ``usual`` states usual values."""
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
    """Returns the problems of `clip_problems` and the problems of ``trust_region``."""
    problems = clip_problems(config, usual=usual) + choice_problems(
        "algo.trust_region", config.trust_region, F.TRUST_REGIONS
    )
    if config.trust_region != "ratio" and config.clip_high >= 1:
        problems.append(
            f"algo.clip_high={config.clip_high} with algo.trust_region={config.trust_region}: no probability changes "
            "by 1 or more, so nothing would be masked. 0.2 is usual."
        )
    return problems
