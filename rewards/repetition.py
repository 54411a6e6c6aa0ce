"""Computes a penalty for repeated n-grams of words: from 0 without repetition to ``max_penalty``.

Source: ``get_repetition_penalty_reward`` of open-r1 (src/open_r1/rewards.py), after Demystifying Long Chain-of-Thought
Reasoning (arXiv 2502.03373): (1 - different n-grams / all n-grams) × ``max_penalty``, over lower-case words separated
by white space. A response with fewer words than ``ngram_size`` gets 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec


@dataclass(frozen=True)
class RepetitionConfig(RewardConfig):
    """Holds the settings of the reward: the number of words in an n-gram, and the reward of pure repetition."""

    name: str = "repetition"
    ngram_size: int = 3
    max_penalty: float = -1.0


def score(given: RewardInput, config: RepetitionConfig) -> RewardOutput:
    """Returns the penalty, from ``max_penalty`` to 0. It is exact if no n-gram is repeated."""
    words = given.response.lower().split()
    grams = list(zip(*(words[start:] for start in range(config.ngram_size)), strict=False))
    different = len(set(grams))
    share = 1 - different / len(grams) if grams else 0.0
    why = f"{different} of {len(grams)} sequences of {config.ngram_size} words are different"
    return RewardOutput(reward=share * config.max_penalty, exact=share == 0, answer=None, why=why)


def check(config: RepetitionConfig) -> None:
    """Raises ValueError for n-grams without words and for a penalty above 0."""
    if config.ngram_size < 1:
        raise ValueError(f"reward.ngram_size={config.ngram_size}: use at least 1 word.")
    if not (math.isfinite(config.max_penalty) and config.max_penalty <= 0):
        raise ValueError(f"reward.max_penalty={config.max_penalty}: a penalty is a finite number and not above 0.")


SPEC = RewardSpec(
    name="repetition",
    summary="a penalty, down to -1, for repeated sequences of words",
    config=RepetitionConfig,
    score=score,
    check=check,
)
