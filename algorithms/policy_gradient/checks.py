"""Checks of the common knobs: one sentence a problem, with key, value and fix. No torch."""

from __future__ import annotations

from algorithms import functional as F
from algorithms.policy_gradient.correction_checks import choice_problems, correction_problems
from algorithms.policy_gradient.knobs import (
    ClipKnobs,
    DeviationKnobs,
    GroupKnobs,
    PolicyGradientKnobs,
    TokenClipKnobs,
)

KL_PLACEMENTS = (*F.KL_LOSSES, "reward")
OLD_LOGPROBS = ("rollout", "actor_fwd", "current")


def refuse(problems: list[str]) -> None:
    """Raises ValueError with one problem a line, where there is any."""
    if problems:
        raise ValueError("\n".join(problems))


def group_problems(knobs: GroupKnobs) -> list[str]:
    """`baseline_problems`, and what is wrong with the deviation and with ``pass_k``."""
    problems = baseline_problems(knobs) + deviation_problems(knobs, F.DEVIATIONS)
    if not 1 <= knobs.pass_k < max(2, knobs.group_size):
        problems.append(
            f"algo.pass_k={knobs.pass_k} with algo.group_size={knobs.group_size}: need 1 <= pass_k < group_size, as a "
            "group has one subset of all its samples. 1 is the usual advantage."
        )
    if knobs.pass_k > 1 and knobs.normalize_std == "batch":
        problems.append(
            f"algo.pass_k={knobs.pass_k} with algo.normalize_std=batch: the deviation is that of the group's subsets. "
            "Use algo.normalize_std=group or none."
        )
    return problems


def baseline_problems(knobs: PolicyGradientKnobs) -> list[str]:
    """`common_problems`, and a group too small to be its own baseline."""
    problems = common_problems(knobs)
    if knobs.group_size < 2:
        problems.append(f"algo.group_size={knobs.group_size}: a group of one has no baseline. Use 2 or more.")
    return problems


def deviation_problems(knobs: DeviationKnobs, allowed: tuple[str, ...]) -> list[str]:
    """``allowed``: what the algorithm may divide by."""
    return choice_problems("algo.normalize_std", knobs.normalize_std, allowed) + above_zero(knobs, std_epsilon=1e-6)


def common_problems(knobs: PolicyGradientKnobs) -> list[str]:
    """What is wrong with the common knobs, one sentence each with key, value and fix."""
    problems = [
        *choice_problems("algo.aggregation", knobs.aggregation, F.AGGREGATIONS),
        *choice_problems("algo.kl_estimator", knobs.kl_estimator, F.KL_ESTIMATORS),
        *choice_problems("algo.kl_placement", knobs.kl_placement, KL_PLACEMENTS),
        *choice_problems("algo.old_logprobs", knobs.old_logprobs, OLD_LOGPROBS),
    ]
    if knobs.kl_coef < 0:
        problems.append(f"algo.kl_coef={knobs.kl_coef}: must not be negative. Use 0 for no KL term.")
    if knobs.kl_coef > 0 and knobs.kl_placement == "loss" and knobs.kl_estimator == "k1":
        problems.append(
            f"algo.kl_estimator=k1 with algo.kl_coef={knobs.kl_coef}: as a loss, k1 has zero expected gradient. "
            "Use k2 or k3, or another algo.kl_placement."
        )
    if knobs.aggregation == "seq_mean_token_sum_norm" and not knobs.norm_length > 0:
        problems.append(
            f"algo.norm_length={knobs.norm_length} with algo.aggregation={knobs.aggregation}: each sample's sum is "
            "divided by it. Use algo.norm_length=${rollout.max_new_tokens}, as the presets do."
        )
    if knobs.entropy_coef < 0:
        problems.append(f"algo.entropy_coef={knobs.entropy_coef}: must not be negative. Use 0 for no bonus.")
    return problems + _update_problems(knobs) + correction_problems(knobs)


def _update_problems(knobs: PolicyGradientKnobs) -> list[str]:
    if knobs.old_logprobs != "current" or knobs.mini_batches * knobs.epochs <= 1:
        return []
    return [
        f"algo.old_logprobs=current with algo.mini_batches={knobs.mini_batches}, algo.epochs={knobs.epochs}: every "
        "update would take its own weights for the old ones, so the ratio is always 1 and nothing is clipped. Use "
        "algo.old_logprobs=rollout or actor_fwd."
    ]


def above_zero(knobs: PolicyGradientKnobs, **usual: float) -> list[str]:
    """Of knobs that must be above 0, by name with the value that is usual."""
    return [
        f"algo.{key}={getattr(knobs, key)}: must be above 0. Use {value:g}."
        for key, value in usual.items()
        if getattr(knobs, key) <= 0
    ]


def clip_problems(knobs: ClipKnobs, *, usual: str) -> list[str]:
    """``usual``: the values that the algorithm's paper has, in words."""
    problems = []
    if not 0 < knobs.clip_low <= 1:
        problems.append(f"algo.clip_low={knobs.clip_low}: must lie in (0, 1]. {usual}")
    if knobs.clip_high <= 0:
        problems.append(f"algo.clip_high={knobs.clip_high}: must be above 0. {usual}")
    if knobs.dual_clip != 0 and knobs.dual_clip <= 1 + knobs.clip_high:
        problems.append(
            f"algo.dual_clip={knobs.dual_clip}: must be above 1 + algo.clip_high={1 + knobs.clip_high:g}. "
            "3 is usual, 0 is off."
        )
    return problems


def token_clip_problems(knobs: TokenClipKnobs, *, usual: str) -> list[str]:
    """`clip_problems`, and a trust region that does not exist or that nothing could leave."""
    problems = clip_problems(knobs, usual=usual) + choice_problems(
        "algo.trust_region", knobs.trust_region, F.TRUST_REGIONS
    )
    if knobs.trust_region != "ratio" and knobs.clip_high >= 1:
        problems.append(
            f"algo.clip_high={knobs.clip_high} with algo.trust_region={knobs.trust_region}: no probability moves by "
            "1 or more. 0.2 is usual."
        )
    return problems
