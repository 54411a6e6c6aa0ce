"""Warns when the data of a run gives no learning signal for many steps in a row, and suggests a change."""

from __future__ import annotations

from collections.abc import Iterable

from relax_core.observe.service.records import ACTOR, MetricRecord, is_resume

MOST_GROUPS = 0.5
MOSTLY_RIGHT = 0.5  # from this share of exact answers on, equal rewards mean that the prompts are learnt


class SignalWatch:
    """Checks the trainer's records as they arrive.

    A warning comes after ``steps`` train steps in a row; with 0 there is none. ``max_new_tokens`` is the limit of an
    answer, in tokens, which the text of the warning names.
    """

    def __init__(self, *, steps: int, max_new_tokens: int) -> None:
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
            elif record.source == ACTOR and record.step > self._newest and self._steps:
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
