"""Says so when a run trains on nothing for many steps in a row, and what to try."""

from __future__ import annotations

from collections.abc import Iterable

from relax_core.observe.service.records import ACTOR, MetricRecord, is_resume

MOST_GROUPS = 0.5
MOSTLY_RIGHT = 0.5  # share of exact answers from which equal rewards say that the prompts are learnt


class SignalWatch:
    """Looks at the trainer's records as they come. ``steps``: train steps in a row after which a line is told; 0: none
    is. ``max_new_tokens``: where answers are cut, for the words."""

    def __init__(self, *, steps: int, max_new_tokens: int) -> None:
        self._steps = steps
        self._max_new_tokens = max_new_tokens
        self._newest = -1
        self._cut = self._equal = 0  # so many newest steps in a row

    def lines(self, records: Iterable[MetricRecord]) -> list[str]:
        """Takes new records, in order; gives one line for each trouble that has now lasted ``steps`` steps. A trouble
        that ends and comes back is told again."""
        told = []
        for record in records:
            if is_resume(record):
                self._newest, self._cut, self._equal = record.step - 1, 0, 0
            elif record.source == ACTOR and record.step > self._newest and self._steps:
                self._newest = record.step
                values = record.values
                self._cut = self._cut + 1 if values.get("truncated") == 1.0 else 0
                self._equal = self._equal + 1 if values.get("groups_without_signal", 0.0) > MOST_GROUPS else 0
                if self._cut == self._steps:
                    told.append(self._cut_line())
                if self._equal == self._steps:
                    told.append(self._equal_line(exact=values.get("exact", 0.0)))
        return told

    def _when(self) -> str:
        return f"for {self._steps} train steps, to step {self._newest}"

    def _cut_line(self) -> str:
        return (
            f"All answers were cut at rollout.max_new_tokens={self._max_new_tokens} {self._when()}: no reward saw a "
            "whole answer. Raise rollout.max_new_tokens, or look whether the model's end tokens are those with which "
            "its chat template ends an answer."
        )

    def _equal_line(self, *, exact: float) -> str:
        if exact >= MOSTLY_RIGHT:
            cause = (
                f"{exact:.0%} of the answers are right, so there is little left to learn from these prompts. Take "
                "harder ones, or end the run here."
            )
        else:
            cause = (
                "such a group has no advantage and teaches nothing. Try algo=dapo, which leaves such groups out, a "
                "larger algo.group_size, a higher rollout.temperature, other prompts, or a reward with more grades."
            )
        return f"In most groups all rewards were equal {self._when()}: {cause}"
