"""Reads the figures and the trace of a finished run of `benchmarks.long_tail`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.countdown_env import drawn_waits
from benchmarks.long_tail_run import Work
from benchmarks.long_tail_trace import Trace, check_trace
from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.columns import decode_episodes
from relax_core.contracts.tree import Episode, group_uid, sample_uid
from relax_core.engines.embedded.scheduler.engine_load import COARSE, EXACT_SIZES
from relax_core.observe.samples.sample_reader import decode_numbers, numbers_files, read_frames
from relax_core.observe.samples.sample_records import SAMPLES_FOLDER, MadeRecord
from relax_core.observe.service.records import ACTOR, RANK, MetricRecord, by_step
from relax_core.observe.service.sinks import read_metrics
from relax_core.rollout.sample_seeds import sampling_seed

FEWEST = 30  # decode steps behind each entry of the table of times
LAST_STEPS = 5  # of which the reward at the end is the mean

Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Holds what a run left: its figures, and the trace for the simulation."""

    figures: Figures
    trace: Trace


def read_run(
    folder: Path,
    loads: Sequence[tuple[float, Mapping[str, Any]]],
    work: Work,
    *,
    wishes: Sequence[Sequence[int]],
    seed: int,
    bus: BusSettings,
    whole_steps: bool,
    max_aborts: int,
) -> Finished:
    """Returns figures and trace of a finished run. Raises ValueError where it has no times for the simulation."""
    records = read_metrics(folder)
    actor = by_step(records, ACTOR)
    if len(actor) != work.steps:
        raise ValueError(f"{folder}: {len(actor)} of {work.steps} train steps are recorded. Make the run again.")
    times = [one.time_s for one in _of_source(records, ACTOR)]
    began_s, ended_s = times[work.skipped - 1], times[-2]
    between = loads_between(loads, began_s, ended_s, where=str(folder))
    measured = range(work.skipped, work.steps - 1)
    decode_s, column_s = decode_costs([load for at, load in loads if at <= ended_s])
    made, drawn = made_episodes(folder), tool_waits(work, len(wishes), seed=seed)
    answers = answer_turns(made, wishes=wishes, group_size=work.group_size)
    turns: dict[str, Any] = {}
    entries: list[float] = []
    if work.turns > 1:
        entries = [turn.began_s for one in made.values() for turn in one.turns]
        turns = {"turns": answers, "waits_s": waits_between(answers, drawn)}
    prefill_s, entry_s = prefill_costs(between, entries)
    trace = Trace(
        bus=bus,
        lengths=[[sum(tokens) for tokens in group] for group in answers],
        **turns,
        decode_s=decode_s,
        column_s=column_s,
        prefill_s=prefill_s,
        entry_s=entry_s,
        train_s=train_line([actor[step] for step in measured], [by_step(records, RANK)[step] for step in measured]),
        max_running_samples=work.running,
        max_aborts=max_aborts,
        whole_steps=whole_steps,
        skipped_steps=work.skipped,
    )
    check_trace(trace, where=str(folder))
    waits_s = sum(by_step(records, RANK)[step]["actor-0/core_wait_ms"] for step in measured) / 1e3
    figures = run_figures(actor, skipped=work.skipped) | {"trainer without a core": waits_s / (ended_s - began_s)}
    samples = sum(actor[step]["samples"] for step in measured)
    figures |= engine_figures(between[0][1], between[-1][1], took_s=ended_s - began_s, samples=samples)
    if work.turns > 1:
        figures |= turn_figures(made, drawn, began_s=began_s, ended_s=ended_s)
    return Finished(figures=figures, trace=trace)


def _of_source(records: Iterable[MetricRecord], source: str) -> list[MetricRecord]:
    return sorted((one for one in records if one.source == source), key=lambda one: one.step)


def run_figures(actor: Mapping[int, Mapping[str, float]], *, skipped: int) -> Figures:
    """Returns a run's figures from the trainer's records by step; the last step counts for the reward alone."""
    steps = sorted(actor)
    measured = [actor[step] for step in steps[skipped:-1]]
    spent = {
        name: sum(one[name] for one in measured) for name in ("step_ms", "samples", "tokens", "train_ms", "wait_ms")
    }
    return {
        "samples/s": 1e3 * spent["samples"] / spent["step_ms"],
        "tokens/s": 1e3 * spent["tokens"] / spent["step_ms"],
        "reward": fmean(actor[step]["reward"] for step in steps[-LAST_STEPS:]),
        "first reward": actor[steps[0]]["reward"],
        "counted": fmean(one["reward_counted"] for one in measured),
        "training": spent["train_ms"] / spent["step_ms"],
        "waiting": spent["wait_ms"] / spent["step_ms"],
        "staleness": fmean(one["staleness_mean"] for one in measured),
        "most staleness": max(one["staleness_max"] for one in actor.values()),
        "length": spent["tokens"] / spent["samples"],
    }


