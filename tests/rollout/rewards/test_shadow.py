"""Tests the shadow reward: the scored answers, the metrics of a run, and refused settings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relax_core.config.plugin_types import plugin_config
from relax_core.config.reward_choice import RewardChoice
from relax_core.contracts.reward import UNCONFIRMED, RewardConfig, RewardInput, RewardOutput
from relax_core.contracts.tree import group_uid, sample_uid
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_failures import RewardsFailed
from relax_core.rollout.rewards.reward_pool import RewardPool

LOOSE = """
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "loose"

SPEC = RewardSpec(
    name="loose", summary="1 if the label stands in the response", config=Config, shadow="final_answer",
    score=lambda given, config: float(given.answer in given.response),
)
"""


@pytest.fixture
def loose(tmp_path: Any) -> str:
    path = tmp_path / "loose.py"
    path.write_text(LOOSE, encoding="utf-8")
    return str(path)


def settings(name: str, **values: Any) -> RewardConfig:
    found: RewardConfig = plugin_config("reward", name, values, section="reward")
    return found


def scored(config: RewardConfig, responses: list[str], *, uid: str, label: str = "84") -> list[RewardOutput]:
    row = {"prompt": "What is 72 + 12?", "answer": label}
    inputs = [
        RewardInput(response=text, stopped=True, answer=label, row=row, uid=uid and sample_uid(uid, number))
        for number, text in enumerate(responses)
    ]
    with RewardPool(find_reward(config.name), config, workers=1) as pool:
        return asyncio.run(pool.score(inputs))


def test_the_gap_says_which_answers_the_reward_alone_finds_right(loose: str) -> None:
    outputs = scored(settings(loose, shadow_share=1.0), ["84", "83 84 85", "12"], uid=group_uid(0))
    assert [output.reward for output in outputs] == [1.0, 1.0, 0.0], "the shadow never changes a reward"
    assert [output.parts for output in outputs] == [
        {"shadow": 1.0, "shadow_gap": 0.0},
        {"shadow": 0.0, "shadow_gap": 1.0},
        {"shadow": 0.0, "shadow_gap": 0.0},
    ]


def test_a_share_of_the_groups_is_scored_always_the_same_and_evaluations_as_a_whole(loose: str) -> None:
    config = settings(loose, shadow_share=0.25)
    found = [scored(config, ["84"], uid=group_uid(index))[0].parts is not None for index in range(200)]
    assert 30 < sum(found) < 70
    assert found == [scored(config, ["84"], uid=group_uid(index))[0].parts is not None for index in range(200)]
    assert all(scored(config, ["84"], uid=f"eval/{index}")[0].parts for index in range(20))


def test_a_label_that_the_shadow_cannot_judge_has_no_shadow(loose: str) -> None:
    (output,) = scored(settings(loose, shadow_share=1.0), ["x^2"], uid=group_uid(0), label="x^2")
    assert (output.reward, output.parts) == (1.0, None)


def test_mask_drops_what_the_shadow_denies_in_every_group_and_never_ends_the_run(loose: str) -> None:
    config = settings(loose, on_hack="mask", shadow_share=0.01, max_failed=0.0)
    row = {"prompt": "What is 72 + 12?", "answer": "84"}
    with RewardPool(find_reward(loose), config, workers=1) as pool:
        for index in range(40):
            inputs = [
                RewardInput(response=text, stopped=True, answer="84", row=dict(row), uid=f"{group_uid(index)}.{number}")
                for number, text in enumerate(("84", "83 84 85"))
            ]
            right, denied = asyncio.run(pool.score(inputs))
            assert right.reward == 1.0
            assert (denied.reward, denied.cause) == (None, UNCONFIRMED)
    (evaluated,) = scored(config, ["83 84 85"], uid="eval/3")
    assert evaluated.reward == 1.0, "an evaluation reports both"


def test_a_reward_that_fails_still_ends_the_run_with_a_mask(tmp_path: Any) -> None:
    path = tmp_path / "broken.py"
    path.write_text(LOOSE.replace("float(given.answer in given.response)", "None"), encoding="utf-8")
    config = settings(str(path), on_hack="mask", max_failed=0.1)
    given = [
        RewardInput(response="84", stopped=True, answer="84", row={"answer": "84"}, uid=f"{group_uid(index)}.0")
        for index in range(20)
    ]

    async def score_all(pool: RewardPool) -> None:
        for given_input in given:
            await pool.score([given_input])

    with RewardPool(find_reward(str(path)), config, workers=1) as pool, pytest.raises(RewardsFailed):
        asyncio.run(score_all(pool))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("math", {"shadow": "math"}, "reward.shadow=math"),
        ("math", {"shadow": "no_such"}, "reward.shadow"),
        ("math", {"shadow": {"reward": "final_answer", "weight": 0.5}}, "weight"),
        ("math", {"shadow": {"reward": "final_answer", "no_such": 1}}, "no_such"),
        ("math", {"shadow": 3}, "reward.shadow=3"),
        ("math", {"shadow": "env"}, "reward.shadow=env"),
        ("math", {"shadow": "mix"}, "reward.shadow"),
        ("exact_match", {"on_hack": "mask"}, "reward.on_hack=mask"),
        ("exact_match", {"shadow": None, "on_hack": "halt"}, "reward.on_hack=halt"),
    ],
)
def test_a_shadow_that_makes_no_sense_is_refused(name: str, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        RewardChoice(find_reward(name), settings(name, **values))


def test_the_same_reward_with_other_settings_is_a_shadow() -> None:
    choice = RewardChoice(find_reward("math"), settings("math", evaluate=True, shadow="math"))
    assert choice.shadow is not None and choice.shadow.spec.name == "math"
    parts = [{"reward": "math", "weight": 0.9}, {"reward": "format_think", "weight": 0.1}]
    mixed = RewardChoice(find_reward("mix"), settings("mix", parts=parts))
    assert mixed.shadow is not None and mixed.shadow.spec.name == "final_answer", "the default shadow of the first part"
    assert RewardChoice(find_reward("exact_match"), settings("exact_match")).shadow is None
