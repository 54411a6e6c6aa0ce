"""Defines the error for mistakes in the configuration, and the report of this error to the user."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from relax_core.config.redaction import shown

_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class NotYet(str):
    """Marks a problem that is not a mistake, such as a missing feature or a value that is not set yet.

    Such a problem prevents a start. A plan is still made, and the plan begins with the problem.
    """

    __slots__ = ()


class ConfigError(ValueError):
    """Holds all problems of a configuration. Each problem names the key, the value and the fix.

    Secrets of the command line are redacted, and control characters are replaced by their codes.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        assert problems
        shown_problems = [type(problem)(_printable(shown(problem))) for problem in dict.fromkeys(problems)]
        super().__init__("\n".join(shown_problems))
        self.problems = shown_problems

    def report(self) -> str:
        """Returns the text for the user: one line for a single problem, or a list of problems."""
        if len(self.problems) == 1:
            return f"relax: {self.problems[0]}"
        lines = [f"relax: {len(self.problems)} problems in the configuration"]
        return "\n".join(lines + [f"  - {problem}" for problem in self.problems])


def _printable(text: str) -> str:
    """Returns the text with control and direction characters replaced by their codes."""
    return _ODD.sub(lambda found: repr(found[0])[1:-1], text)


def either(choices: Sequence[object]) -> str:
    """Returns the choices as text, such as "1, 2 or 4"."""
    *earlier, last = map(str, choices)
    return f"{', '.join(earlier)} or {last}" if earlier else last


def nearest(word: str, choices: Iterable[str], *, count: int = 3) -> list[str]:
    """Returns up to ``count`` choices that are similar to ``word``, ignoring case, most similar first.

    A choice with the same letters in another order is first.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    swapped = [choice for choice in by_lower if sorted(choice) == sorted(word.lower())]
    near = difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.7)
    return [by_lower[lowered] for lowered in dict.fromkeys([*swapped, *near])][:count]
