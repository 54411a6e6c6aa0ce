"""Dynamic sampling: an algorithm drops groups without a training signal, and new groups replace the dropped groups.

Source: DAPO (arXiv 2503.14476, section 3.2). `complete_group` applies the filter when a group has all of its rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relax_core.contracts.tree import Episode

MAX_TRUNCATED_IN_A_ROW = 64  # the run ends after so many consecutive groups with only cut responses


class GroupFilter:
    """Applies an algorithm's `drop_group`, and counts the dropped groups since the last kept group.

    ``parts`` names the parts of a reward that is a sum of parts. The filter compares only one part: the first part that
    all samples have. This part says whether an answer is exact; with the other parts, wrong answers would have
    different numbers.
    """

    def __init__(self, drop_group: Callable[[Sequence[float], int], str | None], *, parts: Sequence[str] = ()) -> None:
        self._drop_group = drop_group
        self.parts = parts
        self._dropped_in_a_row = 0

    def __call__(self, rewards: Sequence[float]) -> str | None:
        """Returns why a group with these rewards is dropped, or None to keep it."""
        reason = self._drop_group(rewards, self._dropped_in_a_row)
        self._dropped_in_a_row = 0 if reason is None else self._dropped_in_a_row + 1
        return reason


def compared_numbers(episodes: Sequence[Episode], parts: Sequence[str]) -> list[float]:
    """Returns the compared number of each episode; see `GroupFilter`."""
    for label in parts:
        if all(label in episode.parts for episode in episodes):
            return [episode.parts[label] for episode in episodes]
    return [episode.reward for episode in episodes if episode.reward is not None]


class TruncatedGroups:
    """Counts consecutive groups in which all responses were cut at ``max_new_tokens``, with rollout.mask_truncated."""

    def __init__(self, max_new_tokens: int) -> None:
        self._max_new_tokens = max_new_tokens
        self._in_a_row = 0

    def record(self, truncated: bool) -> None:
        """Records whether all responses of a group were cut.

        Raises ValueError after `MAX_TRUNCATED_IN_A_ROW` consecutive groups with only cut responses, because the run
        would sample without end and never train.
        """
        self._in_a_row = self._in_a_row + 1 if truncated else 0
        if self._in_a_row >= MAX_TRUNCATED_IN_A_ROW:
            raise ValueError(
                f"rollout.mask_truncated=true: every response of {MAX_TRUNCATED_IN_A_ROW} groups in a row was cut at "
                f"rollout.max_new_tokens={self._max_new_tokens}, so there is nothing to train on. "
                "Raise rollout.max_new_tokens, or use rollout.mask_truncated=false."
            )
