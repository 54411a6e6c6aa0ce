"""Tasks of the package reasoning-gym: each episode is a question that the package draws, and whose answer it scores."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, IsolatedConfig, StepResult

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class ReasoningGymConfig(IsolatedConfig):
    """Holds the settings of the adapter.

    ``task`` is the package's name of a task, and ``arguments`` are the task's own. A model may answer ``max_turns``
    times; the last answer counts.
    """

    name: str = "reasoning_gym"
    task: str = "chain_sum"
    arguments: dict[str, Any] = field(default_factory=dict)
    max_turns: int = 1
    tool_parser: str = "none"


class ReasoningGymTask(BaseInteractionEnv):
    """Asks one question, drawn from the row of data=seeds, or else from the group's seed.

    The answer is the last text in <answer> tags, or the whole response without thinking.
    """

    def __init__(self, start: EpisodeStart, config: ReasoningGymConfig) -> None:
        import reasoning_gym

        seed = int(start.row.get("seed", start.group_seed)) % 2**31
        self._data = reasoning_gym.create_dataset(config.task, seed=seed, size=1, **config.arguments)
        self._entry = self._data[0]
        self._turns_left = config.max_turns

    def reset(self) -> str:
        """Returns the question."""
        return str(self._entry["question"])

    def step(self, action: Action) -> StepResult:
        """Returns the package's score of an answer, and the end after a whole one or the last turn."""
        self._turns_left -= 1
        text = action.content or action.text
        answers = _ANSWER.findall(text) or [text]
        score = float(self._data.score_answer(answers[-1].strip(), self._entry))
        done = score == 1.0 or not self._turns_left
        return StepResult(observation="That is not right. Try again.", reward=score if done else None, done=done)


def check(config: ReasoningGymConfig) -> None:
    """Raises ValueError if the package is missing; a task that it does not have is told by the trial of an episode."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("env=reasoning_gym needs the package reasoning-gym: pip install 'relax-core[envs]'.")


SPEC = EnvSpec(
    name="reasoning_gym",
    summary="tasks of the package reasoning-gym, which scores the answers",
    config=ReasoningGymConfig,
    open=ReasoningGymTask,
    check=check,
    isolated=True,
)
