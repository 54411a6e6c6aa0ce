"""Partial credit for an answer of fixed length: how many places are right, and whether the length is."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

_POSITION_SHARE = 0.8
_LENGTH_SHARE = 0.2


@dataclass(frozen=True)
class ReverseDigitsConfig(RewardConfig):
    name: str = "reverse_digits"
    timeout_s: float = 1.0


def score(given: RewardInput, config: ReverseDigitsConfig) -> RewardOutput:
    """0.8 × share of right places + 0.2 × length match; 1 only for the exact answer.

    A response that ran into the token limit counts as one character longer, so it is never exact.
    """
    answer = given.answer
    length = len(given.response) + (0 if given.stopped else 1)
    right = sum(got == wanted for got, wanted in zip(given.response, answer, strict=False)) / len(answer)
    length_match = max(0.0, 1.0 - abs(length - len(answer)) / len(answer))
    exact = given.stopped and given.response == answer
    reward = 1.0 if exact else _POSITION_SHARE * right + _LENGTH_SHARE * length_match
    return RewardOutput(reward=reward, exact=exact, parts={"position": right, "length": length_match})


SPEC = RewardSpec(
    name="reverse_digits",
    summary="share of right places and of right length, 1 only when exact",
    config=ReverseDigitsConfig,
    score=score,
)
