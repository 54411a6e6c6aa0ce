r"""Computes DAPO's math reward, +1 or -1: compares the last line "Answer: …" with an integer label.

Source: ``compute_score`` of slime (slime/rollout/rm_hub/math_dapo_utils.py), which is the same as verl's. Only the last
300 characters of the response are read. The answer is the text from the last "Answer:" (case is ignored) to the end of
the line, in Minerva's normal form. This form removes articles, units, ``$``, ``\text`` and thousands separators, and
writes ``\frac12`` with braces. Of an equation it keeps the text after the last ``=``. The answer is right if its text
is the label's integer: 42.0 is wrong. With ``strict``, the answer is the last ``\boxed{}`` in the last 100 characters,
and its text must equal the label.

Departures. A label that is not an integer gives no reward, and the data check reports its row before the run starts.
The source raises an error or drops the part after the decimal point. An integer is read exactly; the source rounds it
to a float. Commas are removed only where they separate thousands: "1, 3" is not 13.

Further departures apply unless ``public`` is set. Text inside the thinking is not an answer, and a response with an
unclosed ``<think>`` has no answer. The source reads the text after any ``=``. Of a line with ``$`` it reads only the
first formula. So it accepts "x<=64", "x = 63 or x = 64" and "not $64$" as 64. Here the line must name the integer as
the only answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import answer_after_thinking, boxed_answers, last_boxed, named_answers
from rewards.mathematics.literals import stands_alone

_READ, _READ_STRICT = 300, 100  # characters at the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{2,3})*,[0-9]{3}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_SPECIAL_TOKENS = re.compile(r"<\|[a-z_]{1,20}\|>")
_RELATION = re.compile(r"[<>≤≥≠≈]|!=|\\(?:leq?|geq?|neq?|lt|gt|approx|not)(?![A-Za-z])")
_ALTERNATIVE = re.compile(r"\b(?:or|nor|not|either|neither|never|between)\b|n['’]t\b", re.IGNORECASE)
_NEXT_EQUATION = re.compile(r"=[^=]*(?:,(?![0-9]{3})|;|\band\b)", re.IGNORECASE)
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_LEFT_OUT = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
    *("<|im_end|>", "<|endoftext|>"),
)
_PATTERNS = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


@dataclass(frozen=True)
class DapoConfig(RewardConfig):
    r"""Holds the settings of the reward. ``strict`` compares the text of the last ``\boxed{}``.

    With ``public``, the thinking and the text after any ``=`` are also read, as in the source.
    """

    name: str = "dapo"
    strict: bool = False
    public: bool = False


def score(given: RewardInput, config: DapoConfig) -> RewardOutput:
    """Returns 1 for the right answer, else -1, or None if the label is not an integer. The part ``right`` is 1 or 0."""
    text = given.response if config.public else answer_after_thinking(given.response) or ""
    text, why = text[-_READ:], ""
    if config.strict:
        wanted, found = given.answer, last_boxed(text[-_READ_STRICT:])
    else:
        try:
            wanted = _label(given.answer)
        except ValueError as error:
            return RewardOutput(reward=None, reason=str(error))
        answers = _ANSWER.findall(text)
        found = minerva_form(answers[-1]) if answers else None
        if found == wanted and not config.public:
            why = _not_the_only_answer(answers[-1], wanted)
    exact = found == wanted and not why
    return RewardOutput(
        reward=1.0 if exact else -1.0,
        exact=exact,
        parts={"right": float(exact)},
        answer=found or "",
        why=why or compared(found, wanted),
    )


def _not_the_only_answer(line: str, wanted: str) -> str:
    """Returns the reason why the line does not name the integer as the only answer, or "" if it does."""
    line = _SPECIAL_TOKENS.sub("", line)
    if _RELATION.search(line):
        return f"{line[:60]!r} has a relation that is not an equality"
    front = line.rpartition("=")[0]
    if _ALTERNATIVE.search(line) or _NEXT_EQUATION.search(front) or not stands_alone(wanted, line):
        return f"{line[:60]!r} names the answer among others, or denies it"
    return ""


def minerva_form(text: str) -> str:
    """Returns the normal form of a final answer of at most `_READ` characters."""
    text = text.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _LEFT_OUT:
        text = text.replace(word, "")
    for pattern, new in _PATTERNS:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return text.strip()


def _label(label: str) -> str:
    """Returns a label as the text of an integer. Raises ValueError if the label is not an integer."""
    last = label.rpartition("=")[2]
    if len(last) > _READ or not _NUMBER.fullmatch(form := minerva_form(last)):
        raise ValueError(
            f"answer={label[:60]!r} is not a number, and dapo needs integer labels. Correct it, or use reward=math for "
            "formulas, and reward=exact_match or f1 for words."
        )
    if (number := Fraction(form)).denominator != 1:
        raise ValueError(
            f"answer={label[:60]!r} is not an integer, and dapo needs integer labels. Use reward=math, or strict=true."
        )
    if len(digits := str(number.numerator)) > _READ:
        raise ValueError(f"answer={label[:60]!r} has more digits than dapo reads of a response, {_READ}. Correct it.")
    return digits


def right_answers(label: str, config: DapoConfig) -> list[str]:
    """Returns the right answer for a label: in the line "Answer: …", or with ``strict`` in a box."""
    return boxed_answers(label) if config.strict else [f"Answer: {answer}" for answer in named_answers(label)]


def check_row(row: Mapping[str, Any], config: DapoConfig) -> None:
    """Raises ValueError if the label is not an integer. ``strict`` accepts every label."""
    if not config.strict:
        _label(str(row["answer"]))


SPEC = RewardSpec(
    name="dapo",
    shadow="final_answer",
    summary="DAPO's rule: +1 or -1 by the last line Answer: …, or strictly by the last box",
    config=DapoConfig,
    score=score,
    check_row=check_row,
    right_answers=right_answers,
)
