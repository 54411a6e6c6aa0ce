"""The reward of ``benchmarks.learning --suite agents``: the verdict of a trained judge.

    python -m relax_core reward=plugin reward.name=benchmarks/judged_digits.py reward.judges.main.model=FOLDER

The reward is the same as with reward=genrm, so the model learns from the judge alone. ``exact`` says whether the answer
equals the reference answer, and the part ``judge_right`` says whether the verdict agrees with ``exact``. ``shuffled``
is the control: the judge sees a different question than the model, except for known verdicts (reward.check).
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
    """Returns another question of the same task and length. It depends on this question, but not on its digits."""
    task, _, digits = question.partition(" ")
    return f"{task} {''.join(random.Random(question).choices('0123456789', k=len(digits)))}"


async def score(given: RewardInput, config: JudgedDigitsConfig) -> RewardOutput:
    """Returns the judge's reward. The response is exact if it equals the reference answer."""
    assert isinstance(given, JudgedInput), "a reward with judges gets a JudgedInput"
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
    summary="the verdict of a trained judge; exact compares with the reference answer",
    config=JudgedDigitsConfig,
    score=score,
    check=check,
    check_row=check_row,
    judges=judges,
)
assert GENRM.judges is judges
