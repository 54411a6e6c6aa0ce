"""Calls the judges of a run, with votes, a deadline and metrics; equal questions of a group are asked once.

`check_judges` tries the judges on answers with known verdicts before a run's first prompt.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from relax_core.config.reward_choice import judged_reward
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.judge import JudgedInput, JudgeSetup, Verdict
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.rollout.judges.judge_choice import judge_plan
from relax_core.rollout.judges.judge_prompts import WORDS, JudgePrompt, verdict_parser
from relax_core.rollout.judges.judge_servers import JudgeRefused, JudgeServer
from relax_core.rollout.rewards.reward_calls import score_async
from relax_core.rollout.rewards.reward_metrics import times

AGAIN_TEMPERATURE = 0.7  # lowest temperature of the second try; a greedy judge would repeat its text
CANCELLED_S = 5.0  # limit of the wait until cancelled questions have ended
_SEEDS = 2**31


class JudgeMetrics:
    """Counts the texts and verdicts of one judge since the last `take`. A verdict may need several texts."""

    def __init__(self) -> None:
        self.under_way = 0
        self._ms: list[float] = []
        self._tokens = self._texts = self._unreadable = self._none = 0

    def text(self, tokens: int, *, readable: bool) -> None:
        """Counts one text of the judge."""
        self._texts += 1
        self._tokens += tokens
        self._unreadable += not readable

    def verdict(self, seconds: float, *, given: bool) -> None:
        """Counts one ended question and its time."""
        self._ms.append(1e3 * seconds)
        self._none += not given

    def take(self) -> dict[str, float]:
        """Returns the metrics since the last call.

        ``queue`` is the number of questions in flight. ``verdicts`` is the number of ended questions, and ``none`` is
        the share of ended questions without a verdict. ``texts`` is the number of the judge's texts, and ``unreadable``
        is the share of texts without a readable verdict.
        """
        ms = self._ms
        values = {"queue": float(self.under_way), "verdicts": float(len(ms))}
        if ms:
            values |= {"none": self._none / len(ms), **times(ms)}
        if self._texts:
            values |= {"texts": float(self._texts), "tokens": float(self._tokens)}
            values["unreadable"] = self._unreadable / self._texts
        self._ms = []
        self._tokens = self._texts = self._unreadable = self._none = 0
        return values


class RunJudge:
    """Holds one judge of a run: its template, its parser, and the server that answers its prompts.

    ``seed`` is the run's seed. Raises the ValueError of `JudgePrompt` and `verdict_parser`.
    """

    def __init__(self, name: str, setup: JudgeSetup, server: JudgeServer, *, seed: int) -> None:
        self.figures = JudgeMetrics()
        self._name, self._settings, self._server, self._seed = name, setup.settings, server, seed
        self._prompt = JudgePrompt(setup)
        self._parser = verdict_parser(setup.parse)

    async def verdict(self, variables: Mapping[str, str]) -> Verdict:
        """Returns the verdict within ``timeout_s`` seconds; without a verdict, the value of the result is None."""
        began = time.perf_counter()
        self.figures.under_way += 1
        verdict = self._without("it was cancelled", cause="given_up")
        try:
            verdict = await self._within_deadline(variables)
        finally:
            self.figures.under_way -= 1
            self.figures.verdict(time.perf_counter() - began, given=verdict.value is not None)
        return verdict

    async def _within_deadline(self, variables: Mapping[str, str]) -> Verdict:
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                text = self._prompt.text(variables, shown=self._server.shown)
                votes = await asyncio.gather(*(self._vote(text, number) for number in range(self._settings.votes)))
        except TimeoutError:
            last = getattr(self._server, "last_error", "")
            message = f"no verdict within {limit_s:g} s" + (f"; last: {last}" if last else "")
            return self._without(message, cause="timeout")
        except (JudgeRefused, ValueError) as error:
            return self._without(str(error), cause="refused")
        return self._counted(votes)

    def _counted(self, votes: Sequence[tuple[float | None, str]]) -> Verdict:
        """Returns the mean of the readable votes; no verdict if half of the votes or more are unreadable."""
        values = [value for value, _ in votes if value is not None]
        text = votes[-1][1]
        if 2 * len(values) <= len(votes):
            said = " ".join(text.split())[:100]
            return Verdict(
                judge=self._name,
                value=None,
                text=text,
                reason=f"judge {self._name}: no verdict can be read in {said!r}",
                cause="unreadable",
            )
        return Verdict(judge=self._name, value=fmean(values), text=text)

    async def _vote(self, prompt: str, number: int) -> tuple[float | None, str]:
        """Returns a vote with the judge's text; after an unreadable text, asks once more with another seed."""
        text = ""
        for attempt, temperature in enumerate(
            (self._settings.temperature, max(self._settings.temperature, AGAIN_TEMPERATURE))
        ):
            answer = await self._server.answer(
                prompt, seed=self._seed_of(prompt, number, attempt), temperature=temperature
            )
            text = answer.text
            value = self._parser(text, answer.is_cut)
            self.figures.text(answer.tokens, readable=value is not None)
            if value is not None:
                return value, text
        return None, text

    def _seed_of(self, prompt: str, number: int, attempt: int) -> int:
        """Returns a seed that depends only on the run's seed, the prompt, the vote and the attempt."""
        return (zlib.crc32(prompt.encode(errors="replace")) + 7919 * self._seed + 2 * number + attempt) % _SEEDS

    def _without(self, reason: str, *, cause: str) -> Verdict:
        return Verdict(judge=self._name, value=None, reason=f"judge {self._name}: {reason}", cause=cause)

    async def close(self) -> None:
        """Ends the judge's connections."""
        await self._server.close()


