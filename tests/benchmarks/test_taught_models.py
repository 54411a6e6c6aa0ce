"""Tests the models of `benchmarks.taught_models`: judges pass their test cases, and policies play their games."""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks import taught_models
from benchmarks.judged_digits import other_question
from benchmarks.openai_agent import history
from benchmarks.taught_models import TASKS, guess_example, judgement, pair_of
from relax_core.contracts.judge import JudgeConfig
from relax_core.registry import find_reward
from relax_core.rollout.judges.judge_pool import known_verdicts
from relax_core.rollout.judges.judge_prompts import verdict_parser


def test_a_judge_is_taught_what_is_right_and_its_verdict_can_be_read() -> None:
    assert judgement("54321", "54311") == "55=44=33=21/11= 0"
    assert judgement("54321", "543219") == "55=44=33=22=11=-9/ 0"
    assert judgement("54321", "54321") == "55=44=33=22=11= 1"
    assert judgement("54321", "") == "5-/4-/3-/2-/1-/ 0"
    read = verdict_parser(taught_models.PARSE)
    rng = random.Random(0)
    for task in TASKS:
        for _ in range(200):
            _, answer, response = pair_of(rng, task)
            text = judgement(answer, response)
            assert read(text, False) == float(answer == response) and len(text) < taught_models.MAX_TOKENS


def test_held_out_pairs_are_known_verdicts_of_questions_that_no_judge_was_taught(tmp_path: Path) -> None:
    taught_models.write_known_verdicts(tmp_path / "known.jsonl", {"rev": "a", "inc": "b"})
    known = known_verdicts(str(tmp_path / "known.jsonl"))
    assert len(known) == 512 and 0.3 < sum(verdict.verdict for verdict in known) / 512 < 0.7
    for verdict in known:
        task, digits = str(verdict.row["prompt"]).split(" ")
        assert (
            verdict.verdict == float(verdict.response == TASKS[task](digits))
            and verdict.row["judge"] == "ab"[task == "inc"]
        )
    rng = random.Random(1)
    taught = {pair_of(rng, "rev")[0] for _ in range(2000)}
    assert not taught & {str(verdict.row["prompt"]) for verdict in known}


def test_rows_name_their_judges(tmp_path: Path) -> None:
    taught_models.write_rows(tmp_path / "rows.jsonl", {"rev": "inc", "inc": "rev"}, rows=4, seed=0, held_out=False)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["judge"] for row in rows] == ["inc", "rev"] * 2
    assert all(TASKS[task](digits) == row["answer"] for row in rows for task, digits in [row["prompt"].split(" ")])


def test_the_control_sees_another_question_of_the_task() -> None:
    another = other_question("rev 12345")
    assert another == other_question("rev 12345") != "rev 12345"
    assert another.startswith("rev ") and len(another) == len("rev 12345")


def test_a_taught_guess_is_a_turn_of_the_agents_game() -> None:
    assert history([(4, "higher"), (6, "lower")]) == "guess a number from 1 to 7, so far: 4 higher, 6 lower"
    rng, seen = random.Random(0), set()
    for _ in range(300):
        prompt, said = guess_example(rng)
        seen.add(prompt.count("er"))
        assert prompt.startswith(history([])) and 1 <= int(said) <= 7
    assert len(seen) == 3, "zero, one and two earlier guesses"


def test_the_reward_of_the_verdict_has_the_judges_of_its_config() -> None:
    reward = find_reward(str(Path(taught_models.__file__).with_name("judged_digits.py")))
    judges = {"main": JudgeConfig(model="m")}
    assert reward.judges is not None
    assert reward.judges(reward.config(name=reward.name, judges=judges)).judges.keys() == {"main"}  # type: ignore[call-arg]
