"""The adapter against the real package reasoning-gym."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("reasoning_gym", reason="pip install 'relax-core[envs]'")

from envs.reasoning_gym import ReasoningGymConfig, ReasoningGymTask
from relax_core.contracts.env import Action, EpisodeStart
from relax_core.tools.check_env import main


def opened(seed: int = 0, **settings: object) -> tuple[ReasoningGymTask, str]:
    config = ReasoningGymConfig(**settings)  # type: ignore[arg-type]
    task = ReasoningGymTask(EpisodeStart(row={"seed": seed}, group_seed=1, episode_seed=2), config)
    return task, task.reset()


def test_a_sum_is_scored() -> None:
    task, question = opened(arguments={"min_terms": 2, "max_terms": 3})
    terms = re.findall(r"[+-]? ?\d+", question.split(":")[1])
    assert 2 <= len(terms) <= 3
    right = sum(int(term.replace(" ", "")) for term in terms)
    step = task.step(Action(text="", content=f"<answer>1</answer> no: <answer> {right} </answer>", stopped=True))
    assert step.done and step.reward == 1.0
    wrong = opened()[0].step(Action(text="", content="many", stopped=True))
    assert wrong.done and wrong.reward is not None and wrong.reward < 1.0


def test_rows_have_questions_of_their_own_and_answers_may_be_tried_again() -> None:
    assert opened(3)[1] == opened(3)[1] and len({opened(seed)[1] for seed in range(10)}) > 5
    task, _ = opened(max_turns=2)
    first = task.step(Action(text="many", content="many", stopped=True))
    assert first.reward is None and not first.done and first.observation
    assert task.step(Action(text="many", content="many", stopped=True)).done


def test_it_passes_the_check_in_its_worker_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reasoning_gym", "task=spell_backward"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["reasoning_gym", "task=nowhere"]) == 1
    assert "'nowhere' not registered" in capsys.readouterr().err
