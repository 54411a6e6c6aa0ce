"""Compares the ranks and engines of a run that goes on, window by window, and tells who becomes slow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence

from relax_core.contracts.train import OWN_PARTS
from relax_core.observe.service.records import RANK, ROLLOUT, MetricRecord, is_resume
from relax_core.observe.stragglers.slow_equals import (
    ENGINE_WINDOW_STEPS,
    WINDOW_STEPS,
    Compared,
    DecodeTime,
    DecodeTimes,
    Streak,
    Work,
    advanced,
    compared_decoding,
    compared_work,
    without,
)
from relax_core.observe.stragglers.straggler_records import Kind, Straggler, straggler_of

REWARD_WORKER = re.compile(r"reward_worker/(\d+)/answers")


class StragglerWatch:
    """Names stragglers among the trainer's ranks, the engines and each rollout worker's reward workers.

    One thread uses it.

    Each of ``equal_ranks`` lists workers that do the same work, which are those at the same place in every dimension
    but data parallel. ``earlier`` are the stragglers of the run before this process began. Records that were made
    before ``began_s``, a Unix time, are those of an earlier process and do not count; by default that is now.
    """

    def __init__(
        self,
        equal_ranks: Sequence[Sequence[str]],
        *,
        earlier: Iterable[Straggler] = (),
        began_s: float | None = None,
    ) -> None:
        self._equal_ranks = [list(names) for names in equal_ranks if len(names) > 1]
        self._began_s = time.time() if began_s is None else began_s
        self._steps: list[tuple[int, dict[str, Work]]] = []  # the train steps of the window of the ranks
        self._batches: dict[
            int, list[tuple[int, dict[str, Work]]]
        ] = {}  # by rollout worker: those of its reward workers
        self._decoding: tuple[int, Mapping[str, DecodeTimes]] | None = None  # at the start of the engines' window
        self._streaks: dict[Kind, dict[str, Streak]] = {"rank": {}, "engine": {}, "reward worker": {}}
        self._over = list(earlier)
        self._news: list[Straggler] = []

    def add_records(self, records: Iterable[MetricRecord]) -> None:
        """Takes the newest records in order; a resume begins all windows anew."""
        for record in records:
            if record.time_s < self._began_s:
                continue
            if is_resume(record):
                self._steps, self._decoding, self._batches = [], None, {}
            elif record.source == RANK and self._equal_ranks:
                self._add_step(record)
            elif record.source == ROLLOUT:
                self._add_batch(record)

    def add_decoding(self, step: int, engines: Mapping[str, DecodeTimes]) -> None:
        """Takes what each engine has decoded since its start, after so many train steps."""
        before = self._decoding
        if before is None or step < before[0]:
            self._decoding = step, dict(engines)
        elif step - before[0] >= ENGINE_WINDOW_STEPS:
            since = {
                name: found
                for name, times in engines.items()
                if (found := _since(before[1].get(name), times)) is not None
            }
            self._decoding = step, dict(engines)
            gone = self._streaks["engine"].keys() - engines.keys()
            self._advance(
                "engine",
                compared_decoding(since, steps=step - before[0]),
                from_step=before[0],
                to_step=step - 1,
                gone=gone,
            )

    def take(self) -> list[Straggler]:
        """Returns who was named, and who is no straggler any more, since the last call."""
        news, self._news = self._news, []
        return news

    def present(self) -> list[Straggler]:
        """Returns who is a straggler now."""
        return [
            straggler_of(kind, name, streak, ended=False)
            for kind, streaks in self._streaks.items()
            for name, streak in sorted(streaks.items())
            if streak.is_named
        ]

    def all_of_run(self) -> list[Straggler]:
        """Returns all stragglers of the run, those that are over first."""
        return [*self._over, *self.present()]

    def _add_step(self, record: MetricRecord) -> None:
        if self._steps and record.step <= self._steps[-1][0]:  # it is done again
            self._steps = []
        names = [name for equals in self._equal_ranks for name in equals if f"{name}/rows" in record.values]
        self._steps.append((record.step, {name: _work(record.values, name) for name in names}))
        if len(self._steps) < WINDOW_STEPS:
            return
        steps, self._steps = self._steps, []
        compared: dict[str, Compared] = {}
        for equals in self._equal_ranks:
            compared |= compared_work([{name: work[name] for name in equals if name in work} for _, work in steps])
        self._advance("rank", compared, from_step=steps[0][0], to_step=steps[-1][0])

    def _add_batch(self, record: MetricRecord) -> None:
        """Takes the times of the reward workers of one rollout worker for a prompt batch."""
        rollout = int(record.values.get("worker", 0))
        answers = {found[1]: value for key, value in record.values.items() if (found := REWARD_WORKER.fullmatch(key))}
        if len(answers) < 2:
            return
        batches = self._batches.setdefault(rollout, [])
        work = {
            f"reward-worker-{rollout}.{worker}": Work(
                wall_ms={"score": count * record.values[f"reward_worker/{worker}/ms_p50"]}, amount=count
            )
            for worker, count in answers.items()
        }
        batches.append((record.step, work))
        if len(batches) == WINDOW_STEPS:
            del self._batches[rollout]
            steps = [step for step, _ in batches]
            window = compared_work([work for _, work in batches])
            self._advance("reward worker", window, from_step=min(steps), to_step=max(steps))

    def _advance(
        self,
        kind: Kind,
        compared: Mapping[str, Compared],
        *,
        from_step: int,
        to_step: int,
        gone: Iterable[str] = (),
    ) -> None:
        before = self._streaks[kind]
        after = advanced(without(before, set(gone)), compared, from_step=from_step, to_step=to_step)
        self._streaks[kind] = after
        for name, streak in before.items():
            if streak.is_named and name not in after:
                over = straggler_of(kind, name, streak, ended=True)
                self._over.append(over)
                self._news.append(over)
        for name, streak in after.items():
            if streak.is_named and not (name in before and before[name].is_named):
                self._news.append(straggler_of(kind, name, streak, ended=False))


def _work(values: Mapping[str, float], name: str) -> Work:
    wall, cpu = (
        {part: values[key] for part in OWN_PARTS if (key := f"{name}/{prefix}{part}_ms") in values}
        for prefix in ("", "cpu/")
    )
    wait_ms = values.get(f"{name}/core_wait_ms", 0.0)
    return Work(wall_ms=wall, cpu_ms=cpu, core_wait_ms=wait_ms, amount=values[f"{name}/rows"])


def _since(before: DecodeTimes | None, now: DecodeTimes) -> DecodeTimes | None:
    """Returns the decode steps since ``before``; None for an engine that is new or was started again."""
    if before is None or any(size not in now or now[size].steps < one.steps for size, one in before.items()):
        return None
    none = DecodeTime(0, 0.0)
    since = {
        size: DecodeTime(one.steps - old.steps, one.seconds - old.seconds, one.core_wait_s - old.core_wait_s)
        for size, one in now.items()
        for old in (before.get(size, none),)
    }
    return {size: one for size, one in since.items() if one.steps > 0}
