"""Checks the correction, rejection and OPSM settings. This module does not import torch."""

from __future__ import annotations

from algorithms import functional as F
from algorithms.policy_gradient.config import PolicyGradientConfig

CORRECTION_CHOICES = ("auto", "none", *F.CORRECTIONS)


def correction_problems(config: PolicyGradientConfig) -> list[str]:
    """Returns the problems of the settings that compare trainer and engine, each with key, value and fix."""
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
            f"algo.correction={config.correction} with algo.old_logprobs=rollout: the old log-probs are the "
            "engine's log-probs, so no correction is needed. Use algo.old_logprobs=actor_fwd, or algo.correction=none."
        )
    if config.correction == "icepop" and config.correction_level != "token":
        problems.append(
            f"algo.correction=icepop with algo.correction_level={config.correction_level}: IcePop is per token. "
            "Use mis."
        )
    if config.correction == "tis_normalized" and config.old_logprobs == "current":
        problems.append(
            "algo.correction=tis_normalized with algo.old_logprobs=current: a step's mean weight is computed before "
            "its forward passes. Use algo.old_logprobs=actor_fwd, or algo.correction=tis."
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
            problems.append(f"{key}: there is no such rule. The rules are: {', '.join(F.REJECTION_RULES)}.")
        elif not _is_range(bounds):
            problems.append(f"{key}: expected two numbers, [low, high], with low < high; .inf is no upper bound.")
        elif not bounds[0] <= on_policy <= bounds[1]:
            problems.append(
                f"{key}: the value is {on_policy:g} if trainer and engine agree, and must lie between the two bounds."
            )
    return problems


def _is_range(bounds: object) -> bool:
    """Returns whether ``bounds`` are two numbers in ascending order. NaN is invalid."""
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return False
    return all(type(bound) in (int, float) for bound in bounds) and bounds[0] < bounds[1]


def choice_problems(key: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    """Returns a problem if the value of a setting is not in ``allowed``."""
    return [] if value in allowed else [f"{key}={value}: there is no such choice. Use one of: {', '.join(allowed)}."]
