from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.data import BadRow, DataRow, EvalSet
from relax_core.contracts.engine import SamplingParams
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.engine_pool import EnginePool
from relax_core.observe.event_log import SKELETONS
from relax_core.registry import find_env, find_reward
from relax_core.rollout.episodes.group_player import OneTurnPlayer
from relax_core.rollout.eval_metrics import Answer
from relax_core.rollout.evaluator import (
    EvalRow,
    Evaluator,
    PreparedSet,
    SetAnswers,
    eval_versions,
    evaluation_values,
    play_sets,
    prepare,
    versions_left,
)
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.tools.make_tiny import tiny_model_folder
from tests.contracts.engine.harness import Engine


@pytest.mark.parametrize(
    ("every", "start", "total", "expected"),
    [
        (0, 0, 100, []),
        (50, 0, 100, [0, 50, 100]),
        (50, 0, 120, [0, 50, 100, 120]),
        (50, 30, 120, [30, 50, 100, 120]),  # a resumed run begins with the current version
        (50, 50, 50, [50]),
        (1, 0, 3, [0, 1, 2, 3]),
        (1000, 0, 3, [0, 3]),
    ],
)
def test_versions(every: int, start: int, total: int, expected: list[int]) -> None:
    assert eval_versions(every=every, start=start, total_steps=total) == expected


@pytest.mark.parametrize(
    ("reached", "recorded", "expected"),
    [
        (0, -1, [0, 20, 40]),  # the start of a run
        (13, 0, [20, 40]),
        (13, -1, [13, 20, 40]),  # the first evaluation was interrupted
        (23, 0, [23, 40]),
        (23, 20, [40]),
        (23, 30, [40]),  # a record from before a resume
        (40, 0, [40]),
        (40, 20, [40]),
    ],
)
def test_versions_of_a_worker_that_starts_again(reached: int, recorded: int, expected: list[int]) -> None:
    assert versions_left([0, 20, 40], reached=reached, recorded=recorded) == expected


# -- asking -----------------------------------------------------------------------------------------------------------
CONTEXT = 64


@pytest.fixture(scope="module")
def tiny_folder() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


def rows(start: int, count: int) -> list[DataRow]:
    return [{"prompt": f"rev {start + place}", "answer": str(start + place)[::-1]} for place in range(count)]


def maker(folder: Path) -> PromptMaker:
    env = find_env("single_turn")
    config = env.config(name="single_turn")
    return PromptMaker(env=env, env_config=config, tokenizer=PromptTokenizer(folder), max_prompt_tokens=CONTEXT - 8)


def asked(
    engine: Engine, folder: Path, sets: Sequence[PreparedSet], params: SamplingParams, reward: RewardSpec | None = None
) -> list[SetAnswers]:
    client = engine.new_client()

    async def client_for(place: int, on_policy: bool) -> Any:
        return client

    async def scene(rewards: RewardPool) -> list[SetAnswers]:
        try:
            pool = EnginePool(1, client_for, timeout_s=60.0)
            prompts = maker(folder)
            player = OneTurnPlayer(prompts=prompts, pool=pool, sampling=params)
            return await play_sets(sets, version=0, player=player, prompts=prompts, rewards=rewards, max_bad=0.5)
        finally:
            await client.aclose()

    spec = reward or find_reward("reverse_digits")
    with RewardPool(spec, spec.config(name=spec.name, timeout_s=5.0), workers=1) as rewards:
        return asyncio.run(scene(rewards))