def engine_figures(before: Mapping[str, Any], after: Mapping[str, Any], *, took_s: float, samples: float) -> Figures:
    """Returns the figures of the engine between two loads, in which so many samples were trained."""
    steps, decoded, _, waits_s = decode_totals(before, after)
    return {
        "engine busy": (after["busy_s"] - before["busy_s"]) / took_s,
        "engine without a core": waits_s / took_s,
        "decode steps": steps,
        "decoded together": decoded / steps,
        "prefilled": (after["prefill_tokens"] - before["prefill_tokens"]) / samples,
    }


def made_episodes(folder: Path) -> dict[str, Episode]:
    """Returns the episodes that a run made, those that it dropped included, by uid."""
    found: dict[str, Episode] = {}
    for name in numbers_files(folder):
        path, offset = folder / SAMPLES_FOLDER / name, 0
        while frames := read_frames(path, offset):
            offset = frames[-1].offset + frames[-1].size
            for record in map(decode_numbers, frames):
                if isinstance(record, MadeRecord):
                    found |= {one.uid: one for one in decode_episodes(bytes(record.episodes))}
    return found


def answer_turns(
    made: Mapping[str, Episode], *, wishes: Sequence[Sequence[int]], group_size: int
) -> list[list[list[int]]]:
    """Returns the tokens of the turns of each answer by group, in order of issue.

    Of turns that were not made, because their episode was given up or never began, they are those that the prompts ask
    for.
    """
    found = []
    for number, lengths in enumerate(wishes):
        episodes = [made.get(sample_uid(group_uid(number), sample)) for sample in range(group_size)]
        found.append([_turns_of(one, lengths) for one in episodes])
    return found


def _turns_of(episode: Episode | None, wished: Sequence[int]) -> list[int]:
    if episode is None:
        return list(wished)
    tokens = [turn.end - turn.start for turn in episode.turns]
    return tokens if episode.reward is not None else [*tokens, *wished[len(tokens) :]]


def tool_waits(work: Work, groups: int, *, seed: int) -> dict[str, list[float]]:
    """Returns the times of the tools of each episode by uid, as benchmarks/countdown_env.py draws them."""
    return {
        sample_uid(group_uid(index), sample): drawn_waits(
            work.turns - 1,
            mean_s=work.tool_wait_s,
            seed=sampling_seed(seed, index=index, purpose=f"env/{sample}"),
        )
        for index in range(groups)
        for sample in range(work.group_size)
    }


def waits_between(
    answers: Sequence[Sequence[Sequence[int]]], drawn: Mapping[str, Sequence[float]]
) -> list[list[list[float]]]:
    """Returns the drawn times between the turns of each answer by group; an episode that was cut has fewer turns."""
    return [
        [list(drawn[sample_uid(group_uid(index), sample)][: len(turns) - 1]) for sample, turns in enumerate(group)]
        for index, group in enumerate(answers)
    ]


def turn_figures(
    made: Mapping[str, Episode], drawn: Mapping[str, Sequence[float]], *, began_s: float, ended_s: float
) -> Figures:
    """Returns how many samples wait for a tool and for the engine at one time, and how late a turn begins."""
    tools_s = engine_s = 0.0
    late_s: list[float] = []

    def within(first_s: float, last_s: float) -> float:
        return max(0.0, min(last_s, ended_s) - max(first_s, began_s))

    for uid, episode in made.items():
        for turn, following, wait_s in zip(episode.turns, episode.turns[1:], drawn[uid], strict=False):
            tools_s += within(turn.ended_s, following.began_s)
            if began_s <= turn.ended_s <= ended_s:
                late_s.append(following.began_s - turn.ended_s - wait_s)
        engine_s += sum(within(turn.began_s, turn.ended_s) for turn in episode.turns)
    took_s = ended_s - began_s
    return {
        "at tools": tools_s / took_s,
        "at the engine": engine_s / took_s,
        "turn late, ms": 1e3 * fmean(late_s) if late_s else math.nan,
    }


