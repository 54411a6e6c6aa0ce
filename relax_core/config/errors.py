"""A user's mistake in the configuration, and how it is shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class NotYet(str):
    """A problem that is no mistake: something that Relax cannot do yet, or a value that is still to be given. A start
    is refused with it like with any other; a plan is made, and says it at its top."""

    __slots__ = ()


class ConfigError(ValueError):
    """Everything that is wrong with a configuration. Each problem names the key, the value and the fix."""

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def report(self) -> str:
        """What the user sees: one line for one problem, a list for several."""
        if len(self.problems) == 1:
            return f"relax: {self.problems[0]}"
        lines = [f"relax: {len(self.problems)} problems in the configuration"]
        return "\n".join(lines + [f"  - {problem}" for problem in self.problems])


def nearest(word: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """The choices that look most like ``word`` whatever its case, best first; none when nothing looks like it."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[near] for near in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.7)]
