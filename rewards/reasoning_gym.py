"""The score that the package reasoning-gym gives an answer to a question of data=reasoning_gym."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINKING_ENDS = "</think>"


@dataclass(frozen=True)
class ReasoningGymConfig(RewardConfig):
    """Holds the settings of the reward; ``timeout_s`` is the limit per answer in seconds."""

    name: str = "reasoning_gym"
    timeout_s: float = 10.0


def prepare() -> None:
    """Imports the package before the first answer is scored, because the import takes seconds."""
    import reasoning_gym  # noqa: F401


def score(given: RewardInput, config: ReasoningGymConfig) -> RewardOutput:
    """Returns the package's score, from 0 to 1, of the last text in <answer> tags, or else of the whole response.

    Thinking does not count. Raises ValueError for a row of another data source.
    """
    if (row := given.row.get("reasoning_gym")) is None:
        raise ValueError("the row has no key reasoning_gym: use reward=reasoning_gym with data=reasoning_gym")
    text = given.response.rpartition(_THINKING_ENDS)[2]
    answer = (_ANSWER.findall(text) or [text])[-1].strip()
    questions, entry = _question(json.dumps(row, sort_keys=True))
    value = float(questions.score_answer(answer, entry))
    why = compared(answer, str(given.answer))
    return RewardOutput(reward=value, exact=value == 1.0, answer=answer, why=why)


@lru_cache(maxsize=256)
def _question(row: str) -> tuple[Any, Any]:
    """Returns a row's questions and its own one; the answers of a group follow each other."""
    of = json.loads(row)
    questions = _questions(json.dumps([of["task"], of["seed"], of["size"], of["arguments"]]))
    return questions, questions[of["index"]]


@lru_cache(maxsize=8)
def _questions(drawn: str) -> Any:
    import reasoning_gym

    task, seed, size, arguments = json.loads(drawn)
    return reasoning_gym.create_dataset(task, seed=seed, size=size, **arguments)


def check(config: ReasoningGymConfig) -> None:
    """Raises ValueError if the package is missing."""
    if find_spec("reasoning_gym") is None:
        raise ValueError("reward=reasoning_gym needs the package reasoning-gym: pip install 'relax-core[envs]'.")


SPEC = RewardSpec(
    name="reasoning_gym",
    summary="the score of the package reasoning-gym, in a killable worker",
    config=ReasoningGymConfig,
    score=score,
    isolated=True,
    check=check,
    prepare=prepare,
)
