"""Defines what the simulation of `benchmarks.long_tail` takes from a run, and checks it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_core.bus.state.settings import BusSettings

FIX = "Take the trace of a run that benchmarks.long_tail --keep FOLDER has made to its end."


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the simulation takes from a run; times are in seconds.

    ``lengths`` has the tokens of each answer by group, in order of issue. ``turns`` has the tokens of each of its
    turns, and ``waits_s`` the times of the tools between them; without ``turns`` each answer is one turn. ``decode_s``
    has (samples, time of a decode step without its columns) in order of samples, and ``column_s`` is the time of a
    column. ``prefill_s`` is by prefilled token, and ``entry_s`` by turn that enters the decode batch. ``train_s`` has
    the parts of a train step's time: for the step, and for each of its tokens. ``max_aborts`` is above 0 with
    rollout.partial=abort. ``whole_steps``: the trainer leases all groups of a step at one time. ``skipped_steps`` are
    left out of all rates.
    """

    bus: BusSettings
    lengths: list[list[int]]
    decode_s: list[tuple[float, float]]
    column_s: float
    prefill_s: float
    train_s: tuple[float, float]
    max_running_samples: int
    turns: list[list[list[int]]] = []
    waits_s: list[list[list[float]]] = []
    entry_s: float = 0.0
    max_aborts: int = 0
    whole_steps: bool = False
    skipped_steps: int = 0

    def turns_of(self, index: int) -> list[tuple[list[int], list[float]]]:
        """Returns the tokens of the turns of each sample of a group, and the times of the tools between them."""
        place = index % len(self.lengths)
        if not self.turns:
            return [([length], []) for length in self.lengths[place]]
        return list(zip(self.turns[place], self.waits_s[place], strict=True))

    def tokens_of(self, index: int) -> int:
        """Returns the tokens of all answers of a group."""
        return sum(self.lengths[index % len(self.lengths)])


def check_trace(trace: Trace, *, where: str) -> None:
    """Raises ValueError (key, value, fix) for a trace without lengths or without times."""
    values = [second for _, second in trace.decode_s]
    if not values or not all(math.isfinite(one) and one > 0.0 for one in values):
        raise ValueError(f"{where}: decode_s={trace.decode_s[:4]}: the simulation needs times of decode steps. {FIX}")
    if not all(math.isfinite(one) and one >= 0.0 for one in trace.train_s) or not any(trace.train_s):
        raise ValueError(f"{where}: train_s={trace.train_s}: the simulation needs the time of a train step. {FIX}")
    for key in ("column_s", "prefill_s", "entry_s"):
        if not 0.0 <= getattr(trace, key) < math.inf:
            raise ValueError(f"{where}: {key}={getattr(trace, key)}: the simulation needs a time of 0 or more. {FIX}")
    needed = trace.bus.total_steps * trace.bus.groups_per_step
    if len(trace.lengths) < needed:
        raise ValueError(f"{where}: lengths has {len(trace.lengths)} groups of the {needed} that are trained. {FIX}")
    if trace.turns or trace.waits_s:
        _check_turns(trace, where=where)


def _check_turns(trace: Trace, *, where: str) -> None:
    """Raises ValueError unless each answer has turns that make up its length, and a time between each two of them."""
    for key in ("turns", "waits_s"):
        sizes = [len(group) for group in getattr(trace, key)]
        if sizes != [len(group) for group in trace.lengths]:
            raise ValueError(f"{where}: {key} has {sum(sizes)} entries, not one for each answer of lengths. {FIX}")
    for number, length in enumerate(trace.lengths):
        for (turns, waits_s), tokens in zip(trace.turns_of(number), length, strict=True):
            if sum(turns) != tokens or min(turns, default=0) < 1:
                raise ValueError(f"{where}: turns={turns} of an answer of {tokens} tokens in group {number}. {FIX}")
            if len(waits_s) != len(turns) - 1 or not all(0.0 <= one < math.inf for one in waits_s):
                raise ValueError(
                    f"{where}: waits_s={waits_s} between {len(turns)} turns in group {number}: the simulation needs a "
                    f"time of 0 or more between each two turns. {FIX}"
                )


def read_trace(file: Path) -> Trace:
    """Returns the trace in a file. Raises ValueError for a file that is none or that lacks a part."""
    try:
        trace = msgspec.json.decode(file.read_bytes(), type=Trace)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: no trace of benchmarks.long_tail: {error}. Make one with --keep FOLDER.") from error
    check_trace(trace, where=str(file))
    return trace


def decode_seconds(table: Sequence[tuple[float, float]], samples: int) -> float:
    """Returns the time of a decode step, interpolated between the numbers of samples that were measured."""
    place = bisect_left(table, (samples, -math.inf))
    if place == 0:
        return table[0][1]
    if place == len(table):  # it grows as between the first and the last
        first, last = table[0], table[-1]
        slope = (last[1] - first[1]) / (last[0] - first[0]) if last[0] > first[0] else 0.0
        return last[1] + max(0.0, slope) * (samples - last[0])
    (low, fast), (high, slow) = table[place - 1], table[place]
    return fast + (slow - fast) * (samples - low) / (high - low)
