"""An env of several turns that repeats the question until the answer is right."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult


@dataclass(frozen=True)
class UntilRightConfig(InteractionConfig):
    name: str = "until_right"
    max_turns: int = 3
    hint: str = "no, try again"  # observation after a wrong answer


class UntilRight(BaseInteractionEnv):
    """Runs one episode. Relax makes one object per episode and calls its methods sequentially."""

    def __init__(self, start: EpisodeStart, config: UntilRightConfig) -> None:
        self.row, self.hint = start.row, config.hint

    def reset(self) -> str:
        return str(self.row["prompt"])

    def step(self, action: Action) -> StepResult:
        right = action.text == str(self.row["answer"])
        return StepResult(observation=self.hint, reward=float(right), done=right)


SPEC = EnvSpec(name="until_right", summary="asks again until it is right", config=UntilRightConfig, open=UntilRight)
