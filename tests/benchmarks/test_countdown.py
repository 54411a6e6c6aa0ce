"""Tests of the countdown task of `benchmarks.long_tail`: its lengths, prompts and answers, and its reward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest

from benchmarks.countdown_reward import SPEC, CountdownConfig, check_row
from benchmarks.countdown_task import (
    CAP,
    END,
    SHORTEST,
    answer_of,
    check_wish,
    drawn_lengths,
    number_ids,
    prompt_of,
    token_ids,
    wish_of,
    write_rows,
    write_tokenizer,
)
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.data.tokenizer import PromptTokenizer


def scored(prompt: str, response: str, *, stopped: bool = True) -> RewardOutput:
    given = RewardInput(response=response, stopped=stopped, answer="", row={"prompt": prompt})
    assert SPEC.score is not None
    output = SPEC.score(given, CountdownConfig())
    assert isinstance(output, RewardOutput)
    return output


def test_lengths_are_lognormal_and_cut_at_both_ends() -> None:
    lengths = drawn_lengths(20_000, mean=64.0, cap=CAP, seed=0)
    assert min(lengths) == SHORTEST and max(lengths) == CAP
    logarithms = [math.log(one) for one in lengths]
    assert fmean(lengths) == pytest.approx(64.0, rel=0.05)
    assert median(lengths) == pytest.approx(64.0 * math.exp(-0.5), rel=0.05)
    assert pstdev(logarithms) == pytest.approx(1.0, rel=0.05)
    assert lengths == drawn_lengths(20_000, mean=64.0, cap=CAP, seed=0)
    assert lengths != drawn_lengths(20_000, mean=64.0, cap=CAP, seed=1)


@pytest.mark.parametrize(("mean", "cap"), [(64.0, 32), (64.0, CAP + 1), (1.0, CAP)])
def test_lengths_that_the_model_cannot_count_are_refused(mean: float, cap: int) -> None:
    with pytest.raises(ValueError, match=rf"mean={mean:g}, cap={cap}: give"):
        drawn_lengths(1, mean=mean, cap=cap, seed=0)


def test_an_answer_has_the_length_of_the_wish(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [SHORTEST, 5, CAP], seed=0)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(row["answer"].split()) + 1 for row in rows] == [SHORTEST, 5, CAP]
    for row in rows:
        assert row["answer"] == answer_of(row["prompt"])
        assert scored(row["prompt"], row["answer"]) == RewardOutput(reward=1.0, exact=True, parts={"counted": 1.0})
    assert wish_of(prompt_of(138, "blue")) == ("blue", 137)
    assert answer_of("blue 3") == "3b 2b 1b"


@pytest.mark.parametrize("prompt", ["green 3", "red", "red 0", f"red {CAP}", "red x", "137"])
def test_another_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="write a colour"):
        wish_of(prompt)


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


def test_a_cap_below_the_wish_is_refused() -> None:
    check_wish(100, 100)
    check_row({"prompt": "red 99"}, CountdownConfig(cap=100))
    with pytest.raises(ValueError, match=r"rollout.max_new_tokens=100: .* 101 tokens.*Set rollout.max_new_tokens=101"):
        check_row({"prompt": "red 100"}, CountdownConfig(cap=100))


def test_each_number_of_each_colour_is_one_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = PromptTokenizer(tmp_path)
    ids = token_ids()
    assert tokenizer.encode([{"role": "user", "content": "blue 137"}]) == [ids["blue"], ids["137"]]
    assert tokenizer.encode_text("137b 136r") == [ids["137b"], ids["136r"]]
    assert tokenizer.decode([ids["137b"], ids["136r"]]) == "137b 136r"
    assert tokenizer.stop_token_ids == [ids[END]]
    assert [number_ids(kind).start + 7 for kind in range(3)] == [ids["7"], ids["7r"], ids["7b"]]
