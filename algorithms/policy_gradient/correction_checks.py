"""Checks of the settings that say what is done about tokens that another distribution sampled. No torch."""

from __future__ import annotations

from algorithms import functional as F
from algorithms.policy_gradient.config import PolicyGradientConfig

CORRECTION_CHOICES = ("auto", "none", *F.CORRECTIONS)


def correction_problems(config: PolicyGradientConfig) -> list[str]:
    """What is wrong with the settings that compare trainer and engine, one sentence each with key, value and fix."""
    problems = [
        *choice_problems("algo.correction", config.correction, CORRECTION_CHOICES),
        *choice_problems("algo.correction_level", config.correction_level, F.CORRECTION_LEVELS),
    ]
    low, high = config.correction_low, config.correction_high
    if not 0 <= low < high:
        problems.append(
            f"algo.correction_low={low}, algo.correction_high={high}: need 0 <= correction_low < correction_high. "
            "TIS uses 0 and 2, IcePop 0.5 and 5."
        )
    if config.correction in F.CORRECTIONS and config.old_logprobs == "rollout":
        problems.append(
            f"algo.correction={config.correction} with algo.old_logprobs=rollout: the engine's own log-probs are the "
            "old ones, so there is nothing to correct. Use algo.old_logprobs=actor_fwd, or algo.correction=none."
        )
    if config.correction == "icepop" and config.correction_level != "token":
        problems.append(
            f"algo.correction=icepop with algo.correction_level={config.correction_level}: IcePop is per token. "
            "Use mis."
        )
    if config.correction == "tis_normalized" and config.old_logprobs == "current":
        problems.append(
            "algo.correction=tis_normalized with algo.old_logprobs=current: a step's mean weight is taken before its "
            "forward passes. Use algo.old_logprobs=actor_fwd, or algo.correction=tis."
        )
    if config.opsm_threshold < 0:
        problems.append(f"algo.opsm_threshold={config.opsm_threshold}: must not be negative. 0 is off, 1e-4 is usual.")
    return problems + _rejection_problems(config)


def _rejection_problems(config: PolicyGradientConfig) -> list[str]:
    problems = []
    for rule, bounds in config.rejection.items():
        key = f"algo.rejection.{rule}={bounds}"
        on_policy = 1.0 if rule.endswith("_ratio") else 0.0
        if rule not in F.REJECTION_RULES:
            problems.append(f"{key}: no such rule. What exists: {', '.join(F.REJECTION_RULES)}.")
        elif not _is_range(bounds):
            problems.append(f"{key}: expected two numbers, [low, high], with low < high; .inf is no upper bound.")
        elif not bounds[0] <= on_policy <= bounds[1]:
            problems.append(
                f"{key}: where trainer and engine agree the value is {on_policy:g}, which must lie between the two."
            )
    return problems


def _is_range(bounds: object) -> bool:
    """Two numbers, the first below the second; NaN is below nothing."""
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return False
    return all(type(bound) in (int, float) for bound in bounds) and bounds[0] < bounds[1]


def choice_problems(key: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    """Of a setting whose values are names."""
    return [] if value in allowed else [f"{key}={value}: no such choice. Use one of: {', '.join(allowed)}."]
