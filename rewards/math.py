r"""Scores math answers with math-verify: compares the last ``\boxed{}`` or the last expression with the reference.

Only the text after the last ``</think>`` is read. A response with an unclosed ``<think>`` has no answer. ``\fbox`` is
also a box.

math-verify parses with sympy, and sympy can hang or fail on odd input. Therefore this reward runs in a separate
process. math-verify also evaluates text as code. `no_evaluation` replaces some of these functions and makes all others
raise an error.

``rule=boxed`` is the rule ``math`` of slime and verl (slime/rollout/rm_hub/math_utils.py, ``grade_answer_verl``). It
compares the last box by MATH's normal form or by `rewards.mathematics.sympy_equality`, where 2/4 is not 1/2. A response
without a box is wrong. A label without an answer gives no reward; the source gives 0.

Departures of both rules: boxes inside the thinking are ignored; the sources read them. Further departures correct
errors of math-verify. math-verify joins neighbouring boxes into one answer, reads ``2 2/3`` as 22/3 and
``0.\overline{3}`` as 0, and cannot read ``\boxed{28\%}``. math-verify treats ``10^{-20}`` and ``10^{-21}`` as equal,
because their difference is small (see `rewards.mathematics.magnitude`). Here ``28\%`` and ``28%`` are the same.

If the label is a number, a response that only evaluates to this number is wrong (`rewards.mathematics.literals`): "72 +
12" is not accepted as the answer to "What is 72 + 12?". If only one side has a percent sign, the written numbers are
compared: for the label 84, 84% is right and 8400% is wrong. ``evaluate`` restores math-verify's rule. It accepts any
expression, and it reads a percentage also as a hundredth of its number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics import sympy_equality
from rewards.mathematics.boxed import answer_after_thinking, boxed_answers, boxed_label, framed, last_boxed
from rewards.mathematics.literals import is_literal, is_longer_list, not_written_out, stands_alone
from rewards.mathematics.magnitude import same_size
from rewards.mathematics.no_evaluation import evaluates_no_text

_DOLLAR = re.compile(r"\\?\$")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*percent\s*\}|\bpercent\b)")
_PERCENT_IN_FORMULA = re.compile(r"\s*\\?%\s?(\$(?![\d\\])|\\[)\]])")
_SPACE = r"(?:\s|\\[ ,;:]|~)+"
_MIXED = re.compile(
    rf"(?<![\w.,\\^/}}])(\d{{1,15}}){_SPACE}(\d{{1,15}})\s*/\s*(\d{{1,15}})(?![\d.,]*[\d/^!])", re.ASCII
)
_PERIODIC = re.compile(r"(\d{0,15})\.(\d{0,15})\\overline\s*\{\s*(\d{1,15})\s*\}", re.ASCII)
_FINAL_ANSWER_MARK = "####"  # a GSM8K label is the worked solution, this mark and the final answer


@dataclass(frozen=True)
class MathConfig(RewardConfig):
    """Holds the settings of the math reward. ``rule`` is math_verify or boxed.

    With ``evaluate``, an expression that evaluates to the label's number is also right.
    """

    name: str = "math"
    rule: str = "math_verify"
    evaluate: bool = False


def prepare() -> None:
    """Imports math-verify before the first answer is scored, because the import takes seconds."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns that its timeout is off


@evaluates_no_text
def score(given: RewardInput, config: MathConfig) -> RewardOutput:
    """Returns 1 if the response's answer equals the reference, else 0. Returns None if the reference cannot be parsed.

    With math-verify, the reward is also 0 if the response was cut at the token limit before a boxed answer. Raises the
    errors of math-verify.
    """
    text = answer_after_thinking(given.response)
    boxed = None if text is None else framed(text)
    if config.rule == "boxed":
        row = None if config.evaluate else given.row
        return _score_boxed(framed(given.answer) or given.answer, boxed, row)
    from math_verify import parse

    label = given.answer.rpartition(_FINAL_ANSWER_MARK)[2].replace("\\$", "").strip()
    written_label = last_boxed(framed(label) or "") or label
    label = _as_fractions(written_label)
    if boxed is not None:
        written = _DOLLAR.sub("", last_boxed(boxed) or "").replace("\n", " ")
        text = _as_fractions(written)
        if len(_PERCENT.findall(text)) == len(_PERCENT.findall(label)):
            text, label = _PERCENT.sub("", text), _PERCENT.sub("", label)
        text = _formula(text)
    elif text is None or not given.stopped:
        text = ""
    else:
        text = _as_fractions(_PERCENT_IN_FORMULA.sub(r"\1%", text))
    reference = parse(_formula(label), parsing_timeout=None, raise_on_error=True)
    if not reference:
        return RewardOutput(reward=None, reason=f"math-verify cannot read the reference answer {given.answer[:60]!r}")
    found = parse(text, parsing_timeout=None, raise_on_error=True)
    exact = bool(found) and is_equal(reference, found, evaluate=config.evaluate)
    answer, why = _written(found), ""
    if exact and not config.evaluate:
        why = not_written_out(written if boxed is not None else answer, written_label, given.row)
        if not why and boxed is not None and is_longer_list(written, written_label):
            why = f"{written[:60]!r} names several numbers"
        if not why and boxed is None and is_literal(answer) and not stands_alone(answer, text):
            why = f"{answer!r} is one of several numbers"
        exact = not why
    return RewardOutput(
        reward=float(exact), exact=exact, answer=answer, why=why or compared(answer or None, _formula(label))
    )


