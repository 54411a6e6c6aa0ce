"""The limit of `benchmarks.long_tail`: how fast a run could be with the same answers and no overhead.

An event-driven simulation of one engine and one trainer. The bus is the run's own state machine (`BusCore`), with the
simulation's clock: it admits groups, holds them to the staleness rule, leases them, and drops what is stale or surplus.
Groups enter the engine in order of issue as soon as its weights have their version and a slot is free; all samples that
run get one token in each decode step. The trainer leases each group of its step as soon as it is complete, and trains
on it while others are decoded. With mode=colocate it leases whole steps.

From the run come the lengths of all answers by group, the time of a decode step by its number of samples and by the
columns that its attention reads (`columns_read`), the time of the engine beside decode steps (prefills and
the ends of samples) by prefilled token, and the time of a train step as a line over its tokens. Waits of the decode
thread and of the trainer for a core are taken out of these times.

Everything else takes no time: the bus, requests and responses, rewards, the making of trees, the push of weights and
what an engine stands still for it, records, and the change between engine and trainer with mode=colocate. So the limit
is what the same engine and the same trainer could do, not what better ones could.

    python -m benchmarks.long_tail_limit TRACE.json …        # traces that benchmarks.long_tail has kept
"""

from __future__ import annotations

import argparse
import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from relax_core.bus.ledger.ledger import Ledger
from relax_core.bus.state.bus_state import BusCore
from relax_core.bus.state.settings import BusSettings
from relax_core.contracts.bus import Admission, CompleteGroup, Lease, LeaseRequest
from relax_core.contracts.tree import sample_uid
from relax_core.engines.embedded.model.decode_attention import columns_read

COLUMN = "answers"  # stands for the columns of a group, which the simulation does not need
PROMPT_TOKENS = 2  # of benchmarks/countdown_task.py


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the simulation takes from a run; times are in seconds.

    ``lengths`` has the tokens of each answer by group, in order of issue. ``decode_s`` has (samples, time of a decode
    step without its columns) in order of samples, and ``column_s`` is the time of a column. ``prefill_s`` is by
    prefilled token. ``train_s`` has the parts of a train step's time: for
    the step, and for each of its tokens. ``max_aborts`` is above 0 with rollout.partial=abort. ``whole_steps``: the
    trainer leases all groups of a step at one time. ``skipped_steps`` are left out of all rates.
    """

    bus: BusSettings
    lengths: list[list[int]]
    decode_s: list[tuple[float, float]]
    column_s: float
    prefill_s: float
    train_s: tuple[float, float]
    max_running_samples: int
    max_aborts: int = 0
    whole_steps: bool = False
    skipped_steps: int = 0


def check_trace(trace: Trace, *, where: str) -> None:
    """Raises ValueError (key, value, fix) for a trace without lengths or without times."""
    fix = "Take the trace of a run that benchmarks.long_tail --keep FOLDER has made to its end."
    values = [second for _, second in trace.decode_s]
    if not values or not all(math.isfinite(one) and one > 0.0 for one in values):
        raise ValueError(f"{where}: decode_s={trace.decode_s[:4]}: the simulation needs times of decode steps. {fix}")
    if not all(math.isfinite(one) and one >= 0.0 for one in trace.train_s) or not any(trace.train_s):
        raise ValueError(f"{where}: train_s={trace.train_s}: the simulation needs the time of a train step. {fix}")
    for key in ("column_s", "prefill_s"):
        if not 0.0 <= getattr(trace, key) < math.inf:
            raise ValueError(f"{where}: {key}={getattr(trace, key)}: the simulation needs a time of 0 or more. {fix}")
    needed = trace.bus.total_steps * trace.bus.groups_per_step
    if len(trace.lengths) < needed:
        raise ValueError(f"{where}: lengths has {len(trace.lengths)} groups of the {needed} that are trained. {fix}")


def read_trace(file: Path) -> Trace:
    """Returns the trace in a file. Raises ValueError for a file that is none or that lacks a part."""
    try:
        trace = msgspec.json.decode(file.read_bytes(), type=Trace)
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: no trace of benchmarks.long_tail: {error}. Make one with --keep FOLDER.") from error
    check_trace(trace, where=str(file))
    return trace


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Holds what a simulation found: when each train step ended, in seconds, and what it trained.

    ``samples``, ``tokens`` and ``waited_s``, the time that the trainer waited, are by step. ``staleness`` counts
    trained samples, and ``dropped`` samples by reason.
    """

    ended_s: list[float]
    samples: list[int]
    tokens: list[int]
    staleness: dict[int, int]
    dropped: dict[str, int]
    waited_s: list[float]

    def samples_per_s(self, skipped_steps: int) -> float:
        """Returns the trained samples a second of all steps but the first and the last, where the queues empty."""
        steps = slice(skipped_steps, len(self.ended_s) - 1)
        began = self.ended_s[skipped_steps - 1] if skipped_steps else 0.0
        return sum(self.samples[steps]) / (self.ended_s[-2] - began)