def prefill_costs(loads: Sequence[tuple[float, Mapping[str, Any]]], entries: Sequence[float]) -> tuple[float, float]:
    """Returns the time of the engine beside decode steps: by prefilled token, and by turn that enters, in seconds.

    ``loads`` have Unix times, and ``entries`` are the times at which turns were asked for; without them all time is by
    token. A least-squares fit to the times between loads divides it, and what it gives both is the whole time.
    """
    rows = [
        (after["prefill_tokens"] - before["prefill_tokens"], after["busy_s"] - before["busy_s"])
        for (_, before), (_, after) in pairwise(loads)
    ]
    decode_s = [decode_totals(before, after)[2] for (_, before), (_, after) in pairwise(loads)]
    tokens, busy_s = np.array(rows, float).T
    beside_s = busy_s - np.array(decode_s)
    whole_s = max(0.0, float(beside_s.sum()))
    if not len(entries):
        return whole_s / max(1.0, float(tokens.sum())), 0.0
    entered = np.histogram(entries, [at for at, _ in loads])[0].astype(float)
    known = np.stack((tokens, entered), 1)
    costs = np.maximum(np.linalg.lstsq(known, beside_s, rcond=None)[0], 0.0)
    by_token, by_entry = costs * whole_s / max(float(known.sum(0) @ costs), 1e-9)
    return float(by_token), float(by_entry)


def loads_between(
    loads: Sequence[tuple[float, Mapping[str, Any]]], began_s: float, ended_s: float, *, where: str
) -> list[tuple[float, Mapping[str, Any]]]:
    """Returns the engine's loads from the begin to the end of the measured steps. Raises ValueError without them."""
    before = [one for one in loads if one[0] <= began_s and "decode_times" in one[1]]
    after = [one for one in loads if began_s < one[0] <= ended_s and "decode_times" in one[1]]
    if not before or not after:
        raise ValueError(
            f"{where}: loads={len(loads)}: the engine was not asked for its decode times before and after the measured "
            "train steps. Give --steps more, or --skip 1 or more."
        )
    return [before[-1], *after]


def decode_totals(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Returns the decode steps between two loads, their samples, their seconds, and how many were waits for a core."""
    first, last = (
        np.array(
            [(steps, steps * _middle(size), *times) for size, steps, *times in load["decode_times"]] or [(0.0,) * 4]
        )
        for load in (before, after)
    )
    steps, samples, seconds, waits = last.sum(0) - first.sum(0)
    return float(steps), float(samples), float(seconds), float(waits)


def _middle(size: int) -> float:
    """Returns the mean number of samples of decode steps that are counted under a number."""
    return size if size < EXACT_SIZES else size + (COARSE - 1) / 2


def decode_costs(loads: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[float, float]], float]:
    """Returns (samples, seconds of a decode step without its columns), and the seconds of a column.

    ``loads`` are those of an engine in order. Waits for a core are left out. Neighbouring numbers of samples are one
    entry until it has `FEWEST` decode steps. A least-squares fit to the times between loads finds the seconds of a
    column; the entries are what is left of the times.
    """
    last = {size: steps for size, steps, _, _ in loads[-1]["decode_times"]}
    entry_of: dict[int, int] = {}
    steps = entry = 0
    for size, count in last.items():
        entry_of[size] = entry
        steps += count
        if steps >= FEWEST:
            steps, entry = 0, entry + 1
    totals = np.array([_totals(load, entry_of, entries=entry + 1) for load in loads])
    totals = totals[:, totals[-1, :, 0] > 0]  # [loads, entries, (steps, samples, columns, seconds)]
    between = np.diff(totals, axis=0, prepend=0.0)
    known = np.concatenate((between[:, :, 0], between[:, :, 2].sum(1, keepdims=True)), 1)
    fitted = np.linalg.lstsq(known, between[:, :, 3].sum(1), rcond=None)[0]
    column_s = max(0.0, float(fitted[-1]))
    count, samples, columns, seconds = totals[-1].T
    table = zip(samples / count, np.maximum(seconds - column_s * columns, 0.1 * seconds) / count, strict=True)
    return [(float(size), float(of)) for size, of in table], column_s


def _totals(load: Mapping[str, Any], entry_of: Mapping[int, int], *, entries: int) -> np.ndarray:
    """Returns steps, samples, columns and seconds since the engine's start by entry, ``[entries, 4]``."""
    found = np.zeros((entries, 4))
    columns = dict(load["decode_columns"])
    for size, steps, seconds, wait in load["decode_times"]:
        found[entry_of[size]] += (steps, steps * _middle(size), columns[size], seconds - wait)
    return found


def train_line(actor: Sequence[Mapping[str, float]], ranks: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Returns the seconds of a train step and of each of its tokens, without waits for a core, by a line.

    If the line does not begin above 0, it goes through 0.
    """
    tokens = np.array([one["tokens"] for one in actor])
    seconds = np.array(
        [(one["train_ms"] - rank["actor-0/core_wait_ms"]) / 1e3 for one, rank in zip(actor, ranks, strict=True)]
    )
    by_token, fixed = np.polyfit(tokens, seconds, 1) if len(tokens) > 2 else (0.0, -1.0)
    if fixed < 0.0 or by_token < 0.0:
        return 0.0, float(seconds.sum() / tokens.sum())
    return float(fixed), float(by_token)
