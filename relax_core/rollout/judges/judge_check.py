"""Tries the judges on questions whose verdicts are known, before a run's first prompt."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.config.reward_choice import judged_reward
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.judging.judge import JudgedInput
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.rollout.judges.judge_choice import judge_plan
from relax_core.rollout.judges.judge_pool import JudgePool
from relax_core.rollout.judges.verdict_parsers import WORDS
from relax_core.rollout.rewards.reward_calls import score_async

NEAR = 0.5  # a verdict is right if it is nearer to the known one than this; verdicts are from 0 to 1
AT_ONCE = 32  # questions
SHOWN = 3  # wrong verdicts that are told
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KnownVerdict:
    """Is one row of the file: an answer whose verdict is known; ``where`` is its file and line."""

    where: str
    row: Mapping[str, Any]
    response: str
    verdict: float

    def given(self) -> RewardInput:
        """Returns the answer as the reward sees one of a run."""
        return RewardInput(
            response=self.response, stopped=True, answer=str(self.row["answer"]), row=self.row, where=self.where
        )


@dataclass(frozen=True, kw_only=True)
class JudgeAccuracy:
    """Says how many verdicts on known answers were right; ``wrong`` describes the others."""

    right: int
    wrong: Sequence[str]

    @property
    def share(self) -> float:
        """Returns the share of right verdicts."""
        return self.right / (self.right + len(self.wrong))

    def words(self) -> str:
        """Returns the share, and the first wrong verdicts."""
        first = "".join(f" {one}." for one in self.wrong[:SHOWN])
        return f"{self.right} of {self.right + len(self.wrong)} verdicts are right.{first}"


def known_verdicts(path: str) -> list[KnownVerdict]:
    """Reads the rows of a file of JSON lines, each with question, answer, verdict, and what else a row of the data has.

    The reference answer is the row's ``reference``. Raises ValueError with file and line for what cannot be read.
    """
    file = Path(path).expanduser()
    key = f"reward.check.path={path}"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{key} cannot be read: {error}. Name a file of JSON lines.") from error
    found = [_known(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{key} has no rows. Write lines such as {json.dumps(_EXAMPLE)}.")
    return found


_EXAMPLE = {"question": "2 + 2?", "reference": "4", "answer": "It is 4.", "verdict": 1}


def _known(line: str, where: str) -> KnownVerdict:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}. Write lines such as {json.dumps(_EXAMPLE)}.") from error
    if not isinstance(row, dict) or not {"question", "answer", "verdict"} <= row.keys():
        raise ValueError(f"{where}: a row needs question, answer and verdict, such as {json.dumps(_EXAMPLE)}.")
    said = row["verdict"]
    verdict = WORDS.get(said.strip().lower()) if isinstance(said, str) else said
    if not isinstance(verdict, int | float) or not 0 <= verdict <= 1:
        raise ValueError(f"{where}: verdict={said!r} is neither from 0 to 1 nor one of {', '.join(WORDS)}.")
    whole = {**row, "prompt": row["question"], "answer": str(row.get("reference", ""))}
    return KnownVerdict(where=where, row=whole, response=str(row["answer"]), verdict=float(verdict))


async def judge_accuracy(
    known: Sequence[KnownVerdict], judges: JudgePool, spec: RewardSpec, config: RewardConfig
) -> JudgeAccuracy:
    """Scores the known answers with the reward that asks the judges, and compares its verdicts with theirs."""
    limit = asyncio.Semaphore(AT_ONCE)
    async with judges.of_group() as asking:

        async def output(one: KnownVerdict) -> RewardOutput:
            async with limit:
                ((output, _),) = await score_async(spec, [JudgedInput.of(one.given(), asking)], config)
                return output

        outputs = await asyncio.gather(*map(output, known))
    wrong = list(_wrong(known, outputs))
    return JudgeAccuracy(right=len(known) - len(wrong), wrong=wrong)


def _wrong(known: Sequence[KnownVerdict], outputs: Sequence[RewardOutput]) -> Iterator[str]:
    for one, output in zip(known, outputs, strict=True):
        if output.reward is None:
            yield f"{one.where}: {output.reason}"
            continue
        verdict = (output.parts or {}).get("verdict", output.reward)
        if abs(verdict - one.verdict) >= NEAR:
            yield f"{one.where}: {verdict:g} instead of {one.verdict:g}"


async def check_judges(config: RelaxConfig, judges: JudgePool, record: Callable[[Mapping[str, float]], None]) -> None:
    """Tries the judges on ``reward.check.path``, if it is set, and tells their accuracy, also to ``record``.

    Raises ValueError if it is below ``reward.check.min``.
    """
    plan, chosen = judge_plan(config), judged_reward(config.reward)
    if plan is None or chosen is None or plan.check.path is None:
        return
    path, least = plan.check.path, plan.check.min
    found = await judge_accuracy(known_verdicts(path), judges, chosen.spec, chosen.config)
    log.warning("reward.check.path=%s: %s", path, found.words())
    record({"accuracy": found.share})
    if found.share < least:
        raise ValueError(
            f"reward.check.path={path}: {found.words()} That is {found.share:.0%}, below reward.check.min={least:g}. "
            "Use a better judge or prompt, or lower reward.check.min."
        )