@dataclass(slots=True, kw_only=True)
class _Group:
    """Is a group from its admission on.

    ``min_version`` is the oldest version that may give it its next token, and ``version`` the one that gave the first.
    ``open`` counts its samples without an end, each of which had ``done`` tokens when the group last waited. A sample
    of n tokens ends in decode step ``origin`` + n of the engine.
    """

    admission: Admission
    lengths: list[int]
    min_version: int
    open: int
    version: int = -1
    done: int = 0
    origin: int = 0
    aborts: int = 0


@dataclass(kw_only=True)
class _Engine:
    """Is the engine: groups that wait, and samples that run, which end at a count of decode steps."""

    trace: Trace
    waiting: deque[_Group] = field(default_factory=deque)
    ends: list[tuple[int, str]] = field(default_factory=list)  # a heap of (count of decode steps, group uid)
    groups: dict[str, _Group] = field(default_factory=dict)  # those that run
    count: int = 0
    until: float | None = None  # when the decode step under way ends
    complete: list[_Group] = field(default_factory=list)  # groups that it completes

    def begin(self, now: float, version: int) -> None:
        """Prefills the groups that may enter and begins a decode step, if there is anything to do."""
        prefilled = self._admit(version)
        seconds = self.trace.prefill_s * prefilled
        self._finish()
        if self.ends:
            origins = np.array([self.groups[uid].origin for _, uid in self.ends])
            columns = columns_read(PROMPT_TOKENS + self.count - origins)
            seconds += decode_seconds(self.trace.decode_s, len(self.ends)) + self.trace.column_s * columns
            self.count += 1
            self._finish()
        if prefilled or seconds:
            self.until = now + seconds

    def _admit(self, version: int) -> int:
        """Returns how many tokens are prefilled."""
        held: list[_Group] = []
        prefilled = 0
        while self.waiting:
            group = self.waiting.popleft()
            if group.min_version > version:
                held.append(group)
            elif len(self.ends) + group.open > self.trace.max_running_samples:
                self.waiting.appendleft(group)
                break
            else:
                prefilled += self._enter(group, version)
        self.waiting.extendleft(reversed(held))
        return prefilled

    def _enter(self, group: _Group, version: int) -> int:
        """Lets a group run; the prefill gives each sample its next token. Returns how many tokens are prefilled."""
        uid = group.admission.group_uid
        left = [length for length in group.lengths if length > group.done]
        group.version = version if group.version < 0 else group.version
        group.origin = self.count - group.done - 1
        self.groups[uid] = group
        for length in left:
            heapq.heappush(self.ends, (group.origin + length, uid))
        return len(left) * (PROMPT_TOKENS + group.done) if group.done else PROMPT_TOKENS

    def _finish(self) -> None:
        while self.ends and self.ends[0][0] <= self.count:
            _, uid = heapq.heappop(self.ends)
            group = self.groups[uid]
            group.open -= 1
            if not group.open:
                self.complete.append(self.groups.pop(uid))

    def remove(self, uids: Sequence[str]) -> None:
        """Ends groups that no step needs any more."""
        gone = set(uids)
        self.waiting = deque(group for group in self.waiting if group.admission.group_uid not in gone)
        self._stop(gone)

    def abort(self, version: int) -> None:
        """Sends running groups back to the queue, from where they go on with the new weights."""
        most = self.trace.max_aborts
        chosen = [one for one in self.groups.values() if one.min_version < version and one.aborts < most]
        self._stop({one.admission.group_uid for one in chosen})
        for group in chosen:
            group.done = self.count - group.origin
            group.min_version, group.aborts = version, group.aborts + 1
            self.waiting.append(group)

    def _stop(self, uids: set[str]) -> None:
        self.groups = {uid: group for uid, group in self.groups.items() if uid not in uids}
        self.ends = [one for one in self.ends if one[1] not in uids]
        heapq.heapify(self.ends)


