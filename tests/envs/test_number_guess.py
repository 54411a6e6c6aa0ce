"""Tests the number-guessing env and its state keys."""

from __future__ import annotations

import asyncio

from envs.number_guess import SPEC, NumberGuess, NumberGuessConfig
from relax_core.contracts.env import Action, EpisodeStart, StepResult


def played(number: int, *guesses: str) -> list[StepResult]:
    config = NumberGuessConfig(max_turns=len(guesses))
    game = NumberGuess(EpisodeStart(row={"seed": number - 1}, group_seed=0, episode_seed=0), config)
    return [asyncio.run(game.step(Action(text=text, stopped=True))) for text in guesses]


def test_the_state_of_a_turn_is_what_is_still_possible_before_it() -> None:
    steps = played(5, "4", "six?", "7", "3", "6", "5")
    assert [step.state_key for step in steps] == ["1-7", "5-7", "5-7", "5-6", "5-6", "5-5"]
    assert [step.observation for step in steps[:-1]] == ["higher", "no number", "lower", "higher", "lower"]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0] and steps[-1].done
    assert SPEC.state_keys
