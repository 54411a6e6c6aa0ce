"""Plays environments with a scripted player, whose games are the demonstrations of a builtin model's warm start.

The player makes the mistakes that GRPO is to remove. The environment itself writes the openings and the observations,
and `TurnTokens` joins them to the answers, so the model sees the tokens of a run.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relax_core.config.choices import CALCULATOR, NUMBER_GUESS
from relax_core.contracts.env import EnvSpec, EpisodeStart, InteractionConfig
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.tool_calls.tool_parsers import read_action, tool_parser
from relax_core.data.turn_tokens import TurnTokens
from relax_core.registry import find_env

CONSISTENT = 0.5  # share of guesses that agree with all answers of the game before
CALLED = 0.3  # share of games in which the player calls the calculator

# Returns the player's next answer. The texts are the opening, an answer, an observation, an answer and so on.
Player = Callable[[random.Random, Sequence[str]], str]
TrainedIds = tuple[list[int], list[bool]]  # the token ids of a game, and whether the player wrote each


def guess(rng: random.Random, texts: Sequence[str]) -> str:
    """Returns a number from 1 to 7: in half of the cases one that the answers so far leave, else any."""
    lowest, highest = 1, 7
    if rng.random() < CONSISTENT:
        for said, answer in zip(texts[1::2], texts[2::2], strict=True):
            if answer == "higher":
                lowest = max(lowest, int(said) + 1)
            else:
                highest = min(highest, int(said) - 1)
        if lowest > highest:  # an earlier guess that was not consistent has left nothing
            lowest, highest = 1, 7
    return str(rng.randint(lowest, highest))


def calculate(rng: random.Random, texts: Sequence[str]) -> str:
    """Returns a call of the calculator in `CALLED` of the games and then its result, else the product at once."""
    a, b = (int(number) for number in re.findall(r"\d+", texts[0]))
    if len(texts) > 1:
        return f"it is {texts[-1]}"
    if rng.random() < CALLED:
        return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return f"it is {a * b}"


PLAYERS: Mapping[str, Player] = {NUMBER_GUESS: guess, CALCULATOR: calculate}


def played_games(task: str, *, tokenizer: PromptTokenizer, seeds: Sequence[int], seed: int) -> list[TrainedIds]:
    """Returns the games of the env with the name ``task``, one for each number of ``seeds``.

    ``seed`` and the number determine what the player draws.
    """
    env = find_env(task)
    config = env.config(name=task)
    assert isinstance(config, InteractionConfig)

    async def play() -> list[TrainedIds]:
        return [
            await _game(env, config, tokenizer, number, random.Random(f"{task}/{seed}/{number}")) for number in seeds
        ]

    return asyncio.run(play())


async def _game(
    env: EnvSpec, config: InteractionConfig, tokenizer: PromptTokenizer, number: int, rng: random.Random
) -> TrainedIds:
    assert env.open is not None
    row = {"prompt": "", "answer": "", "seed": number}
    tools: Any = list(env.tools(row, config)) if env.tools is not None else []
    parser = tool_parser(config.tool_parser, template=tokenizer.template) if tools else "none"
    game = env.open(EpisodeStart(row=row, group_seed=0, episode_seed=0), config)
    opening = list(await _awaited(game.format_observation(await _awaited(game.reset()))))
    between = TurnTokens(tokenizer, opening, tools=tools or None)
    ids = tokenizer.encode(opening, tools=tools or None)
    trained, texts = [False] * len(ids), [str(opening[-1]["content"])]
    while True:
        texts.append(PLAYERS[config.name](rng, texts))
        answer = [*tokenizer.encode_plain(texts[-1]), tokenizer.stop_token_ids[0]]
        step = await _awaited(game.step(read_action(texts[-1], stopped=True, parser=parser)))
        if step.done:
            await _awaited(game.close())
            return ids + answer, trained + [True] * len(answer)
        messages = list(await _awaited(game.format_observation(step.observation)))
        texts.append(str(messages[-1]["content"]))
        before = len(ids) + len(answer)
        ids, _ = between.next_prompt(ids, answer, messages)
        trained += [True] * len(answer) + [False] * (len(ids) - before)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
