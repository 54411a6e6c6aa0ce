"""Tests the countdown task of `benchmarks.long_tail`: lengths, prompts, answers, reward and env."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest

from benchmarks.countdown_env import Countdown, CountdownEnvConfig, drawn_waits
from benchmarks.countdown_reward import SPEC, CountdownConfig
from benchmarks.countdown_task import (
    CAP,
    END,
    LATER,
    PROMPT_TOKENS,
    SHORTEST,
    answer_of,
    drawn_lengths,
    number_ids,
    prompt_of,
    prompts_of,
    token_ids,
    wish_of,
    write_rows,
    write_tokenizer,
)
from relax_core.contracts.env import Action, EpisodeStart
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens

ROW = {"prompt": "red 4", LATER: ["blue 2", "red 2"], "answer": ""}


def scored(prompt: str, response: str, *, stopped: bool = True) -> RewardOutput:
    given = RewardInput(response=response, stopped=stopped, answer="", row={"prompt": prompt})
    assert SPEC.score is not None
    output = SPEC.score(given, CountdownConfig())
    assert isinstance(output, RewardOutput)
    return output


def test_lengths_are_lognormal_and_cut_at_both_ends() -> None:
    lengths = drawn_lengths(20_000, mean=64.0, cap=CAP, seed=0)
    assert min(lengths) == SHORTEST and max(lengths) == CAP
    logarithms = [math.log(length) for length in lengths]
    assert fmean(lengths) == pytest.approx(64.0, rel=0.05)
    assert median(lengths) == pytest.approx(64.0 * math.exp(-0.5), rel=0.05)
    assert pstdev(logarithms) == pytest.approx(1.0, rel=0.05)
    assert lengths == drawn_lengths(20_000, mean=64.0, cap=CAP, seed=0)
    assert lengths != drawn_lengths(20_000, mean=64.0, cap=CAP, seed=1)


def test_an_answer_has_the_length_of_the_wish(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [[SHORTEST], [5], [CAP]], seed=0)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(row["answer"].split()) + 1 for row in rows] == [SHORTEST, 5, CAP]
    for row in rows:
        assert row.keys() == {"prompt", "answer"} and row["answer"] == answer_of(row["prompt"])
        assert scored(row["prompt"], row["answer"]) == RewardOutput(reward=1.0, exact=True, parts={"counted": 1.0})
    assert wish_of(prompt_of(138, "blue")) == ("blue", 137)
    assert answer_of("blue 3") == "3b 2b 1b"


@pytest.mark.parametrize(
    ("response", "stopped", "reward", "counted"),
    [
        ("4r 3r 2r 1b", True, 0.75, 1.0),
        ("4b 3b 2b 1b", True, 0.0, 1.0),
        ("4r 3r 2r 1r", False, 0.0, 0.0),
        ("4r 3r 2r", True, 0.0, 0.0),
        ("4r 2r 1r", True, 0.0, 0.0),
        ("4r 3r 2r 1r 1r", True, 0.0, 0.0),
        ("", True, 0.0, 0.0),
    ],
)
def test_the_reward_is_the_share_of_colours_of_a_whole_countdown(
    response: str, stopped: bool, reward: float, counted: float
) -> None:
    found = scored("red 4", response, stopped=stopped)
    assert (found.reward, found.exact, found.parts) == (reward, False, {"counted": counted})


def test_a_row_has_the_prompts_of_all_turns(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [[5, 9, 3], [4, 4, 4]], seed=0)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [[wish_of(prompt)[1] + 1 for prompt in prompts_of(row)] for row in rows] == [[5, 9, 3], [4, 4, 4]]


@pytest.mark.parametrize(
    ("turns", "stopped", "reward", "counted"),
    [
        (["4r 3r 2r 1r", "2b 1b", "2r 1r"], True, 1.0, 1.0),
        (["4r 3r 2r 1r", "2b 1r", "2b 1b"], True, 5 / 8, 1.0),
        (["4r 3r 2r", "2b 1b", "2r 1r"], True, 4 / 8, 2 / 3),
        (["4r 3r 2r 1r", "2b 1b"], False, 4 / 8, 1 / 3),
        (["4r 3r 2r 1r"], False, 0.0, 0.0),
        ([""], False, 0.0, 0.0),
    ],
)
def test_the_reward_of_several_turns_is_the_share_of_all_their_colours(
    turns: list[str], stopped: bool, reward: float, counted: float
) -> None:
    given = RewardInput(response=turns[-1], stopped=stopped, answer="", row=ROW, turns=turns)
    assert SPEC.score is not None
    assert SPEC.score(given, CountdownConfig()) == RewardOutput(
        reward=pytest.approx(reward), exact=reward == 1.0, parts={"counted": pytest.approx(counted)}
    )


# -- the env ----------------------------------------------------------------------------------------------------------
def opened(config: CountdownEnvConfig, *, seed: int = 7) -> Countdown:
    return Countdown(EpisodeStart(row=ROW, group_seed=1, episode_seed=seed), config)


def test_the_env_shows_the_prompts_in_order_behind_the_tools_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("benchmarks.countdown_env.asyncio.sleep", sleep)

    async def play() -> None:
        env, action = opened(CountdownEnvConfig(tool_wait_s=0.5)), Action(text="4r", stopped=True)
        assert await env.reset() == "red 4" and slept == []
        steps = [await env.step(action) for _ in range(3)]
        assert [(step.observation, step.done) for step in steps] == [("blue 2", False), ("red 2", False), (None, True)]
        assert [step.reward for step in steps] == [None] * 3

    asyncio.run(play())
    assert slept == drawn_waits(2, mean_s=0.5, seed=7) != drawn_waits(2, mean_s=0.5, seed=8)


def test_the_next_prompt_stands_behind_the_end_of_the_answer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ids, tokenizer = token_ids(), PromptTokenizer(tmp_path)
    between = TurnTokens(tokenizer, [{"role": "user", "content": "red 1"}])
    before, answer = [ids["red"], ids["1"]], [ids["1r"], ids[END]]
    prompt, _ = between.next_prompt(before, answer, [{"role": "user", "content": "blue 2"}])
    assert prompt == [*before, *answer, ids["blue"], ids["2"]]
    assert len(prompt) - len(before) - len(answer) == PROMPT_TOKENS


def test_each_number_of_each_colour_is_one_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = PromptTokenizer(tmp_path)
    ids = token_ids()
    assert tokenizer.encode([{"role": "user", "content": "blue 137"}]) == [ids["blue"], ids["137"]]
    assert tokenizer.encode_text("137b 136r") == [ids["137b"], ids["136r"]]
    assert tokenizer.decode([ids["137b"], ids["136r"]]) == "137b 136r"
    assert tokenizer.stop_token_ids == [ids[END]]
    assert [number_ids(kind).start + 7 for kind in range(3)] == [ids["7"], ids["7r"], ids["7b"]]
