"""Evaluation on held-out rows: at chosen weight versions of a run, on the same engines, or of a model by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from relax_core.contracts.data import BadRow, DataRow, EvalSet
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.data.eval_sets import check_bad_rows
from relax_core.engines.pool.engine_pool import EnginePool
from relax_core.rollout.evaluation.eval_metrics import (
    FEWEST_VOTERS,
    Answer,
    Estimate,
    accuracy,
    ks,
    majority_at_k,
    mean_reward,
    pass_at_k,
)
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.rollout.rewards.reward_inputs import reward_input
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sample_seeds import sampling_seed

RecordTexts = Callable[[int, list[dict[str, str | bool]]], None]
Record = Callable[[str, int, Mapping[str, float]], None]
Note = Callable[[int, Mapping[str, float]], Awaitable[bool]]
TEXT_ROWS = 16  # of each set whose answers are kept
SAMPLES_A_CALL = 16384  # that are asked for together; an engine takes four times as many in one request


def eval_versions(*, every: int, start: int, total_steps: int) -> list[int]:
    """Weight versions to evaluate: the first, every ``every`` steps, the last. None at all where ``every`` is 0."""
    if every == 0:
        return []
    return [v for v in range(start, total_steps + 1) if v in (start, total_steps) or v % every == 0]


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    row: DataRow
    input_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class PreparedSet:
    """An evaluation set as the engine is asked. ``bad``: rows that cannot be asked, those with a prompt that is too
    long among them; they count as nothing."""

    name: str
    rows: list[EvalRow]
    bad: list[BadRow]


@dataclass(frozen=True, kw_only=True)
class SetAnswers:
    """The answers to a set's prompts, in order. ``unscored``: answers whose reward could not be computed; they are not
    exact, and the mean reward leaves them out."""

    of: PreparedSet
    answers: list[list[Answer]]

    @property
    def unscored(self) -> int:
        return sum(answer.reward is None for of_prompt in self.answers for answer in of_prompt)

    def estimates(self) -> dict[str, Estimate]:
        """exact, and of several answers a prompt pass@k and maj@k for the k of `ks`; empty without rows."""
        if not self.answers:
            return {}
        found = {"exact": accuracy(self.answers)}
        for k in ks(len(self.answers[0])):
            found[f"pass@{k}"] = pass_at_k(self.answers, k)
            if k >= FEWEST_VOTERS:
                found[f"maj@{k}"] = majority_at_k(self.answers, k)
        return found

    def values(self) -> dict[str, float]:
        """All figures under the names of their metrics; an estimate's interval as NAME/low and NAME/high."""
        values: dict[str, float] = {}
        for name, one in self.estimates().items():
            values |= {name: one.value, f"{name}/low": one.low, f"{name}/high": one.high}
        reward = mean_reward(self.answers)
        values["reward"] = 0.0 if reward is None else reward.value
        values |= {"rows": len(self.answers), "bad_rows": len(self.of.bad), "unscored": self.unscored}
        return values


def metric_names(*, samples: int, sets: Sequence[str]) -> list[str]:
    """The metrics of an evaluation that a best checkpoint may be chosen by, without their source ``eval``."""
    figures = ["exact", "reward"]
    for k in ks(samples):
        figures += [f"pass@{k}", *([f"maj@{k}"] if k >= FEWEST_VOTERS else [])]
    return figures + [f"{name}/{figure}" for name in sets for figure in figures]


def prepare(one: EvalSet, prompts: PromptMaker, *, most_bad: float) -> PreparedSet:
    """The prompts of a set. Raises ValueError where more than the share ``most_bad`` of its rows cannot be asked."""
    rows, bad = [], list(one.bad)
    for place, row in enumerate(one.rows):
        try:
            where = f"eval row {place}" + (f" of {one.name}" if one.name else "")
            rows.append(EvalRow(row=row, input_ids=prompts.tokens(row, where=where)))
        except BadRow as error:
            bad.append(error)
    check_bad_rows(one.name, len(rows), bad, most=most_bad)
    return PreparedSet(name=one.name, rows=rows, bad=bad)