def test_sets_answers_and_what_is_left_out(engine: Engine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluates several sets with one engine: several answers per prompt, too long prompts, and rewards of None."""
    params = SamplingParams(
        n=4, max_new_tokens=8, temperature=1.0, stop_token_ids=maker(tiny_folder).tokenizer.stop_token_ids
    )
    first = prepare(EvalSet(name="", rows=rows(100, 6)), maker(tiny_folder), max_bad=0.05)
    bad = BadRow.because("answer", "rows.jsonl, line 9: answer=None is neither text nor a number.")
    long: DataRow = {"prompt": "rev " + "1 2 " * 50, "answer": "1"}
    second = prepare(EvalSet(name="second", rows=[*rows(500, 5), long], bad=[bad]), maker(tiny_folder), max_bad=0.5)
    assert (len(second.rows), [bad_row.reason for bad_row in second.bad]) == (5, ["bad_row:answer", "too_long"])

    alone = asked(engine, tiny_folder, [first], params)[0]
    both = asked(engine, tiny_folder, [second, first], params)
    assert both[1].answers == alone.answers  # independent of the other sets
    assert [len(of_prompt) for of_prompt in alone.answers] == [4] * 6
    assert len({answer.text for of_prompt in alone.answers for answer in of_prompt}) > 6

    monkeypatch.setattr(OneTurnPlayer, "evaluated_together", 8)
    assert asked(engine, tiny_folder, [second, first], params)[1].answers == alone.answers  # in several calls

    values = evaluation_values(both)
    assert values["second/rows"] == values["rows"] == 5 and values["second/bad_rows"] == values["bad_rows"] == 2
    assert {"exact", "exact/low", "exact/high", "reward", "pass@2", "pass@4", "maj@4", "unscored"} <= values.keys()

    def none_of_the_first(given: RewardInput, config: Any) -> RewardOutput:
        return RewardOutput(reward=None if given.row["prompt"] == "rev 100" else 0.5)

    unscored = asked(
        engine,
        tiny_folder,
        [first],
        params,
        dataclasses.replace(find_reward("reverse_digits"), score=none_of_the_first),
    )[0]
    assert (unscored.unscored, unscored.values()["reward"], unscored.values()["exact"]) == (4, 0.5, 0.0)


def test_a_set_with_too_many_bad_rows_is_refused(tiny_folder: Path) -> None:
    bad = [BadRow.because("prompt", f"rows.jsonl, line {place}: ''") for place in range(2)]
    with pytest.raises(
        ValueError, match=r"eval.sets.gsm: 2 of 22 rows cannot be used, more than data.max_bad_rows=0.05"
    ):
        prepare(EvalSet(name="gsm", rows=rows(100, 20), bad=bad), maker(tiny_folder), max_bad=0.05)
    with pytest.raises(ValueError, match=r"the held-out rows: 1 of 1 rows cannot be used"):
        prepare(EvalSet(name="", rows=[], bad=bad[:1]), maker(tiny_folder), max_bad=0.5)


def test_the_first_sets_figures_have_no_name_and_every_named_sets_have_its_own() -> None:
    def answered(name: str, *exact: bool) -> SetAnswers:
        of_prompts = [
            [Answer(text="", exact=is_exact, reward=1.0, vote="x", cut=False, tokens=1)] for is_exact in exact
        ]
        return SetAnswers(of=PreparedSet(name=name, rows=[], bad=[]), answers=of_prompts)

    values = evaluation_values([answered("a", True, True), answered("b", True, False)])
    assert (values["exact"], values["a/exact"], values["b/exact"]) == (1.0, 1.0, 0.5)
    assert set(evaluation_values([answered("", True)])) == {
        *("exact", "exact/low", "exact/high", "reward", "rows", "bad_rows", "unscored")
    }


def sums(said: str, *, shadow: float) -> SetAnswers:
    """Returns correct answers to 20 sums. In the template ``said``, a and b are the addends and c is the sum."""
    rows, answers = [], []
    for number in range(20):
        a, b = 20 + number, 71 - number // 2
        text = said.replace("a", str(a)).replace("b", str(b)).replace("c", str(a + b))
        rows.append(EvalRow(row={"prompt": f"What is {a} + {b}?", "answer": str(a + b)}, input_ids=[]))
        answers.append([Answer(text=text, exact=True, reward=1.0, vote=None, cut=False, tokens=5, shadow=shadow)])
    return SetAnswers(of=PreparedSet(name="", rows=rows, bad=[]), answers=answers)


@pytest.mark.parametrize("resumed", [False, True])
def test_an_evaluation_names_a_form_that_took_over_and_its_shadow(resumed: bool) -> None:
    found = {0: sums("a + b = c", shadow=1.0), 5: sums("a + b =", shadow=0.0)}
    values: dict[int, Any] = {}
    texts: list[tuple[str, int, Any]] = []

    async def ask(version: int) -> list[SetAnswers]:
        return [found[version]]

    async def reached(version: int) -> None:
        return

    evaluator = Evaluator(
        versions=[5] if resumed else [0, 5],
        ask=ask,
        wait_version=reached,
        in_order=False,
        record=lambda source, version, numbers: values.update({version: numbers}),
        record_texts=lambda kind, version, rows: texts.append((kind, version, rows)),
        first_look=found[0].look() if resumed else None,
    )
    asyncio.run(evaluator.run())
    assert (values[5]["exact"], values[5]["shadow"], values[5]["shadow_gap"]) == (1.0, 0.0, 1.0)
    assert values[5]["skeleton/taken_over"] == 1.0 and values[5]["skeleton/shadow"] == 0.0
    assert [(kind, version) for kind, version, _ in texts][-2:] == [("eval", 5), (SKELETONS, 5)]
    (row,) = texts[-1][2]
    assert row["text"] == "0 + 0 =" and "0 + 0 =" in row["notice"] and row["example"] in row["notice"]
    if not resumed:
        assert "skeleton/taken_over" not in values[0] and values[0]["shadow_gap"] == 0.0
