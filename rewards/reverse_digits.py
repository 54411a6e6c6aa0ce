"""Gives partial credit for an answer of fixed length: the share of right characters and the length match."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.reward import OFF, RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

_POSITION_SHARE = 0.8
_LENGTH_SHARE = 0.2


@dataclass(frozen=True)
class ReverseDigitsConfig(RewardConfig):
    """Holds the settings of the reverse-digits reward. ``timeout_s`` is the limit per answer in seconds."""

    name: str = "reverse_digits"
    timeout_s: float = 1.0
    audit: str = OFF  # partial credit for wrong answers is intended


def score(given: RewardInput, config: ReverseDigitsConfig) -> RewardOutput:
    """Returns 0.8 × share of right characters + 0.2 × length match. Only the exact answer has the reward 1.

    A response that was cut at the token limit is treated as one character longer, so it is never exact.
    """
    answer = given.answer
    response = given.response if given.response == answer else given.before_stop
    length = len(response) + (0 if given.stopped else 1)
    right = sum(got == wanted for got, wanted in zip(response, answer, strict=False)) / len(answer)
    length_match = max(0.0, 1.0 - abs(length - len(answer)) / len(answer))
    exact = given.stopped and response == answer
    reward = 1.0 if exact else _POSITION_SHARE * right + _LENGTH_SHARE * length_match
    parts = {"position": right, "length": length_match}
    return RewardOutput(reward=reward, exact=exact, parts=parts, why=compared(response, answer))


SPEC = RewardSpec(
    name="reverse_digits",
    summary="share of right characters and of right length, 1 only when exact",
    config=ReverseDigitsConfig,
    score=score,
    tasks=("reverse_digits",),
)
