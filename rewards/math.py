r"""Right or wrong by math-verify: the response's ``\boxed{}``, or its last expression, against the reference answer.

math-verify parses with sympy, which can run for ever or fail on odd input: so this reward is isolated.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

_BOXED = "\\boxed{"
_FINAL_ANSWER_MARK = "####"  # GSM8K writes its worked solution, this mark, then the answer


@dataclass(frozen=True)
class MathConfig(RewardConfig):
    name: str = "math"
    timeout_s: float = 5.0


def prepare() -> None:
    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeout is off; ours is on


def score(given: RewardInput, config: MathConfig) -> RewardOutput:
    """1 if the response's answer equals the reference, else 0; also 0 where it has no answer, or an answer cut off by
    the token limit. None where the reference cannot be read. Raises whatever math-verify raises."""
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
    """The answer as it stands in the response. math-verify gives the parsed expression first; to write that out again
    could take as long as to compute it."""
    return "".join(next((one for one in reversed(found) if isinstance(one, str)), "").split())


def _delimited(answer: str) -> str:
    """math-verify finds LaTeX only between delimiters; a bare reference gets them."""
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
