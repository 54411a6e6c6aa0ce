"""Says in words what the numbers of a run mean: findings at its end, and warnings while it learns nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from relax_core.observe.event_log import ACTOR, MetricRecord, is_resume

Values = Mapping[str, float]

WINDOW = 10  # number of steps in a mean
NOISE = 5.0  # a fall of the reward counts from this number of standard errors of the difference of two windows on
LOST_SHARE = 1 / 3  # a fall of the reward counts from this share of the former gain on
EVAL_NOISE = 3.0  # a fall of the accuracy counts from this number of standard errors on
EVAL_FALL = 0.03
MOST_GROUPS = 0.5
MOSTLY_RIGHT = 0.5  # from this share of exact answers on, equal rewards mean that the prompts are learnt


def findings(actor: Mapping[int, Values], evaluations: Mapping[int, Values]) -> list[str]:
    """Returns one sentence for each problem of the run; none for a healthy run.

    ``actor`` maps train steps to the trainer's values, and ``evaluations`` maps weight versions to those of
    evaluations.
    """
    return [*_of_rewards(actor), *_of_evaluations(evaluations), *_of_the_last_steps(list(actor.values())[-WINDOW:])]


def _of_rewards(actor: Mapping[int, Values]) -> Iterator[str]:
    """Checks whether the reward fell.

    The last window's mean must be below the best window's by more than a third of the gain until then, and by more than
    the noise between steps explains.
    """
    known = [
        (step, values["reward"]) for step, values in actor.items() if math.isfinite(values.get("reward", math.nan))
    ]
    if len(known) < 2 * WINDOW:
        return
    rewards = [reward for _, reward in known]
    means = [fmean(rewards[start : start + WINDOW]) for start in range(len(rewards) - WINDOW + 1)]
    best = max(range(len(means)), key=means.__getitem__)
    first, highest, last = means[0], means[best], means[-1]
    # The differences of neighbouring steps have twice the variance of independent noise.
    noise = math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(rewards)) / 2)
    lost = highest - last
    if lost > LOST_SHARE * (highest - first) and lost > NOISE * noise * math.sqrt(2 / WINDOW):
        steps = f"steps {known[best][0]} to {known[best + WINDOW - 1][0]}"
        yield f"The reward fell from {highest:.3f} ({steps}) to {last:.3f} in the last {WINDOW} steps."


def _of_evaluations(evaluations: Mapping[int, Values]) -> Iterator[str]:
    """Checks whether the held-out accuracy fell by more than `EVAL_FALL`, and by more than the sampling error."""
    if len(evaluations) < 2:
        return
    best = max(evaluations, key=lambda step: evaluations[step]["exact"])
    last = max(evaluations)
    high, low, prompts = evaluations[best]["exact"], evaluations[last]["exact"], evaluations[last]["rows"]
    middle = (high + low) / 2
    if high - low > max(EVAL_FALL, EVAL_NOISE * math.sqrt(2 * middle * (1 - middle) / max(1.0, prompts))):
        yield f"The held-out accuracy fell from {high:.3f} at step {best} to {low:.3f} at step {last}."


def _of_the_last_steps(newest: Sequence[Values]) -> Iterator[str]:
    if not newest:
        return
    if all(values.get("truncated") == 1.0 for values in newest):
        yield f"No answer of the last {len(newest)} steps ended by itself: all were cut at rollout.max_new_tokens."
    equal = [values["groups_without_signal"] for values in newest if "groups_without_signal" in values]
    exact = fmean(values.get("exact", 0.0) for values in newest)
    if equal and fmean(equal) > MOST_GROUPS and exact < MOSTLY_RIGHT:
        yield (
            f"In {fmean(equal):.0%} of the groups of the last {len(newest)} steps all rewards were equal, with "
            f"{exact:.0%} of the answers right: there was almost no learning signal."
        )


STEPS = 20  # in a row with all answers cut, or most groups with equal rewards, after which a line says so


class SignalWatch:
    """Checks the trainer's records as they arrive.

    A warning comes after ``steps`` train steps in a row. ``max_new_tokens`` is the limit of an answer, in
    tokens, which the text of the warning names.
    """

    def __init__(self, *, steps: int = STEPS, max_new_tokens: int) -> None:
        self._steps = steps
        self._max_new_tokens = max_new_tokens
        self._newest = -1
        self._truncated = self._equal = 0  # number of newest steps in a row

    def lines(self, records: Iterable[MetricRecord]) -> list[str]:
        """Takes new records, in order, and returns one line for each condition that has now lasted ``steps`` steps.

        A condition that ends and begins again is reported again.
        """
        warnings = []
        for record in records:
            if is_resume(record):
                self._newest, self._truncated, self._equal = record.step - 1, 0, 0
            elif record.source == ACTOR and record.step > self._newest:
                self._newest = record.step
                values = record.values
                self._truncated = self._truncated + 1 if values.get("truncated") == 1.0 else 0
                self._equal = self._equal + 1 if values.get("groups_without_signal", 0.0) > MOST_GROUPS else 0
                if self._truncated == self._steps:
                    warnings.append(self._truncated_line())
                if self._equal == self._steps:
                    warnings.append(self._equal_line(exact=values.get("exact", 0.0)))
        return warnings

    def _when(self) -> str:
        return f"for {self._steps} train steps, to step {self._newest}"

    def _truncated_line(self) -> str:
        return (
            f"All answers were cut at rollout.max_new_tokens={self._max_new_tokens} {self._when()}: no reward saw a "
            "whole answer. Raise rollout.max_new_tokens, or check whether the model's end tokens are those with which "
            "its chat template ends an answer."
        )

    def _equal_line(self, *, exact: float) -> str:
        if exact >= MOSTLY_RIGHT:
            cause = (
                f"{exact:.0%} of the answers are right, so there is little left to learn from these prompts. Use "
                "harder prompts, or end the run here."
            )
        else:
            cause = (
                "such a group has no advantage and no gradient. Try algo=dapo, which skips such groups, a larger "
                "algo.group_size, a higher rollout.temperature, other prompts, or a reward with more grades."
            )
        return f"In most groups all rewards were equal {self._when()}: {cause}"
