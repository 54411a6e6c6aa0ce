"""Tests rewards by row and by weight: the choice for a row, weighted sums, and refused settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.plugin_types import plugin_config
from relax_core.config.reward_choice import RewardChoice
from relax_core.contracts.data import BadRow
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.plan.data_check import summarize_data
from relax_core.preflight import CHECKS, plugin_problems
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_pool import RewardPool

LONG_S = 60.0
NONE = """
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "none"
    only: str = ""

def score(given, config):
    if given.response == "memory":
        bytearray(int(config.memory_gib * 2**30))
    if config.only and given.response != config.only:
        return RewardOutput(reward=None, reason="not mine")
    return RewardOutput(reward=0.5, parts={"own": 2.0})

SPEC = RewardSpec(name="none", summary="s", config=Config, score=score, isolated=ISOLATED)
"""


def plugin(folder: Path, *, isolated: bool = False) -> str:
    path = folder / f"none_{isolated}.py"
    path.write_text(NONE.replace("ISOLATED", str(isolated)))
    return str(path)


def choice(reward: str, **values: Any) -> RewardChoice:
    return RewardChoice(find_reward(reward), plugin_config("reward", reward, values, section="reward"))


def scored(
    reward: str, row: Mapping[str, Any], *responses: str, answer: str = "42", **values: Any
) -> list[RewardOutput]:
    config = plugin_config("reward", reward, {"max_failed": 1.0, **values}, section="reward")
    given = [RewardInput(response=text, stopped=True, answer=answer, row=row) for text in responses]
    with RewardPool(find_reward(reward), config, workers=1, concurrency=4) as pool:
        return asyncio.run(pool.score(given))


SUM = [{"reward": "exact_match", "weight": 0.75}, {"reward": "format_think", "weight": 0.25, "opened": True}]


def test_a_sum_has_its_parts_and_their_reasons() -> None:
    right, both, neither = scored("mix", {}, "42", "x</think>42", "no", parts=SUM)
    assert (right.reward, right.exact) == (0.75, True)
    assert right.parts == {"exact_match": 1.0, "format_think": 0.0}
    assert (both.reward, both.exact) == (0.25, False), "`exact` comes from the first part"
    assert neither.reward == 0.0
    assert "exact_match: 'no' against '42'" in neither.why and "format_think: it has no </think>" in neither.why


def test_a_part_without_a_reward(tmp_path: Path) -> None:
    none = {"reward": plugin(tmp_path), "name": "mine", "only": "42", "weight": 2.0}
    exact = {"reward": "exact_match"}
    kept, dropped = scored("mix", {}, "42", "7", parts=[exact, none])
    assert kept.reward == 2.0 and kept.parts == {"exact_match": 1.0, "mine": 0.5, "mine_own": 2.0}
    assert dropped.reward is None and dropped.reason == "mine: not mine"
    kept, left_out = scored("mix", {}, "42", "7", parts=[exact, none | {"optional": True}])
    assert kept.reward == 2.0
    assert left_out.reward == 0.0 and left_out.parts == {"exact_match": 0.0}
    (nothing,) = scored("mix", {}, "7", parts=[none | {"optional": True}])
    assert nothing.reward is None and "no part of reward.parts" in nothing.reason


def test_a_part_scores_the_rows_that_it_is_for() -> None:
    parts = [
        {"reward": "exact_match", "when": {"kind": "short"}},
        {"reward": "f1", "when": {"kind": ["long", "longer"]}, "weight": 2},
    ]
    assert scored("mix", {"kind": "short"}, "42", parts=parts)[0].parts == {"exact_match": 1.0}
    assert scored("mix", {"kind": "longer"}, "42", parts=parts)[0].reward == 2.0
    (none,) = scored("mix", {"kind": "other"}, "42", parts=parts)
    assert none.reward is None


def test_a_row_names_its_reward() -> None:
    by = {"by": "scorer", "parts": [{"reward": "dapo", "strict": True}]}
    (own,) = scored("exact_match", {}, "42", **by)
    assert own.parts == {"exact_match": 1.0}
    (f1,) = scored("exact_match", {"scorer": "f1"}, "the 42", **by)
    assert (f1.reward, f1.parts) == (1.0, {"f1": 1.0})
    strict, loose = scored("exact_match", {"scorer": "dapo"}, "\\boxed{42}", "Answer: 42", **by)
    assert (strict.reward, loose.reward) == (1.0, -1.0)
    assert strict.parts == {"dapo": 1.0, "dapo_right": 1.0}
    (unknown,) = scored("exact_match", {"scorer": "no_such"}, "42", **by)
    assert unknown.reward is None and "no_such is not known" in unknown.reason


def test_isolated_rewards_of_a_run_share_their_processes(tmp_path: Path) -> None:
    """A reward that is named only by a data row is imported at first use."""
    isolated = plugin(tmp_path, isolated=True)
    values = {"by": "scorer", "parts": [{"reward": isolated}], "max_failed": 1.0}
    config = plugin_config("reward", "exact_match", values, section="reward")

    async def score_all(pool: RewardPool) -> list[RewardOutput]:
        rows: list[Mapping[str, Any]] = [{}, {"scorer": isolated}, {"scorer": "math"}, {"scorer": isolated}]
        of_rows = [[RewardInput(response="42", stopped=True, answer="42", row=row)] * 2 for row in rows]
        return [output for of_row in await asyncio.gather(*map(pool.score, of_rows)) for output in of_row]

    with RewardPool(find_reward("exact_match"), config, workers=1) as pool:
        outputs = asyncio.run(score_all(pool))
        assert [output.reward for output in outputs] == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5]
        assert len(pool._workers) == 1


def test_an_isolated_reward_has_a_limit_of_memory(tmp_path: Path) -> None:
    name = plugin(tmp_path, isolated=True)
    before, much, after = scored(name, {}, "42", "memory", "42", memory_gib=0.5)
    assert (before.reward, after.reward) == (0.5, 0.5)
    assert much.reward is None and much.reason == "it needs more memory than reward.memory_gib=0.5"


@pytest.mark.parametrize(
    ("reward", "values", "message"),
    [
        ("mix", {}, r"reward.parts=\[\]: reward=mix is made of other rewards"),
        ("mix", {"parts": [{"weight": 1}]}, r"reward.parts\[0\]={'weight': 1}: it names no reward"),
        ("mix", {"parts": [{"reward": "no_such"}]}, r"reward.parts\[0\]: reward.name=no_such is not known"),
        ("mix", {"parts": [{"reward": "f1", "weight": float("nan")}]}, r"parts\[0\].weight=nan: a weight is a finite"),
        ("mix", {"parts": [{"reward": "f1", "weight": "much"}]}, r"parts\[0\].weight=much"),
        ("mix", {"parts": [{"reward": "f1", "by": "scorer"}]}, r"parts\[0\].by=scorer: a part is one reward"),
        ("mix", {"parts": [{"reward": "f1", "when": "math"}]}, r"parts\[0\].when=math: write columns"),
        ("mix", {"parts": [{"reward": "f1", "optional": "yes"}]}, r"parts\[0\].optional=yes: use true or false"),
        ("mix", {"parts": [{"reward": "f1"}, {"reward": "f1"}]}, r"parts\[1\]: f1 occurs twice"),
        (
            "mix",
            {"parts": [{"reward": "mix", "parts": [{"reward": "f1"}]}]},
            r"parts\[0\].parts=.*one reward by itself",
        ),
        ("mix", {"parts": [{"reward": "mix"}]}, r"parts\[0\].reward=mix: it is made of parts itself"),
        ("mix", {"parts": [{"reward": "repetition", "max_penalty": 1.0}]}, r"parts\[0\]: reward.max_penalty=1.0"),
        ("mix", {"parts": [{"reward": "f1"}], "by": "scorer"}, "reward.by=scorer with reward=mix"),
        ("f1", {"parts": [{"reward": "f1"}]}, "reward.parts with reward=f1, which is not made of parts"),
        ("f1", {"parts": [{"reward": "dapo", "weight": 2}], "by": "scorer"}, "dapo has weight, when or optional"),
    ],
)
def test_what_is_refused(reward: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choice(reward, **values)


def test_a_setting_that_a_part_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"reward.parts\[0\].strikt is not a setting of dapo. Nearest: .*strict"):
        choice("mix", parts=[{"reward": "dapo", "strikt": True}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"scorer": "no_such"}, "f.jsonl, line 3: scorer: reward.name=no_such is not known"),
        ({"scorer": 7}, "line 3: scorer=7 is not a name of a reward"),
        ({"scorer": "/tmp/mine.py"}, "line 3: scorer=/tmp/mine.py: a row cannot name a file"),
        ({"scorer": "mix"}, "line 3: scorer=mix: it is made of other rewards"),
        ({"scorer": "remote"}, "line 3: scorer=remote: reward.url=''.*stand in reward.parts"),
        ({"scorer": "dapo"}, "line 3: reward dapo: answer='red' is not a number"),
        ({"scorer": "gpqa", "choices": ["a", "b"]}, "line 3: reward gpqa: answer='red' is none of the letters A, B"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRow, match=message) as found:
        choice("exact_match", by="scorer").check_row({"answer": "red", **row}, "f.jsonl, line 3")
    assert found.value.reason in ("bad_row:reward", "bad_row:label")


def test_rows_are_checked_before_the_start(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+1", "answer": "2", "scorer": "dapo"}, {"prompt": "2+2", "answer": "four", "scorer": "dapo"}]
    rows += [{"prompt": "red?", "answer": "red", "scorer": "exact"}, {"prompt": "ok", "answer": "ok"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data=file", f"data.path={data}", "reward=exact_match", "reward.by=scorer", "eval.every=0"]
    words += ["data.eval_size=0", "model.task=arithmetic"]
    look = summarize_data(load_config([*words, "data.max_bad_rows=0.6"]))
    assert dict(look.bad) == {"bad_row:label": 1, "bad_row:reward": 1}
    assert f"{data}, line 2: reward dapo: answer='four' is not a number" in look.named[0]
    assert f"{data}, line 3: scorer: reward.name=exact is not known" in look.named[1] and "exact_match" in look.named[1]
    refused = summarize_data(load_config(words)).refused
    assert refused is not None and "line 2: reward dapo: answer='four'" in refused
    assert plugin_problems(load_config([*words, "data.max_bad_rows=0.6"])) == []


def test_the_keys_are_checked_with_the_configuration() -> None:
    for words, told in (
        (["reward=mix"], "reward.parts=[]"),
        (["reward=f1", "reward.memory_gib=0"], "reward.memory_gib=0.0: must be more than 0 GiB"),
        (["reward=f1", "reward.by=scorer"], "reward.by=scorer with data.task=reverse_digits"),
    ):
        with pytest.raises(ConfigError) as refused:
            load_config(words, checks=CHECKS)
        assert told in str(refused.value)