async def ask(
    sets: Sequence[PreparedSet],
    *,
    version: int,
    pool: EnginePool,
    prompts: PromptMaker,
    rewards: RewardPool,
    sampling: SamplingParams,
    told: Callable[[int], None] | None = None,
) -> list[SetAnswers]:
    """Asks all prompts of all sets together, with weights ``version`` or newer, and scores the answers. An answer
    belongs to its set's name and its place in it, whatever other sets there are. ``told``: how many prompts are
    answered."""
    places = [(one, place) for one in sets for place in range(len(one.rows))]
    told = told or (lambda count: None)
    requests = [
        PromptRequest(
            rid=f"eval-{version}-{number}",
            input_ids=one.rows[place].input_ids,
            sampling_seed=sampling_seed(0, index=place, purpose=f"eval/{one.name}" if one.name else "eval"),
            min_version=version,
        )
        for number, (one, place) in enumerate(places)
    ]
    answered: dict[int, asyncio.Task[list[Answer]]] = {}
    together = max(1, SAMPLES_A_CALL // sampling.n)
    try:
        async with asyncio.TaskGroup() as tasks:
            for first in range(0, len(requests), together):
                call = requests[first : first + together]
                async for number, responses in pool.generate(call, sampling, places=range(first, first + len(call))):
                    one, place = places[first + number]
                    inputs = [
                        reward_input(one.rows[place].row, response, tokenizer=prompts.tokenizer, stop=sampling.stop)
                        for response in responses
                    ]
                    answered[first + number] = tasks.create_task(_score(responses, inputs, rewards))
                    told(len(answered))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures  # the first one ended the others
    answers = iter([answered[number].result() for number in range(len(requests))])
    return [SetAnswers(of=one, answers=[next(answers) for _ in one.rows]) for one in sets]


async def _score(responses: Sequence[Generated], inputs: Sequence[RewardInput], rewards: RewardPool) -> list[Answer]:
    """The answers to one prompt; other prompts are generated and scored meanwhile."""
    outputs = await rewards.score(inputs)
    return [_answer(*one) for one in zip(responses, inputs, outputs, strict=True)]


def _answer(response: Generated, given: RewardInput, output: RewardOutput) -> Answer:
    vote = output.answer
    if vote is None:
        vote = given.response.strip() if given.stopped else ""
    return Answer(
        text=given.response,
        exact=output.exact,
        reward=output.reward,
        vote=vote or None,
        cut=not given.stopped,
        tokens=len(response.output_ids),
    )


class Evaluator:
    """Runs the evaluations one after the other, each as soon as its version is one step away.

    ``wait_version(version)`` returns when the run has reached that version. `gate` lets training prompts of a version
    pass only after its evaluation, where ``in_order``: then the engine's batches are the same in every run. ``note`` is
    told each evaluation's figures and returns whether the run ends with them; then nothing passes the gate any more.
    """

    def __init__(
        self,
        *,
        versions: Sequence[int],
        sets: Sequence[PreparedSet],
        pool: EnginePool,
        prompts: PromptMaker,
        rewards: RewardPool,
        sampling: SamplingParams,
        wait_version: Callable[[int], Awaitable[None]],
        in_order: bool,
        record: Record,
        record_texts: RecordTexts,
        note: Note | None = None,
    ) -> None:
        self._sets = sets
        self._pool = pool
        self._prompts = prompts
        self._rewards = rewards
        self._sampling = sampling
        self._wait_version = wait_version
        self._in_order = in_order
        self._record = record
        self._record_texts = record_texts
        self._note = note
        self._done: dict[int, asyncio.Event] = {version: asyncio.Event() for version in versions}

    async def run(self) -> None:
        for version, done in self._done.items():
            await self._wait_version(version - 1)
            if await self._evaluate(version):
                return
            done.set()

    async def gate(self, version: int) -> None:
        """Returns when no evaluation stands before training prompts that start at ``version``."""
        if self._in_order:
            for due, done in self._done.items():
                if due <= version:
                    await done.wait()

    async def _evaluate(self, version: int) -> bool:
        found = await ask(
            self._sets,
            version=version,
            pool=self._pool,
            prompts=self._prompts,
            rewards=self._rewards,
            sampling=self._sampling,
        )
        values = evaluation_values(found)
        self._record("eval", version, values)
        self._record_texts(version, [text for one in found for text in _texts(one)])
        return self._note is not None and await self._note(version, values)


def evaluation_values(found: Sequence[SetAnswers]) -> dict[str, float]:
    """The figures of the first set under their own names, and those of every named set as SET/NAME."""
    values = found[0].values()
    for one in found:
        if one.of.name:
            values |= {f"{one.of.name}/{name}": value for name, value in one.values().items()}
    return values


def _texts(found: SetAnswers) -> list[dict[str, str | bool]]:
    """The first rows with the first answer to each."""
    texts: list[dict[str, str | bool]] = [
        {
            "prompt": str(one.row["prompt"]),
            "answer": str(one.row["answer"]),
            "response": answers[0].text,
            "exact": answers[0].exact,
        }
        for one, answers in list(zip(found.of.rows, found.answers, strict=True))[:TEXT_ROWS]
    ]
    return [text | {"set": found.of.name} for text in texts] if found.of.name else texts