class Simulation:
    """Runs all train steps of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.now = 0.0
        self._trace = trace
        self._bus = BusCore(
            trace.bus, ledger=Ledger(group_size=trace.bus.group_size, journal=None), clock=lambda: self.now
        )
        self._engine = _Engine(trace=trace)
        self._step_leases: list[Lease] = []
        self._until: float | None = None  # when the trainer's work on its newest lease ends
        self._ended: list[float] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._waited = [0.0]  # by step, the one under way included

    def run(self) -> Simulated:
        """Returns what was found. Raises AssertionError if a sample is lost or trained twice."""
        while not self._bus.finished():
            self._admit()
            if self._engine.until is None and not (self._trace.whole_steps and self._until is not None):
                self._engine.begin(self.now, self._bus.version)
            if self._until is None:
                self._lease()
            self._advance()
        counts = self._bus.progress().ledger
        assert counts.lost == counts.trained_twice == 0, counts
        return Simulated(
            ended_s=self._ended,
            samples=self._samples,
            tokens=self._tokens,
            staleness=dict(sorted(self._bus.staleness.items())),
            dropped=counts.dropped,
            waited_s=self._waited[: len(self._ended)],
        )

    def _admit(self) -> None:
        most = self._trace.bus.groups_per_step + self._trace.bus.spare_groups
        while admissions := self._bus.admit(most):
            for one in admissions:
                lengths = self._trace.lengths[one.index % len(self._trace.lengths)]
                self._engine.waiting.append(
                    _Group(admission=one, lengths=lengths, min_version=one.min_version, open=len(lengths))
                )

    def _lease(self) -> None:
        """Leases groups and begins to train on them, if enough are ready."""
        trace = self._trace
        remaining = trace.bus.groups_per_step - sum(len(lease.rows) for lease in self._step_leases)
        request = LeaseRequest(
            task="actor",
            columns=(COLUMN,),
            min_groups=remaining if trace.whole_steps else 1,
            max_groups=remaining,
            step=self._bus.version,
            lease_s=math.inf,
        )
        lease = self._bus.lease(request)
        if lease is None:
            return
        self._step_leases.append(lease)
        fixed, by_token = trace.train_s
        tokens = sum(sum(self._lengths(row.index)) for row in lease.rows)
        self._until = self.now + by_token * tokens + (fixed if len(lease.rows) == remaining else 0.0)

    def _lengths(self, index: int) -> list[int]:
        return self._trace.lengths[index % len(self._trace.lengths)]

    def _advance(self) -> None:
        """Goes on to the next end of a decode step or of the trainer's work."""
        ends = [one for one in (self._engine.until, self._until) if one is not None]
        assert ends, "neither the engine nor the trainer has anything to do"
        then = min(ends)
        if self._until is None:
            self._waited[-1] += then - self.now
        self.now = then
        if self._engine.until == then:
            self._engine.until = None
            complete, self._engine.complete = self._engine.complete, []
            self._bus.put([self._complete(group) for group in complete])
        if self._until == then:
            self._until = None
            if sum(len(lease.rows) for lease in self._step_leases) == self._trace.bus.groups_per_step:
                self._end_step()

    def _complete(self, group: _Group) -> CompleteGroup:
        uid = group.admission.group_uid
        uids = [sample_uid(uid, number) for number in range(len(group.lengths))]
        versions = [group.version] * len(uids)
        return CompleteGroup(
            group_uid=uid, index=group.admission.index, uids=uids, versions=versions, columns={COLUMN: b""}
        )

    def _end_step(self) -> None:
        version = self._bus.version
        rows = [row for lease in self._step_leases for row in lease.rows]
        self._bus.ack([lease.lease_id for lease in self._step_leases], step=version, dropped={})
        self._step_leases = []
        self._ended.append(self.now)
        self._waited.append(0.0)
        self._samples.append(sum(len(row.uids) for row in rows))
        self._tokens.append(sum(sum(self._lengths(row.index)) for row in rows))
        if self._bus.finished():
            return
        change = self._bus.version_change(version)
        assert change is not None
        self._engine.remove(change.retired)
        if self._trace.max_aborts:
            self._engine.abort(self._bus.version)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    for file in parser.parse_args().traces:
        try:
            trace = read_trace(file)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        found = Simulation(trace).run()
        print(f"{file.stem}: {found.samples_per_s(trace.skipped_steps):.1f} samples/s, staleness {found.staleness}")


if __name__ == "__main__":
    main()
