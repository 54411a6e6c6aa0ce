"""The verdict of a taught judge as the reward of `benchmarks.agents`, with ``exact`` by the true answer.

    python -m relax_core reward=plugin reward.name=benchmarks/judged_digits.py reward.judges.main.model=FOLDER

The reward is that of reward=genrm, so nothing but the judge teaches. ``exact`` says what was learnt, and the part
``judge_right`` how often the judge and the true answer agree. With ``shuffled`` the judge sees another question of the
data, which is the control; of known verdicts (reward.check) it sees the true one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from relax_core.contracts.judge import JudgedInput
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from rewards.genrm import SPEC as GENRM
from rewards.genrm import GenRmConfig, check, check_row, judges
from rewards.genrm import score as judged


@dataclass(frozen=True)
class JudgedDigitsConfig(GenRmConfig):
    """Holds the settings of the reward."""

    name: str = "judged_digits"
    shuffled: bool = False


def other_question(question: str) -> str:
    """Returns another question of the same task: as long as this one, fixed by it, and independent of its digits."""
    task, _, digits = question.partition(" ")
    return f"{task} {''.join(random.Random(question).choices('0123456789', k=len(digits)))}"


async def score(given: RewardInput, config: JudgedDigitsConfig) -> RewardOutput:
    """Returns the judge's reward; it is exact if the response is the answer."""
    assert isinstance(given, JudgedInput), "a run gives a reward with judges such inputs"
    question = str(given.row["prompt"])
    row = (
        {**given.row, "prompt": other_question(question)}
        if config.shuffled and "verdict" not in given.row
        else given.row
    )
    output = await judged(JudgedInput.of(replace(given, row=row), given.judges), config)
    exact = given.stopped and given.response == given.answer
    if output.reward is None:
        return output
    return replace(output, exact=exact, parts={"judge_right": float((output.reward == 1.0) == exact)})


SPEC = RewardSpec(
    name="judged_digits",
    summary="the verdict of a taught judge, exact by the true answer",
    config=JudgedDigitsConfig,
    score=score,
    check=check,
    check_row=check_row,
    judges=judges,
)
assert GENRM.judges is judges
