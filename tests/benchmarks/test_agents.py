"""python -m benchmarks.agents: its cases pass all checks, its judges learn what they are tried on, its bounds hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import agents, taught_models
from benchmarks.agents import CASES, Figures, as_expected, command_line, figures_of
from benchmarks.judged_digits import other_question
from benchmarks.openai_agent import history
from benchmarks.taught_models import TASKS, guess_example, judgement, pair_of
from relax_core.config.compose import load_config
from relax_core.contracts.judging.judge import JudgeConfig
from relax_core.preflight import CHECKS
from relax_core.registry import find_reward, names
from relax_core.rollout.judges.judge_check import known_verdicts
from relax_core.rollout.judges.verdict_parsers import verdict_parser
from relax_core.tools.make_tiny import tiny_model_folder


@pytest.mark.parametrize("name", list(CASES))
def test_each_kind_of_run_passes_all_checks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    monkeypatch.setattr(agents, "judge_folder", lambda task: model)
    monkeypatch.setattr(agents, "policy_folder", lambda task: model)
    words = CASES[name].words(tmp_path, 0)
    if "env=agent" in words and "agent" not in names("env"):
        pytest.skip("no run starts agents yet")
    config = load_config(words, checks=CHECKS)
    assert config.run.steps > 0
    if (tmp_path / "known.jsonl").exists():
        judges = config.reward.judges
        assert config.reward.check.min == 0.98 and all(
            one.prompt == str(taught_models.PROMPT) for one in judges.values()
        )


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
            assert read(text, False) == float(answer == response) and len(text) < taught_models.MOST_TOKENS


def test_held_out_pairs_are_known_verdicts_of_questions_that_no_judge_was_taught(tmp_path: Path) -> None:
    taught_models.write_known_verdicts(tmp_path / "known.jsonl", {"rev": "a", "inc": "b"})
    known = known_verdicts(str(tmp_path / "known.jsonl"))
    assert len(known) == 512 and 0.3 < sum(one.verdict for one in known) / 512 < 0.7
    for one in known:
        task, digits = str(one.row["prompt"]).split(" ")
        assert one.verdict == float(one.response == TASKS[task](digits)) and one.row["judge"] == "ab"[task == "inc"]
    rng = random.Random(1)
    taught = {pair_of(rng, "rev")[0] for _ in range(2000)}
    assert not taught & {str(one.row["prompt"]) for one in known}


def test_rows_name_their_judges(tmp_path: Path) -> None:
    taught_models.write_rows(tmp_path / "rows.jsonl", {"rev": "inc", "inc": "rev"}, rows=4, seed=0, held_out=False)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["judge"] for row in rows] == ["inc", "rev"] * 2
    assert all(TASKS[task](digits) == row["answer"] for row in rows for task, digits in [row["prompt"].split(" ")])


def test_the_control_sees_another_question_of_the_task() -> None:
    other = other_question("rev 12345")
    assert other == other_question("rev 12345") != "rev 12345"
    assert other.startswith("rev ") and len(other) == len("rev 12345")


def test_a_taught_guess_is_a_turn_of_the_agents_game() -> None:
    assert history([(4, "higher"), (6, "lower")]) == "guess a number from 1 to 7, so far: 4 higher, 6 lower"
    rng, seen = random.Random(0), set()
    for _ in range(300):
        prompt, said = guess_example(rng)
        seen.add(prompt.count("er"))
        assert prompt.startswith(history([])) and 1 <= int(said) <= 7
    assert len(seen) == 3, "no, one and two guesses before"


def test_bounds() -> None:
    won: Figures = {
        "greedy_first": 0.2,
        "greedy_last": 0.95,
        "lowest_move": 0.75,
        "highest_move": 0.75,
        "sampled_first": 0.0,
        "sampled_last": 0.9,
        "judge": 1.0,
        "wall_s": 10.0,
    }
    still = won | {"greedy_last": 0.25, "lowest_move": 0.05, "highest_move": 0.05}
    assert as_expected(CASES["genrm"], won) and not as_expected(CASES["genrm"], still)
    control, swapped = CASES["genrm, shuffled questions"], CASES["two judges, routes swapped"]
    assert as_expected(control, still) and not as_expected(control, won)
    fallen = still | {"lowest_move": -0.2, "highest_move": 0.0}
    assert as_expected(swapped, fallen) and not as_expected(control, fallen)
    agent = CASES["calculator, agent"]
    assert as_expected(agent, won, like=0.97) and not as_expected(agent, won, like=0.99)
    assert not as_expected(CASES["calculator, no tool"], still)


def test_of_two_tasks_the_worse_one_counts() -> None:
    first = {"exact": 0.3, "figures": {"rev/exact": 0.3, "inc/exact": 0.2}}
    last = {"exact": 0.9, "figures": {"rev/exact": 0.9, "inc/exact": 0.1}}
    summary = {"eval": [first, last], "exact": {"first": 0.1, "last": 0.5}, "wall_s": 1.0}
    figures = figures_of(summary)
    assert (figures["greedy_first"], figures["greedy_last"]) == (0.2, 0.1)
    assert figures["lowest_move"] == pytest.approx(-0.1) and figures["highest_move"] == pytest.approx(0.6)


def test_the_command_line() -> None:
    assert command_line([]).only is None
    chosen = command_line(["--learn", "--only", "genrm", "two judges", "--seeds", "1"])
    assert chosen.only == ["genrm", "two judges"] and chosen.seeds == 1
    reward = find_reward(str(Path(agents.__file__).with_name("judged_digits.py")))
    judges = {"main": JudgeConfig(model="m")}
    assert reward.judges is not None
    assert reward.judges(reward.config(name=reward.name, judges=judges)).judges.keys() == {"main"}  # type: ignore[call-arg]
