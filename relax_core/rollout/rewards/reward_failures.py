"""Counts answers and groups without a reward, and ends the run after too many of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

from relax_core.contracts.reward import UNCONFIRMED, RewardConfig, RewardInput, RewardOutput

WINDOW_ROWS = 64  # the share of failures is over the answers to so many newest data rows
FEWEST_ROWS = 8  # a single data row with only failures must not end the run
LOGGED = 20  # number of failures that are logged
log = logging.getLogger(__name__)


class RewardsFailed(ValueError):
    """Reports that too many answers or groups had no reward; the text names the first cause."""


class RewardFailures:
    """Counts answers without a reward over the newest `WINDOW_ROWS` data rows."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._rows: deque[tuple[Mapping[str, object], list[bool]]] = deque(maxlen=WINDOW_ROWS)
        self._first = ""
        self._count = 0

    @property
    def share(self) -> float:
        """Returns the share of answers without a reward over the newest data rows; 0 before the first answer."""
        flags = [flag for _, flags in self._rows for flag in flags]
        return sum(flags) / len(flags) if flags else 0.0

    def record(self, given: RewardInput, output: RewardOutput, error: BaseException | None = None) -> None:
        """Records one scored answer; ``error`` is the reward's exception in this process.

        The answers to one data row must be recorded one after the other. Raises `RewardsFailed` if `share` is above
        ``reward.max_failed`` and at least `FEWEST_ROWS` rows were recorded.
        """
        if not self._rows or self._rows[-1][0] is not given.row:
            self._rows.append((given.row, []))
        failed = output.reward is None and output.cause != UNCONFIRMED  # reward.on_hack=mask drops such answers
        self._rows[-1][1].append(failed)
        if not failed:
            return
        self._count += 1
        which = ", ".join(word for word in (given.uid and f"sample {given.uid}", given.where) if word)
        cause = (output.reason or "the reward returned None without a reason") + (f" ({which})" if which else "")
        self._first = self._first or cause
        if self._count <= LOGGED:
            log.warning("no reward, the sample is dropped: %s", cause, exc_info=error)
        if len(self._rows) < FEWEST_ROWS or self.share <= self._config.max_failed:
            return
        raise RewardsFailed(
            f"reward {self._config.name}: {self.share:.0%} of the answers to the newest {len(self._rows)} data "
            f"rows have no reward, more than reward.max_failed={self._config.max_failed:g}. The first: "
            f"{self._first}. Correct the reward or the data, or raise reward.max_failed."
        ) from error


class FailedGroups:
    """Counts consecutive groups without any reward.

    Each such group is replaced at once. So without a limit, a run with a tool or an env that always fails would sample
    without end and never train.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._in_a_row = 0
        self._first = ""

    def record(self, failures: Sequence[str | None], *, where: str) -> None:
        """Records the answers of one group; ``where`` names the group's data row in errors.

        ``failures`` has the reason why an answer has no reward, or None for an answer with a reward. Raises
        `RewardsFailed` with the first cause after ``most`` consecutive groups without any reward.
        """
        if None in failures:
            self._in_a_row = 0
            return
        if not self._in_a_row:
            reasons = [reason for reason in failures if reason] or ["the reward returned None without a reason"]
            self._first = f"{reasons[0]} ({where})"
        self._in_a_row += 1
        if self._most is not None and self._in_a_row >= self._most:
            raise RewardsFailed(
                f"no answer of {self._in_a_row} groups in a row has a reward, so there is nothing to train on. "
                f"The first: {self._first}. Correct the env, its tools or the reward."
            )
