"""Tests the label check: it reports labels that get no reward when used as the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.config.plugin_types import plugin_config
from relax_core.config.reward_choice import RewardChoice
from relax_core.registry import find_reward
from relax_core.rollout.rewards.label_check import LabelCheck, label_shape

ODD = ["18 dollars", "\\$18.90"]


def notes(name: str, labels: list[str], **settings: Any) -> list[str]:
    config = plugin_config("reward", name, {"name": name, **settings}, section="reward")
    check = LabelCheck(RewardChoice(find_reward(name), config))
    for line, label in enumerate(labels, start=1):
        check.add({"prompt": "p", "answer": label}, f"a.jsonl, line {line}")
    return check.describe()


def test_math_is_asked_about_one_label_of_each_form() -> None:
    good = [str(number) for number in range(40)] + [
        "\\frac{1}{2}",
        "x^2 + 1",
        "1,234",
        "(1, 2)",
        "so 5 + 6 = 11\n#### 11",
    ]
    assert notes("math", good) == []
    head, *named = notes("math", [*good, "5 cm", "A", "B", "18 dollars"])
    assert head.startswith("reward math does not award") and "their form: 3." in head
    assert "line 47: answer='A', and 'The answer is A.' gets 0." in named[0]
    assert "line 49: answer='18 dollars', and '\\boxed{18}' gets 0." in named[1]


@pytest.mark.parametrize(
    ("name", "settings", "label", "message"),
    [
        ("dapo", {}, "\\$18.90", "'Answer: "),
        ("exact_match", {}, "6 * 7 = 42\n#### 42", "'42' gets 0"),
        ("deepeyes", {}, "word " * 80, "gets -0.2"),
        ("mix", {"parts": [{"reward": "exact_match", "name": "text"}]}, "\\boxed{3}", "'3' gets 0"),
    ],
)
def test_a_label_that_is_no_plain_answer_is_named(
    name: str, settings: dict[str, Any], label: str, message: str
) -> None:
    head, named = notes(name, ["5", label, "7"], **settings)
    assert "their form: 1." in head and "a.jsonl, line 2" in named and message in named


def test_rewards_that_award_every_label_are_not_asked() -> None:
    for name in ("f1", "multiple_choice", "gpqa", "format_think"):
        assert notes(name, ODD) == []
    assert notes("exact_match", [*ODD, "A", "50%", "Monday"]) == []


@pytest.mark.parametrize(
    ("answers", "message"), [("1 / 0", "ZeroDivisionError"), ("5", "returned 5"), ("[None]", "None")]
)
def test_right_answers_that_give_no_texts_are_refused(tmp_path: Path, answers: str, message: str) -> None:
    (tmp_path / "own.py").write_text(
        "from relax_core.contracts.reward import RewardConfig, RewardSpec\n"
        "SPEC = RewardSpec(name='own', summary='s', config=RewardConfig, score=lambda given, config: 1.0,\n"
        f"    right_answers=lambda label, config: {answers})\n"
    )
    with pytest.raises(ValueError, match=f"right_answers.*{message}"):
        notes(str(tmp_path / "own.py"), ["7"])


def test_numbers_and_words_make_no_form() -> None:
    assert label_shape("Monday") == label_shape("two big  cats") == "aa"
    assert [label_shape("18 dollars"), label_shape("7 cm")] == ["0 dollars", "0 cm"]
    assert [label_shape(label) for label in ("-3.5", "A", "\\frac{1}{22}")] == ["-0.0", "a", "\\frac{0}{0}"]
