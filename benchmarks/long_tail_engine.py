"""The engine and the tools of the simulation of `benchmarks.long_tail`.

A sample leaves the decode batch at the end of each of its turns, waits for its tool, and enters again with a prefill.
As in the embedded engine (relax_core/engines/embedded/scheduler/prefix_store.py), that prefill computes what is new
since the turn before, or the whole context if other weights came into force meanwhile. A turn that goes on stands in
the queue before prompts that are new.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.countdown_task import PROMPT_TOKENS
from benchmarks.long_tail_trace import Trace, decode_seconds
from relax_core.contracts.bus import Admission
from relax_core.engines.embedded.model.decode_attention import columns_read
from relax_core.engines.embedded.scheduler.prefix_store import BLOCK


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """Is a group from its admission on.

    ``min_version`` is the oldest version that may give it its next token, and ``version`` the one that gave the first.
    ``open`` counts its samples without an end, and ``running`` those of them that are decoded.
    """

    admission: Admission
    min_version: int
    size: int
    open: int
    version: int = -1
    running: int = 0
    aborts: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """Is a sample of a group; ``turns`` and ``waits_s`` are those that it still has before it.

    ``context`` counts the tokens in front of the turn under way. The turn had ``done`` tokens when the sample last
    waited; with n tokens it ends in decode step ``origin`` + n of the engine. ``kept`` counts the tokens that its turn
    before has computed, under the weights ``entered``.
    """

    group: Group
    number: int
    turns: list[int]
    waits_s: list[float]
    context: int = PROMPT_TOKENS
    done: int = 0
    origin: int = 0
    kept: int = 0
    entered: int = -1

    def new_tokens(self, version: int) -> int:
        """Returns the tokens that its prefill computes under these weights."""
        known = self.kept if self.entered == version and self.kept >= BLOCK else 0
        return self.context + self.done - known

    def next_turn(self) -> None:
        """Goes on to the next turn, behind the answer of the tool."""
        self.kept = self.context + self.turns[0] - 1  # the newest token is not computed
        self.context += self.turns[0] + PROMPT_TOKENS
        self.turns, self.waits_s, self.done = self.turns[1:], self.waits_s[1:], 0


@dataclass(kw_only=True)
class Counts:
    """Counts what the engine has done since the start; ``tools_s`` is the time of all samples at their tools."""

    prefilled: int = 0  # tokens
    steps: int = 0  # of decoding
    decoded: int = 0  # tokens that decode steps have made
    tools_s: float = 0.0


End = tuple[float, str, int, Sample]  # decode step or time of an end, group uid, number of the sample, sample


def _end(at: float, sample: Sample) -> End:
    return at, sample.group.admission.group_uid, sample.number, sample


@dataclass(kw_only=True)
class Engine:
    """Is the engine: samples that wait, samples that run, and samples whose tools run.

    Samples that enter together wait together: those of a new group, those of a group that was aborted, or one whose
    tool has ended.
    """

    trace: Trace
    waiting: list[list[Sample]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)  # a heap of the ends of turns, in decode steps
    tools: list[End] = field(default_factory=list)  # a heap of the ends of tools, in seconds
    running: dict[str, Group] = field(default_factory=dict)
    until: float | None = None  # when the decode step under way ends
    turned: list[Sample] = field(default_factory=list)  # samples whose turns end then, and that have another one
    complete: list[Group] = field(default_factory=list)  # groups that are complete then
    counts: Counts = field(default_factory=Counts)

    def add(self, admission: Admission) -> None:
        """Adds an admitted group to the queue."""
        turns = self.trace.turns_of(admission.index)
        group = Group(admission=admission, min_version=admission.min_version, size=len(turns), open=len(turns))
        self.waiting.append(
            [
                Sample(group=group, number=number, turns=tokens, waits_s=waits_s)
                for number, (tokens, waits_s) in enumerate(turns)
            ]
        )

    def begin(self, now: float, version: int) -> None:
        """Prefills the samples that may enter and begins a decode step, if there is anything to do."""
        entered, prefilled = self._admit(version)
        self.counts.prefilled += prefilled
        seconds = self.trace.prefill_s * prefilled + self.trace.entry_s * entered
        self._finish()
        if self.ends:
            lengths = np.array([sample.context - sample.origin for *_, sample in self.ends]) + self.counts.steps
            columns = columns_read(lengths)
            seconds += decode_seconds(self.trace.decode_s, len(self.ends)) + self.trace.column_s * columns
            self.counts.steps += 1
            self.counts.decoded += len(self.ends)
            self._finish()
        if prefilled or seconds:
            self.until = now + seconds

    def end(self, now: float) -> list[Group]:
        """Ends the decode step under way; returns the groups that it completes."""
        self.until = None
        for sample in self.turned:
            heapq.heappush(self.tools, _end(now + sample.waits_s[0], sample))
        self.turned = []
        complete, self.complete = self.complete, []
        return complete

    def end_tools(self, now: float) -> None:
        """Puts the samples whose tools have ended into the queue, before the groups that are new."""
        while self.tools and self.tools[0][0] <= now:
            *_, sample = heapq.heappop(self.tools)
            sample.next_turn()
            self.waiting.append([sample])
        self.waiting.sort(key=lambda one: not one[0].kept)

    def _admit(self, version: int) -> tuple[int, int]:
        """Returns how many samples enter, and how many tokens are prefilled for them."""
        held: list[list[Sample]] = []
        entered = prefilled = seen = 0
        for samples in self.waiting:
            if samples[0].group.min_version > version:
                held.append(samples)
            elif len(self.ends) + len(samples) > self.trace.max_running_samples:
                break
            else:
                entered += len(samples)
                prefilled += self._enter(samples, version)
            seen += 1
        self.waiting = held + self.waiting[seen:]
        return entered, prefilled

    def _enter(self, samples: Sequence[Sample], version: int) -> int:
        """Lets samples run; the prefill gives each its next token. Returns how many tokens are prefilled."""
        group = samples[0].group
        is_new = group.version < 0  # its samples share the prefill of their prompt
        group.version = version if is_new else group.version
        group.running += len(samples)
        self.running[group.admission.group_uid] = group
        prefilled = PROMPT_TOKENS if is_new else sum(sample.new_tokens(version) for sample in samples)
        for sample in samples:
            sample.origin, sample.entered = self.counts.steps - sample.done - 1, version
            heapq.heappush(self.ends, _end(sample.origin + sample.turns[0], sample))
        return prefilled

    def _finish(self) -> None:
        while self.ends and self.ends[0][0] <= self.counts.steps:
            _, uid, _, sample = heapq.heappop(self.ends)
            group = sample.group
            group.running -= 1
            if not group.running:
                del self.running[uid]
            if len(sample.turns) > 1:
                self.turned.append(sample)
                continue
            group.open -= 1
            if not group.open:
                self.complete.append(group)

    def remove(self, uids: Sequence[str]) -> None:
        """Ends groups that no step needs any more."""
        gone = set(uids)
        self.waiting = [one for one in self.waiting if one[0].group.admission.group_uid not in gone]
        self.turned = [one for one in self.turned if one.group.admission.group_uid not in gone]
        self.tools = [one for one in self.tools if one[1] not in gone]
        heapq.heapify(self.tools)
        self._stop(gone)

    def abort(self, version: int) -> None:
        """Sends running samples back to the queue, from where they go on with the new weights."""
        most = self.trace.max_aborts
        chosen = [one for one in self.running.values() if one.min_version < version and one.aborts < most]
        stopped = self._stop({one.admission.group_uid for one in chosen})
        for group in chosen:
            samples = [sample for sample in stopped if sample.group is group]
            for sample in samples:
                sample.done, sample.kept = self.counts.steps - sample.origin, 0
            group.min_version, group.aborts = version, group.aborts + 1
            self.waiting.append(samples)

    def _stop(self, uids: set[str]) -> list[Sample]:
        """Takes the samples of these groups out of the decode batch and returns them."""
        stopped = [sample for _, uid, _, sample in sorted(self.ends, key=lambda one: one[:3]) if uid in uids]
        self.running = {uid: group for uid, group in self.running.items() if uid not in uids}
        self.ends = [one for one in self.ends if one[1] not in uids]
        heapq.heapify(self.ends)
        for sample in stopped:
            sample.group.running = 0
        return stopped
