"""Greedy accuracy on the held-out split, at chosen weight versions, on the same engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.pool import EnginePool
from relax_core.rollout.reward_worker import RewardPool
from relax_core.rollout.sampler import PromptMaker, reward_input
from relax_core.rollout.seeds import sampling_seed

RecordTexts = Callable[[int, list[dict[str, str | bool]]], None]
Record = Callable[[str, int, Mapping[str, float]], None]
TEXT_ROWS = 16


def eval_versions(*, every: int, start: int, total_steps: int) -> list[int]:
    """Weight versions to evaluate: the first, every ``every`` steps, the last. None at all where ``every`` is 0."""
    if every == 0:
        return []
    return [v for v in range(start, total_steps + 1) if v in (start, total_steps) or v % every == 0]


@dataclass(frozen=True, kw_only=True)
class EvalRow:
    row: DataRow
    input_ids: list[int]


class Evaluator:
    """Runs the evaluations one after the other, each as soon as its version is one step away.

    ``wait_version(version)`` returns when the run has reached that version. `gate` lets training prompts of a version
    pass only after its evaluation, where ``in_order``: then the engine's batches are the same in every run.
    """

    def __init__(
        self,
        *,
        versions: Sequence[int],
        rows: Sequence[DataRow],
        pool: EnginePool,
        prompts: PromptMaker,
        rewards: RewardPool,
        sampling: SamplingParams,
        wait_version: Callable[[int], Awaitable[None]],
        in_order: bool,
        record: Record,
        record_texts: RecordTexts,
    ) -> None:
        self._rows = [
            EvalRow(row=row, input_ids=prompts.tokens(row, what=f"eval row {place}"))
            for place, row in enumerate(rows if versions else [])
        ]
        self._pool = pool
        self._prompts = prompts
        self._rewards = rewards
        self._sampling = sampling
        self._wait_version = wait_version
        self._in_order = in_order
        self._record = record
        self._record_texts = record_texts
        self._done: dict[int, asyncio.Event] = {version: asyncio.Event() for version in versions}

    async def run(self) -> None:
        for version, done in self._done.items():
            await self._wait_version(version - 1)
            await self._evaluate(version)
            done.set()

    async def gate(self, version: int) -> None:
        """Returns when no evaluation stands before training prompts that start at ``version``."""
        if self._in_order:
            for due, done in self._done.items():
                if due <= version:
                    await done.wait()

    async def _evaluate(self, version: int) -> None:
        requests = [
            PromptRequest(
                rid=f"eval-{version}-{place}",
                input_ids=one.input_ids,
                sampling_seed=sampling_seed(0, index=place, purpose="eval"),
                min_version=version,
            )
            for place, one in enumerate(self._rows)
        ]
        responses: dict[int, Generated] = {}
        async for place, answers in self._pool.generate(requests, self._sampling, places=range(len(requests))):
            responses[place] = answers[0]
        given = [
            reward_input(one.row, responses[place], tokenizer=self._prompts.tokenizer)
            for place, one in enumerate(self._rows)
        ]
        outputs = await asyncio.to_thread(self._rewards.score, given)
        rewards = [output.reward for output in outputs if output.reward is not None]
        exact = [output.exact for output in outputs]
        self._record(
            "eval",
            version,
            {"exact": fmean(exact), "reward": fmean(rewards) if rewards else 0.0, "rows": len(exact)},
        )
        self._record_texts(
            version,
            [
                {
                    "prompt": str(one.row["prompt"]),
                    "answer": ask.answer,
                    "response": ask.response,
                    "exact": output.exact,
                }
                for one, ask, output in list(zip(self._rows, given, outputs, strict=True))[:TEXT_ROWS]
            ],
        )
