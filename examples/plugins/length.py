"""A reward of 1 for an answer with exactly ``target`` characters."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec


@dataclass(frozen=True)
class LengthConfig(RewardConfig):
    name: str = "length"
    target: int = 5  # characters of the right answer


def check(config: LengthConfig) -> None:
    if config.target < 1:
        raise ValueError(f"reward.target={config.target}: an answer has at least one character. Use 1 or more.")


def score(given: RewardInput, config: LengthConfig) -> RewardOutput:
    right = given.stopped and len(given.response) == config.target
    return RewardOutput(reward=float(right), exact=right, parts={"characters": float(len(given.response))})


SPEC = RewardSpec(
    name="length", summary="1 for an answer of the right length", config=LengthConfig, score=score, check=check
)