def _formula(text: str) -> str:
    """Returns a text between LaTeX delimiters, which math-verify needs.

    A percent sign is moved after the delimiters.
    """
    text = text if "$" in text else f"${_PERCENT.sub('%', text)}$"
    return _PERCENT_IN_FORMULA.sub(r"\1%", text)


def _as_fractions(text: str) -> str:
    r"""Replaces ``2 2/3`` by 8/3 and ``0.\overline{3}`` by 1/3 in a text."""

    def fraction(mixed: re.Match[str]) -> str:
        whole, above, below = map(int, mixed.groups())
        return f"{whole * below + above}/{below}" if above < below else mixed[0]

    def periodic(number: re.Match[str]) -> str:
        whole, behind, period = number.groups()
        above = int(whole + behind + period) - int(whole + behind or "0")
        reduced = Fraction(above, 10 ** len(behind) * (10 ** len(period) - 1))
        return f"\\frac{{{reduced.numerator}}}{{{reduced.denominator}}}"

    return _PERIODIC.sub(periodic, _MIXED.sub(fraction, text))


def is_equal(reference: Sequence[Any], found: Sequence[Any], *, evaluate: bool) -> bool:
    """Returns whether the values that math-verify parsed are equal.

    A percentage is compared by its number: 28% is right for 28, and 8400% is wrong for 84. With ``evaluate``, a
    hundredth of the number is also right.
    """
    numbers = [_without_percent(value[0]) for value in (reference, found)]
    if numbers == [None, None]:
        return _is_same(reference, found)
    plain = [
        [value[0] if number is None else number] for value, number in zip((reference, found), numbers, strict=True)
    ]
    return _is_same(*plain) or (evaluate and None in numbers and _is_same(reference, found))


def _is_same(reference: Sequence[Any], found: Sequence[Any]) -> bool:
    import sympy
    from math_verify import verify

    if isinstance(reference[0], sympy.Basic) and isinstance(found[0], sympy.Basic):
        same = same_size(reference[0], found[0])
        if same is not None:
            return same
    return bool(verify(list(reference), list(found), timeout_seconds=None, raise_on_error=True))


def _without_percent(value: Any) -> Any:
    """Returns the number before a percent sign, parsed by math-verify, or None without a percent sign."""
    import sympy

    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    is_percent = isinstance(value, sympy.Mul) and len(value.args) == 2 and value.args[1] == hundredth
    return value.args[0] if is_percent else None


def _score_boxed(label: str, boxed: str | None, row: Mapping[str, Any] | None) -> RewardOutput:
    """Scores by the rule of slime and verl.

    Without ``row``, an expression that only evaluates to the label is right.
    """
    wanted = boxed_label(label)
    if wanted is None:
        return RewardOutput(reward=None, reason=_unreadable(label))
    found = last_boxed(boxed or "", also_without_brace=True)
    exact = found is not None and sympy_equality.is_equal(found, wanted)
    why = not_written_out(found, wanted, row) if exact and found is not None and row is not None else ""
    exact = exact and not why
    return RewardOutput(reward=float(exact), exact=exact, answer=found or "", why=why or compared(found, wanted))


def _unreadable(label: str) -> str:
    return f"answer={label[:60]!r} has no answer to compare with"


def check_row(row: Mapping[str, Any], config: MathConfig) -> None:
    """Raises ValueError for a label that is empty or has an empty box."""
    label = str(row["answer"])
    if boxed_label(label) is None if config.rule == "boxed" else not label.strip():
        raise ValueError(f"{_unreadable(label)}. Give the answer.")


def right_answers(label: str, config: MathConfig) -> list[str]:
    """Returns right answers for a label: the label in a box.

    For math-verify and a label of only letters, also returns a sentence without a box.
    """
    alone = [f"The answer is {label}."] if config.rule == "math_verify" and label.replace(" ", "").isalpha() else []
    return [*boxed_answers(label), *alone]


def check(config: MathConfig) -> None:
    """Raises ValueError if the rule is unknown, or if the package that parses LaTeX for ``rule=boxed`` is missing."""
    if config.rule not in ("math_verify", "boxed"):
        raise ValueError(f"reward.rule={config.rule}: use math_verify or boxed.")
    if config.rule == "boxed":
        sympy_equality.check_package(config.name)


def _written(found: Sequence[object]) -> str:
    """Returns the answer as written in the response.

    math-verify returns the parsed expression first, but printing an expression could take very long.
    """
    return "".join(next((text for text in reversed(found) if isinstance(text, str)), "").split())


SPEC = RewardSpec(
    name="math",
    shadow="final_answer",
    summary="right or wrong by math-verify, in a killable worker",
    config=MathConfig,
    score=score,
    isolated=True,
    check=check,
    check_row=check_row,
    right_answers=right_answers,
    prepare=prepare,
)
