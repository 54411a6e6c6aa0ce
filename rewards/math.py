r"""Right or wrong by math-verify: the response's ``\boxed{}``, or its last expression, against the reference answer.

math-verify parses with sympy, which can hang or fail on odd input. Therefore this reward runs in its own process. It
also evaluates text; `no_evaluation` replaces the parts that do, and refuses the rest.

With ``rule=boxed`` the rule is that of ``math`` in slime and verl (slime/rollout/rm_hub/math_utils.py,
``grade_answer_verl``): the last box, by MATH's normal form or by `rewards.mathematics.sympy_equality`, where 2/4 is not
1/2; a response without a box is wrong. There, too, a label without an answer gives no reward, where the source gives 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics import sympy_equality
from rewards.mathematics.boxed import boxed_answers, boxed_label, last_boxed
from rewards.mathematics.no_evaluation import evaluates_no_text

_BOXED = "\\boxed{"
_FINAL_ANSWER_MARK = "####"  # a GSM8K answer is the worked solution, this mark and the final answer


@dataclass(frozen=True)
class MathConfig(RewardConfig):
    """Holds the settings of the math reward; ``rule`` is math_verify or boxed."""

    name: str = "math"
    rule: str = "math_verify"


def prepare() -> None:
    """Imports math-verify before the first answer is scored, because the import takes seconds."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns that its own timeout is off


@evaluates_no_text
def score(given: RewardInput, config: MathConfig) -> RewardOutput:
    """Returns 1 if the response's answer equals the reference, else 0, and None if the reference cannot be parsed.

    By math-verify the reward is also 0 for a response that the token limit cut before a boxed answer. Raises what
    math-verify raises.
    """
    if config.rule == "boxed":
        return _score_boxed(given)
    from math_verify import parse, verify

    reference = parse(_delimited(given.answer), parsing_timeout=None, raise_on_error=True)
    if not reference:
        return RewardOutput(reward=None, reason=f"math-verify cannot read the reference answer {given.answer[:60]!r}")
    if not given.stopped and _BOXED not in given.response:
        return RewardOutput(reward=0.0, answer="")
    found = parse(given.response, parsing_timeout=None, raise_on_error=True)
    exact = bool(found) and verify(reference, found, timeout_seconds=None, raise_on_error=True)
    written = _written(found)
    return RewardOutput(
        reward=float(exact), exact=exact, answer=written, why=compared(written or None, _delimited(given.answer))
    )


def _score_boxed(given: RewardInput) -> RewardOutput:
    wanted = boxed_label(given.answer)
    if wanted is None:
        return RewardOutput(reward=None, reason=_unreadable(given.answer))
    found = last_boxed(given.response, also_without_brace=True)
    exact = found is not None and sympy_equality.is_equal(found, wanted)
    return RewardOutput(reward=float(exact), exact=exact, answer=found or "", why=compared(found, wanted))


def _unreadable(label: str) -> str:
    return f"answer={label[:60]!r} has no answer to compare with"


def check_row(row: Mapping[str, Any], config: MathConfig) -> None:
    """Raises ValueError for a label that is empty, or whose box is."""
    label = str(row["answer"])
    if boxed_label(label) is None if config.rule == "boxed" else not label.strip():
        raise ValueError(f"{_unreadable(label)}. Give the answer.")


def right_answers(label: str, config: MathConfig) -> list[str]:
    """Returns the answer of a label in a box; by math-verify a word or a letter also in a sentence, without a box."""
    alone = [f"The answer is {label}."] if config.rule == "math_verify" and label.replace(" ", "").isalpha() else []
    return [*boxed_answers(label), *alone]


def check(config: MathConfig) -> None:
    """Raises ValueError for an unknown rule, and if the package is missing that rule=boxed reads LaTeX with."""
    if config.rule not in ("math_verify", "boxed"):
        raise ValueError(f"reward.rule={config.rule}: use math_verify or boxed.")
    if config.rule == "boxed":
        sympy_equality.check_package(config.name)


def _written(found: list[object]) -> str:
    """Returns the answer as it stands in the response.

    math-verify puts the parsed expression first; to print that expression could take as long as to compute it.
    """
    return "".join(next((one for one in reversed(found) if isinstance(one, str)), "").split())


def _delimited(answer: str) -> str:
    """Returns the reference answer between LaTeX delimiters, which math-verify needs."""
    answer = answer.rpartition(_FINAL_ANSWER_MARK)[2].strip()
    return answer if "$" in answer or _BOXED in answer else f"${answer}$"


SPEC = RewardSpec(
    name="math",
    summary="right or wrong by math-verify, in a killable worker",
    config=MathConfig,
    score=score,
    isolated=True,
    check=check,
    check_row=check_row,
    right_answers=right_answers,
    prepare=prepare,
)
