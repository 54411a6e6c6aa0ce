"""Checks of the common knobs: one sentence a problem, with key, value and fix. No torch."""

from __future__ import annotations

from algorithms import functional as F
from algorithms.policy_gradient.knobs import ClipKnobs, PolicyGradientKnobs

KL_PLACEMENTS = ("loss", "reward")
OLD_LOGPROBS = ("rollout", "actor_fwd", "current")
CORRECTION_CHOICES = ("auto", "none", *F.CORRECTIONS)


def refuse(problems: list[str]) -> None:
    """Raises ValueError with one problem a line, where there is any."""
    if problems:
        raise ValueError("\n".join(problems))


def group_problems(knobs: PolicyGradientKnobs) -> list[str]:
    """`common_problems`, and a group too small to be its own baseline."""
    problems = common_problems(knobs)
    if knobs.group_size < 2:
        problems.append(f"algo.group_size={knobs.group_size}: a group of one has no baseline. Use 2 or more.")
    return problems


def common_problems(knobs: PolicyGradientKnobs) -> list[str]:
    """What is wrong with the common knobs, one sentence each with key, value and fix."""
    problems = [
        *_choice("algo.aggregation", knobs.aggregation, F.AGGREGATIONS),
        *_choice("algo.kl_estimator", knobs.kl_estimator, F.KL_ESTIMATORS),
        *_choice("algo.kl_placement", knobs.kl_placement, KL_PLACEMENTS),
        *_choice("algo.old_logprobs", knobs.old_logprobs, OLD_LOGPROBS),
        *_choice("algo.correction", knobs.correction, CORRECTION_CHOICES),
        *_choice("algo.correction_level", knobs.correction_level, F.CORRECTION_LEVELS),
    ]
    if knobs.kl_coef < 0:
        problems.append(f"algo.kl_coef={knobs.kl_coef}: must not be negative. Use 0 for no KL term.")
    if knobs.kl_coef > 0 and knobs.kl_placement == "loss" and knobs.kl_estimator == "k1":
        problems.append(
            f"algo.kl_estimator=k1 with algo.kl_coef={knobs.kl_coef}: as a loss, k1 has zero expected gradient. "
            "Use k2 or k3, or algo.kl_placement=reward."
        )
    if (knobs.aggregation == "seq_mean_token_sum_norm") != (knobs.norm_length > 0):
        problems.append(
            f"algo.norm_length={knobs.norm_length} with algo.aggregation={knobs.aggregation}: seq_mean_token_sum_norm "
            "needs a length above 0 (for instance rollout.max_new_tokens), the others need 0."
        )
    if knobs.entropy_coef < 0:
        problems.append(f"algo.entropy_coef={knobs.entropy_coef}: must not be negative. Use 0 for no bonus.")
    return problems + _update_problems(knobs) + _correction_problems(knobs)


def _update_problems(knobs: PolicyGradientKnobs) -> list[str]:
    if knobs.old_logprobs != "current" or knobs.mini_batches * knobs.epochs <= 1:
        return []
    return [
        f"algo.old_logprobs=current with algo.mini_batches={knobs.mini_batches}, algo.epochs={knobs.epochs}: every "
        "update would take its own weights for the old ones, so the ratio is always 1 and nothing is clipped. Use "
        "algo.old_logprobs=rollout or actor_fwd."
    ]


def _correction_problems(knobs: PolicyGradientKnobs) -> list[str]:
    problems = []
    low, high = knobs.correction_low, knobs.correction_high
    if not 0 <= low < high:
        problems.append(
            f"algo.correction_low={low}, algo.correction_high={high}: need 0 <= correction_low < correction_high. "
            "TIS uses 0 and 2, IcePop 0.5 and 5."
        )
    if knobs.correction in F.CORRECTIONS and knobs.old_logprobs == "rollout":
        problems.append(
            f"algo.correction={knobs.correction} with algo.old_logprobs=rollout: the engine's own log-probs are the "
            "old ones, so there is nothing to correct. Use algo.old_logprobs=actor_fwd, or algo.correction=none."
        )
    if knobs.correction == "icepop" and knobs.correction_level == "sequence":
        problems.append("algo.correction=icepop with algo.correction_level=sequence: IcePop is per token. Use mis.")
    if knobs.opsm_threshold < 0:
        problems.append(f"algo.opsm_threshold={knobs.opsm_threshold}: must not be negative. 0 is off, 1e-4 is usual.")
    if knobs.opsm_threshold > 0 and knobs.old_logprobs == "current":
        problems.append(
            f"algo.opsm_threshold={knobs.opsm_threshold} with algo.old_logprobs=current: the ratio is always 1, so "
            "OPSM never acts. Use algo.old_logprobs=rollout or actor_fwd."
        )
    return problems


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


def _choice(key: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    return [] if value in allowed else [f"{key}={value}: no such choice. Use one of: {', '.join(allowed)}."]
