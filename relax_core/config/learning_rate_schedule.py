"""Computes the learning rate of each train step, and reports a jump of the learning rate at a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from relax_core.config.choices import Schedule
from relax_core.config.schema import DEFAULT_WARMUP_STEPS, OptimizerConfig

_SAME = 0.02  # a larger relative change is a jump; one step of a schedule changes the rate by about this much


def learning_rate(config: OptimizerConfig, *, step: int, total_steps: int) -> float:
    """Returns the learning rate of train step ``step``.

    During the warm-up the rate is lr * (step + 1) / warmup_steps. After the warm-up the rate is constant, or falls
    along a half cosine or a straight line to lr * min_lr_ratio at ``total_steps``.
    """
    warmup = min(DEFAULT_WARMUP_STEPS, total_steps) if config.warmup_steps is None else config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule is Schedule.constant:
        return config.lr
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    left = 1 - done if config.schedule is Schedule.linear else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def learning_rate_jump_message(before: Mapping[str, Any], now: Mapping[str, Any], *, step: int) -> str | None:
    """Returns a sentence if a changed run.steps stretches the schedule and makes the learning rate jump at ``step``.

    Both configurations have the form of `relax_core.config.saved_config.plain`. This function does not report changed
    keys of `optimizer`.
    """
    was, steps = int(before["run"]["steps"]), int(now["run"]["steps"])
    if was == steps:
        return None
    optimizer = OptimizerConfig(**now["optimizer"] | {"schedule": Schedule[now["optimizer"]["schedule"]]})
    old, new = (learning_rate(optimizer, step=step, total_steps=total) for total in (was, steps))
    if math.isclose(old, new, rel_tol=_SAME):
        return None
    last = learning_rate(optimizer, step=max(0, step - 1), total_steps=was)
    return (
        f"run.steps was {was}, is {steps}: optimizer.schedule={optimizer.schedule.value} stretches to it, so the "
        f"learning rate jumps from {last:.3g} to {new:.3g} at step {step}. optimizer.schedule=constant "
        f"optimizer.lr={last:.3g} keeps it"
    )