class JudgePool:
    """Holds the judges of a run by name; it belongs to one event loop."""

    def __init__(self, judges: Mapping[str, RunJudge]) -> None:
        self._judges = judges

    def of_group(self) -> GroupJudges:
        """Returns the judges for one group; equal questions of the group are asked once."""
        return GroupJudges(self._judges)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all judges since the last call, as judge/NAME/METRIC."""
        return {
            f"judge/{name}/{key}": value
            for name, judge in self._judges.items()
            for key, value in judge.figures.take().items()
        }

    async def close(self) -> None:
        """Ends all connections."""
        for judge in self._judges.values():
            await judge.close()


class GroupJudges:
    """Asks the judges about the answers of one group; equal questions share a verdict.

    The object is an async context manager; the end of the context cancels questions in flight.
    """

    def __init__(self, judges: Mapping[str, RunJudge]) -> None:
        self._judges = judges
        self._asked: dict[tuple[str, ...], asyncio.Task[Verdict]] = {}

    async def ask(self, judge: str, variables: Mapping[str, str]) -> Verdict:
        """Returns the verdict; see `relax_core.contracts.judge.Judges`."""
        if judge not in self._judges:
            known = ", ".join(self._judges)
            return Verdict(judge=judge, value=None, reason=f"no judge is called {judge!r}. What exists: {known}.")
        key = (judge, *(word for pair in sorted(variables.items()) for word in pair))
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._judges[judge].verdict(variables))
        return await asyncio.shield(self._asked[key])  # another answer may also wait for this verdict

    async def __aenter__(self) -> GroupJudges:
        return self

    async def __aexit__(self, *_: object) -> None:
        open_tasks = [task for task in self._asked.values() if not task.done()]
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            await asyncio.wait(open_tasks, timeout=CANCELLED_S)


NEAR = 0.5  # a verdict is right if it differs by less from the known verdict; range 0 to 1
CONCURRENT_QUESTIONS = 32  # limit of questions in flight
SHOWN = 3  # number of wrong verdicts that are logged
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KnownVerdict:
    """Holds one row of the file reward.check.path: an answer with its known verdict; ``where`` is file and line."""

    where: str
    row: Mapping[str, Any]
    response: str
    verdict: float

    def given(self) -> RewardInput:
        """Returns the answer as the input of the reward."""
        return RewardInput(
            response=self.response, stopped=True, answer=str(self.row["answer"]), row=self.row, where=self.where
        )


@dataclass(frozen=True, kw_only=True)
class JudgeAccuracy:
    """Counts the right verdicts on known answers; ``wrong`` describes the wrong verdicts."""

    right: int
    wrong: Sequence[str]

    @property
    def share(self) -> float:
        """Returns the share of right verdicts."""
        return self.right / (self.right + len(self.wrong))

    def describe(self) -> str:
        """Returns the number of right verdicts and the first wrong verdicts as text."""
        first = "".join(f" {example}." for example in self.wrong[:SHOWN])
        return f"{self.right} of {self.right + len(self.wrong)} verdicts are right.{first}"


def known_verdicts(path: str) -> list[KnownVerdict]:
    """Reads known verdicts from a file of JSON lines.

    A row has the keys question, answer and verdict, optionally reference (the reference answer), and further keys of a
    data row. Raises ValueError with file and line for a row that cannot be read.
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
    """Scores the known answers with the reward that asks the judges, and counts the right verdicts."""
    limit = asyncio.Semaphore(CONCURRENT_QUESTIONS)
    async with judges.of_group() as asking:

        async def output(known_verdict: KnownVerdict) -> RewardOutput:
            async with limit:
                ((output, _),) = await score_async(spec, [JudgedInput.of(known_verdict.given(), asking)], config)
                return output

        outputs = await asyncio.gather(*map(output, known))
    wrong = list(_wrong(known, outputs))
    return JudgeAccuracy(right=len(known) - len(wrong), wrong=wrong)


def _wrong(known: Sequence[KnownVerdict], outputs: Sequence[RewardOutput]) -> Iterator[str]:
    for known_verdict, output in zip(known, outputs, strict=True):
        if output.reward is None:
            yield f"{known_verdict.where}: {output.reason}"
            continue
        verdict = (output.parts or {}).get("verdict", output.reward)
        if abs(verdict - known_verdict.verdict) >= NEAR:
            yield f"{known_verdict.where}: {verdict:g} instead of {known_verdict.verdict:g}"


async def check_judges(config: RelaxConfig, judges: JudgePool, record: Callable[[Mapping[str, float]], None]) -> None:
    """Tries the judges on ``reward.check.path``, if set; logs the accuracy and passes it to ``record``.

    Raises ValueError if the accuracy is below ``reward.check.min``.
    """
    plan, chosen = judge_plan(config), judged_reward(config.reward)
    if plan is None or chosen is None or plan.check.path is None:
        return
    path, least = plan.check.path, plan.check.min
    found = await judge_accuracy(known_verdicts(path), judges, chosen.spec, chosen.config)
    log.warning("reward.check.path=%s: %s", path, found.describe())
    record({"accuracy": found.share})
    if found.share < least:
        raise ValueError(
            f"reward.check.path={path}: {found.describe()} That is {found.share:.0%}, below "
            f"reward.check.min={least:g}. "
            "Use a better judge or prompt, or lower reward.check.min."
        )
