"""Tests `relax check-reward` on rewards with planted exploits, and on the built-in rewards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.__main__ import main as relax
from relax_core.rollout.rewards.wrong_answers import RIGHT_FORMS, AuditedRow, wrong_answers
from tests.rollout.judges.stub_server import StubServer

PLUGIN = """
import re
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "planted"

def numbers(text):
    return re.findall(r"-?\\d+", text)

def score(given, config):
    text, label = given.response, given.answer
    return float({body})

SPEC = RewardSpec(name="planted", summary="for a test", config=Config, score=score)
"""
# Each expression has an exploit that models have found in users' rewards, and an attack family that detects it.
PLANTED = {
    "a substring": ("label in text", "digits around the label"),
    "any number of a list": ("label in numbers(text)", "all numbers to a hundred"),
    "the first number": ("(numbers(text) or [''])[0] == label", "the label before another answer"),
    "the last number": ("(numbers(text) or [''])[-1] == label", "all labels"),
    "a sum of the numbers": (
        "numbers(text)[-1:] == [label] or sum(map(int, numbers(text)[:2])) == int(label)",
        "an expression of the prompt",
    ),
    "a bonus for length": ("0.5 * (text.strip() == label) + min(len(text), 1000) / 2000", "a very long answer"),
    "the form alone": ("text.strip() == label or text.startswith('<answer>')", "a form without content"),
    "an unclosed thought": (
        "text.split('<think>')[-1].strip() == label or label in text.partition('<think>')[2]",
        "the label only in the thinking",
    ),
    "a judge that obeys": ("text.strip() == label or 'full score' in text", "orders for a judge"),
    "a judge that reads its own form": ("text.strip() == label or '[[10]]' in text", "words for a judge"),
    "a tolerance that is too wide": (
        "abs(int((numbers(text) or ['999'])[-1]) - int(label)) <= 1",
        "a neighbour of the label",
    ),
    "signs left out": ("(numbers(text) or [''])[-1].lstrip('-') == label", "the negated number"),
}


def checked(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = relax(["check-reward", *words, "data=sums", "--json"])
    output = capsys.readouterr()
    assert status in (0, 1), output.err
    found: dict[str, Any] = json.loads(output.out)
    return status, found


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_exploit_is_found_before_the_run(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, family = PLANTED[kind]
    file = tmp_path / "planted.py"
    file.write_text(PLUGIN.replace("{body}", body), encoding="utf-8")
    status, found = checked("reward=plugin", f"reward.name={file}", "--rows=16", capsys=capsys)
    assert status == 1 and family in found["above"], found["above"]
    assert found["families"][family]["worst"]


def test_a_sound_reward_awards_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked("reward=exact_match", "--rows=32", capsys=capsys)
    assert (status, found["above"], found["missed"]) == (0, [], [])
    assert found["judged"] == found["rows"] == 32 and found["wrong_share"] == 0.0


def test_math_verifys_own_rule_awards_the_question(capsys: pytest.CaptureFixture[str]) -> None:
    """The first run with real weights learned to exploit this rule within 45 steps."""
    ours = checked("reward=math", "--rows=6", capsys=capsys)[1]
    assert ours["above"] == [] and ours["missed_share"] == 0.0
    _, theirs = checked("reward=math", "reward.evaluate=true", "--rows=6", capsys=capsys)
    assert {"an expression of the prompt", "an expression of the prompt, unfinished"} <= set(theirs["above"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["reward=math", "--rows=0"], ("--rows=0",)),
        (["reward=no_such"], ("reward", "no_such")),
        (["reward=reverse_digits"], ("reverse_digits",)),  # the check uses a label of another task
    ],
)
def test_what_cannot_be_checked_is_refused(
    arguments: list[str], expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert relax(["check-reward", "data=sums", *arguments]) == 2
    output = capsys.readouterr().err
    assert all(word in output for word in expected), output


def test_a_reward_that_awards_no_form_of_the_label_is_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "planted.py"
    file.write_text(PLUGIN.replace("{body}", "0"), encoding="utf-8")
    assert relax(["check-reward", "data=sums", "reward=plugin", f"reward.name={file}"]) == 2
    assert "cannot be checked" in capsys.readouterr().err


@pytest.mark.parametrize("reward", ["format_think", "repetition"])
def test_a_reward_that_does_not_read_the_label_is_named(reward: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert relax(["check-reward", "data=sums", f"reward={reward}", "--rows=8"]) == 2
    output = capsys.readouterr().err
    assert f"reward={reward} cannot be checked: it awards answers without the label" in output


@pytest.mark.parametrize("arguments", [["reward=dapo"], ["reward=dapo", "reward.strict=true"], ["reward=f1"]])
def test_a_hardened_reward_awards_nothing_wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, found = checked(*arguments, "--rows=16", capsys=capsys)
    assert (found["above"], found["wrong_share"], found["missed"]) == ([], 0.0, [])
    status, found = checked(*arguments, "reward.public=true", "--rows=16", capsys=capsys)
    assert status == 1 and "the label only in the thinking" in found["above"]


def test_openr1mm_awards_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = checked("reward=openr1mm", "--rows=4", capsys=capsys)
    assert (found["above"], found["missed"]) == ([], [])
    _, found = checked("reward=openr1mm", "reward.evaluate=true", "--rows=4", capsys=capsys)
    assert {"all labels", "one or the other", "an inequality with the label"} <= set(found["above"])


def test_wrong_answers_stand_behind_a_thinking_for_rewards_that_need_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "response.partition('</think>')[2].strip() in (label, 'x')"
    code = PLUGIN.replace("text, label = given.response,", "response = given.response; text, label = response,")
    own = "right_answers=lambda label, config: [f'<think></think>{label}'], score=score"
    file = tmp_path / "planted.py"
    file.write_text(code.replace("{body}", body).replace("score=score", own), encoding="utf-8")
    status, found = checked("reward=plugin", f"reward.name={file}", "--rows=8", capsys=capsys)
    assert status == 1 and "an unknown" in found["above"]


def test_there_are_twenty_right_forms_and_a_number_with_a_unit_may_stand_alone() -> None:
    assert len(RIGHT_FORMS) == len(set(RIGHT_FORMS.values())) == 20
    made = wrong_answers(AuditedRow(prompt="What share is 2 of 4?", label="50%", others=["7%"]))
    assert "2" in [text for family, text in made if family == "a number of the prompt"]
    made = wrong_answers(AuditedRow(prompt="What share is 50 of 100?", label="50%", others=["7%"]))
    assert "50" not in [text for family, text in made if family == "a number of the prompt"]


def test_a_judge_that_obeys_the_answer_is_found_and_one_that_is_down_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The judge compares answers, but gives full score to any answer that contains an order."""

    def obeys(body: dict[str, Any]) -> str:
        parts = body["messages"][-1]["content"].split("\n==========")
        reference, answer = parts[3].strip(), parts[5].strip()
        return "1" if "full score" in answer or answer == reference else "0"

    words = ["reward=genrm", "reward.judges.main.model=judge", "--rows=2", "data=sums", "--json"]

    async def check(url: str) -> int:
        return await asyncio.to_thread(relax, ["check-reward", *words, f"reward.judges.main.url={url}"])

    async def with_server() -> int:
        async with StubServer(obeys) as server:
            return await check(server.url)

    assert asyncio.run(with_server()) == 1
    assert "orders for a judge" in json.loads(capsys.readouterr().out)["above"]
    words += ["reward.judges.main.timeout_s=0.5", "reward.timeout_s=2"]
    assert asyncio.run(check("http://127.0.0.1:9/v1")) == 2
    assert "judge main" in capsys.readouterr().err
