r"""Right or wrong by math-verify: the response's ``\boxed{}``, or its last expression, against the reference answer.

math-verify parses with sympy, which can hang or fail on odd input. Therefore this reward runs in its own process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

_BOXED = "\\boxed{"
_FINAL_ANSWER_MARK = "####"  # a GSM8K answer is the worked solution, this mark and the final answer


@dataclass(frozen=True)
class MathConfig(RewardConfig):
    """Holds the settings of the math reward; ``timeout_s`` is the limit per answer in seconds."""

    name: str = "math"
    timeout_s: float = 5.0


def prepare() -> None:
    """Imports math-verify before the first answer is scored, because the import takes seconds."""
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns that its own timeout is off


def score(given: RewardInput, config: MathConfig) -> RewardOutput:
    """Returns 1 if the response's answer equals the reference, else 0, and None if the reference cannot be parsed.

    The reward is also 0 for a response that the token limit cut before a boxed answer. Raises what math-verify raises.
    """
    from math_verify import parse, verify

    reference = parse(_delimited(given.answer), parsing_timeout=None, raise_on_error=True)
    if not reference:
        return RewardOutput(reward=None, reason=f"math-verify cannot read the reference answer {given.answer[:60]!r}")
    if not given.stopped and _BOXED not in given.response:
        return RewardOutput(reward=0.0, answer="")
    found = parse(given.response, parsing_timeout=None, raise_on_error=True)
    exact = bool(found) and verify(reference, found, timeout_seconds=None, raise_on_error=True)
    return RewardOutput(reward=float(exact), exact=exact, answer=_written(found))


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
    prepare=prepare,
)
