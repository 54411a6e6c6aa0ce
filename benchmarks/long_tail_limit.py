"""The limit of `benchmarks.long_tail`: how fast a run could be with the same answers and no overhead.

An event-driven simulation of one engine and one trainer. The bus is the run's own state machine (`BusCore`), with the
simulation's clock: it admits groups, holds them to the staleness rule, leases them, and drops what is stale or surplus.
Groups enter the engine in order of issue as soon as its weights have their version and a slot is free; all samples that
run get one token in each decode step. Between two turns of a sample its tool runs, which takes no slot
(benchmarks/long_tail_engine.py). The trainer leases each group of its step as soon as it is complete, and trains on it
while others are decoded. With mode=colocate it leases whole steps.

From the run come the lengths of all turns by group, the times that are drawn for their tools, the time of a decode
step by its number of samples and by the columns that its attention reads (`columns_read`), the time of the engine
beside decode steps (prefills and the ends of samples) by prefilled token and, with several turns, by turn, and the time
of a train step as a line over its tokens. Waits of the decode thread and of the trainer for a core are taken out of
these times.

Everything else takes no time: the bus, requests and responses, rewards, the making of trees, the push of weights and
what an engine stands still for it, records, and the change between engine and trainer with mode=colocate. So the limit
is what the same engine and the same trainer could do, not what better ones could.

    python -m benchmarks.long_tail_limit TRACE.json …        # traces that benchmarks.long_tail has kept
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.long_tail_engine import Counts, Engine, Group
from benchmarks.long_tail_trace import Trace, read_trace
from relax_core.bus.ledger.ledger import Ledger
from relax_core.bus.state.bus_state import BusCore
from relax_core.contracts.bus import CompleteGroup, Lease, LeaseRequest
from relax_core.contracts.tree import sample_uid

COLUMN = "answers"  # stands for the columns of a group, which the simulation does not need


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Holds what a simulation found: when each train step ended, in seconds, and what it trained.

    ``samples``, ``tokens`` and ``waited_s``, the time that the trainer waited, are by step. ``staleness`` counts
    trained samples, and ``dropped`` samples by reason. ``counts`` are those of the engine at the end of each step.
    """

    ended_s: list[float]
    samples: list[int]
    tokens: list[int]
    staleness: dict[int, int]
    dropped: dict[str, int]
    waited_s: list[float]
    counts: list[Counts]

    def samples_per_s(self, skipped_steps: int) -> float:
        """Returns the trained samples a second of all steps but the first and the last, where the queues empty."""
        steps = slice(skipped_steps, len(self.ended_s) - 1)
        began = self.ended_s[skipped_steps - 1] if skipped_steps else 0.0
        return sum(self.samples[steps]) / (self.ended_s[-2] - began)


class Simulation:
    """Runs all train steps of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.now = 0.0
        self._trace = trace
        self._bus = BusCore(
            trace.bus, ledger=Ledger(group_size=trace.bus.group_size, journal=None), clock=lambda: self.now
        )
        self._engine = Engine(trace=trace)
        self._step_leases: list[Lease] = []
        self._until: float | None = None  # when the trainer's work on its newest lease ends
        self._ended: list[float] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._waited = [0.0]  # by step, the one under way included
        self._counts: list[Counts] = []

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
            counts=self._counts,
        )

    def _admit(self) -> None:
        most = self._trace.bus.groups_per_step + self._trace.bus.spare_groups
        while admissions := self._bus.admit(most):
            for one in admissions:
                self._engine.add(one)

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
        tokens = sum(trace.tokens_of(row.index) for row in lease.rows)
        self._until = self.now + by_token * tokens + (fixed if len(lease.rows) == remaining else 0.0)

    def _advance(self) -> None:
        """Goes on to the next end of a decode step, of a tool or of the trainer's work."""
        engine = self._engine
        ends = [one for one in (engine.until, self._until) if one is not None] + [at for at, *_ in engine.tools[:1]]
        assert ends, "neither the engine nor a tool nor the trainer has anything to do"
        then = min(ends)
        if self._until is None:
            self._waited[-1] += then - self.now
        engine.counts.tools_s += len(engine.tools) * (then - self.now)
        self.now = then
        if engine.until == then:
            self._bus.put([self._complete(group) for group in engine.end(then)])
        engine.end_tools(then)
        if self._until == then:
            self._until = None
            if sum(len(lease.rows) for lease in self._step_leases) == self._trace.bus.groups_per_step:
                self._end_step()

    @staticmethod
    def _complete(group: Group) -> CompleteGroup:
        uid = group.admission.group_uid
        uids = [sample_uid(uid, number) for number in range(group.size)]
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
        self._counts.append(replace(self._engine.counts))
        self._samples.append(sum(len(row.uids) for row in rows))
        self._tokens.append(sum(self._trace.tokens_of(row.index) for row in rows))
        if self._bus.finished():
            return
        change = self._bus.version_change(version)
        assert change is not None
        self._engine.remove(change.retired)
        if self._trace.max_aborts:
            self._engine.abort(self._bus.version)


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
