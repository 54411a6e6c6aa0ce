"""Defines a user's mistake in the configuration, and how it is shown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from relax_core.config.redaction import shown

_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class NotYet(str):
    """Is a problem that is no mistake: something that is not built yet, or a value that is not given yet.

    A start is refused as with any other problem. A plan is made and shows the problem at its top.
    """

    __slots__ = ()


class ConfigError(ValueError):
    """Holds everything that is wrong with a configuration. Each problem names the key, the value and the fix.

    Secrets of the command line are taken out of the problems, and control characters are shown by code.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems
        shown_problems = [type(one)(_printable(shown(one))) for one in dict.fromkeys(problems)]
        super().__init__("\n".join(shown_problems))
        self.problems = shown_problems

    def report(self) -> str:
        """Returns what the user sees: one line for one problem, a list for several."""
        if len(self.problems) == 1:
            return f"relax: {self.problems[0]}"
        lines = [f"relax: {len(self.problems)} problems in the configuration"]
        return "\n".join(lines + [f"  - {problem}" for problem in self.problems])


def _printable(text: str) -> str:
    """Returns a text that a terminal shows as it is: control and direction characters become their codes."""
    return _ODD.sub(lambda found: repr(found[0])[1:-1], text)


def either(choices: Sequence[object]) -> str:
    """Returns choices in words, such as "1, 2 or 4"."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(word: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """Returns the choices that resemble ``word`` most, ignoring case, best first, or none if no choice resembles it.

    A choice of the same letters in another order is the best.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    swapped = [choice for choice in by_lower if sorted(choice) == sorted(word.lower())]
    near = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.7)
    return [by_lower[one] for one in dict.fromkeys([*swapped, *near])][:count]
