"""Decides by the values of a number whether a rule of `notify.rules` is true."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from relax_core.config.notify_rules import Rule

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """Is what a rule has seen.

    ``held`` is how many measured values in a row were beyond the bound, ``value`` the newest one, of train step
    ``step``. With `Rule.of_best`, ``recent`` holds the newest values, and ``best`` is the largest mean of as many.
    """

    held: int = 0
    value: float = math.nan
    step: int = -1
    recent: tuple[float, ...] = ()
    best: float | None = None

    def is_true(self, rule: Rule) -> bool:
        """Returns whether the rule is true by now."""
        return self.held >= rule.steps


def advanced(rule: Rule, state: RuleState, value: float | None, *, step: int) -> RuleState:
    """Returns the state after a record of train step ``step``; ``value`` is None where it did not have the number.

    What was not measured says nothing: the state stays, and so it does for NaN, unless the rule asks for it. A step
    that is done again, because a resume undid it, begins the count anew.
    """
    if step <= state.step:
        state = RuleState(best=state.best)
    if value is None or (math.isnan(value) and rule.sign != "nan"):
        return state
    state = replace(state, value=value, step=step)
    if not rule.of_best:
        beyond = math.isnan(value) if rule.sign == "nan" else _COMPARE[rule.sign](value, rule.bound)
        return replace(state, held=state.held + 1 if beyond else 0)
    recent = (*state.recent, value)[-rule.steps :]
    if len(recent) < rule.steps:
        return replace(state, recent=recent, held=0)
    mean = fmean(recent)
    best = mean if state.best is None else max(state.best, mean)
    beyond = best > 0.0 and _COMPARE[rule.sign](mean, rule.bound * best)
    return replace(state, recent=recent, best=best, held=rule.steps if beyond else 0)
