"""Tests that verdict parsers return a verdict only if it is complete."""

from __future__ import annotations

import pytest

from relax_core.contracts.judge import JudgeConfig
from relax_core.registry import find_reward
from relax_core.rollout.judges.judge_prompts import verdict_parser


def preset(form: str) -> str:
    spec = find_reward("genrm")
    assert spec.judges is not None
    config = spec.config(name="genrm", form=form, judges={"main": JudgeConfig(model="m")})  # type: ignore[call-arg]
    return spec.judges(config).judges["main"].parse


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("1", 1.0),
        (" 0\n", 0.0),
        ("**1**", 1.0),
        ("Verdict: 1.", 1.0),
        ("The two agree.\n1", 1.0),
        ("<think>0? No.</think>\n1", 1.0),
        ("10", None),
        ("1.5", None),
        ("-1", None),
        ("0.1", None),
        ("1/10", None),
        ("1%", None),
        ("There is 1 mistake in it.", None),
        ("2", None),
        ("", None),
        ("<think>1", None),
        ("0\nFinal verdict: 1", 1.0),
    ],
)
def test_one_or_zero_stands_alone(text: str, verdict: float | None) -> None:
    assert verdict_parser(preset("consistency"))(text, False) == verdict


@pytest.mark.parametrize(
    ("form", "text", "verdict"),
    [
        ("pairwise", "A", 1.0),
        ("pairwise", "b", 0.0),
        ("pairwise", "Answer: tie", 0.5),
        ("pairwise", "A good answer", None),
        ("rubric", "Yes.", 1.0),
        ("rubric", "no", 0.0),
        ("rubric", "not at all", None),
    ],
)
def test_the_other_presets_have_words(form: str, text: str, verdict: float | None) -> None:
    assert verdict_parser(preset(form))(text, False) == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("7", 0.7), ("10", 1.0), ("0", 0.0), ("2.5", 0.25), ("11", None), ("-1", None), ("7/10", None), ("7 of 10", None)],
)
def test_a_number_is_the_whole_text_and_becomes_0_to_1(text: str, verdict: float | None) -> None:
    assert verdict_parser("number 0..10")(text, False) == verdict


def test_a_part_of_a_word_or_number_is_no_verdict_of_a_users_pattern() -> None:
    read = verdict_parser(r"(?P<verdict>\d)")
    assert read("I say 4", False) == 4.0
    assert [read(text, False) for text in ("10", "x4", "4th", "3.14", "4,5", "1-4", "3:2")] == [None] * 7
    assert verdict_parser(r"(?i)(?P<verdict>yes|no)")("yesterday", False) is None


def test_a_verdict_at_the_end_of_a_cut_text_may_be_longer() -> None:
    read = verdict_parser(r"(?P<verdict>\d+)")
    assert read("verdict 1", True) is None and read("1 is my verdict beca", True) == 1.0
    assert verdict_parser("number 0..100")("1", True) is None


@pytest.mark.parametrize("parse", ["(?P<verdict>", "(yes|no)", "number", "number 1..1", "number 5..1", "number a..b"])
def test_a_wrong_parser_is_refused_with_an_example(parse: str) -> None:
    with pytest.raises(ValueError, match=r"Write such as|See Python"):
        verdict_parser(parse)
