"""Tests the games of a warm start: they have a run's tokens, and a player with mistakes that RL can improve."""

from __future__ import annotations

import random
import re

import pytest

from relax_core.contracts.tool_calls import tool_schema
from relax_core.data.chat_template import check_template_shows_tools
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.tool_parsers import AUTO, read_action, tool_parser
from relax_core.tools.tiny_text import CALLED, guess, played_games, tiny_prompt_tokenizer

GAMES = 400
END = "<|im_end|>"


@pytest.fixture(scope="module")
def tools_tokenizer() -> PromptTokenizer:
    return tiny_prompt_tokenizer(tools=True)


def answers(tokenizer: PromptTokenizer, ids: list[int], trained: list[bool]) -> list[str]:
    """Returns the answers of a game's player."""
    text = tokenizer.decode([token for token, own in zip(ids, trained, strict=True) if own])
    assert text.endswith(END)
    return text.split(END)[:-1]


def test_a_game_has_the_tokens_of_the_whole_conversation() -> None:
    tokenizer = tiny_prompt_tokenizer()
    for ids, trained in played_games("number_guess", tokenizer=tokenizer, seeds=range(GAMES), seed=1):
        parts = re.split(r"<\|im_start\|>(\w+)\n", tokenizer.decode(ids))[1:]
        conversation = [
            {"role": role, "content": text.strip("\n").removesuffix(END)}
            for role, text in zip(parts[::2], parts[1::2], strict=True)
        ]
        assert tokenizer.encode(conversation)[: len(ids)] == ids
        said = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert answers(tokenizer, ids, trained) == said and 1 <= len(said) <= 3


def test_half_of_the_guesses_heed_the_answers() -> None:
    draw = random.Random(0)
    later = [int(guess(draw, ["", "4", "higher"])) for _ in range(4000)]
    assert sum(number > 4 for number in later) / len(later) == pytest.approx(0.5 + 0.5 * 3 / 7, abs=0.03)
    assert {int(guess(draw, ["", "7", "higher"])) for _ in range(200)} == set(range(1, 8)), (
        "with no number left, any number is guessed"
    )


def test_the_player_calls_the_calculator_seldom_and_then_says_its_result(tools_tokenizer: PromptTokenizer) -> None:
    called = 0
    for ids, trained in played_games("calculator", tokenizer=tools_tokenizer, seeds=range(GAMES), seed=1):
        said = answers(tools_tokenizer, ids, trained)
        a, b = map(int, re.findall(r"\d+", tools_tokenizer.decode(ids).split("user\n")[1])[:2])
        assert said[-1] == f"it is {a * b}"
        if len(said) == 2:
            called += 1
            (call,) = read_action(said[0], stopped=True, parser="hermes", tools=[]).tool_calls
            assert call.arguments == {"a": a, "b": b}
    assert called / GAMES == pytest.approx(CALLED, abs=0.07)


def test_the_template_of_the_model_with_tools_shows_them(tools_tokenizer: PromptTokenizer) -> None:
    def add(first: int) -> int:
        """Adds one."""
        return first + 1

    check_template_shows_tools(tools_tokenizer)
    assert tool_parser(AUTO, template=tools_tokenizer.template) == "hermes"
    shown = tools_tokenizer.render([{"role": "user", "content": "1?"}], tools=[tool_schema(add)])
    assert "add(first): Adds one." in shown
    with pytest.raises(ValueError, match=r"env.tools_as=template: .* leaves out the tools .*env.tools_as=text"):
        check_template_shows_tools(tiny_prompt_tokenizer())
