"""Detects stragglers: processes that are slower than their peers in three consecutive windows.

The comparison uses the time of a process without its waits for other processes, because a collective operation makes
all ranks as slow as the slowest rank. Each process is compared with the median of its peers, for the same amount of
work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import msgspec

from relax_core.contracts.train import OWN_PARTS
from relax_core.observe.event_log import RANK, ROLLOUT, MetricRecord, TextCell, TextRecord, is_resume

WINDOW_STEPS = 15  # train steps per window
ENGINE_WINDOW_STEPS = 10  # train steps per window of the engines; polling may end it a second late
WINDOWS = 3  # consecutive windows
MAX_SLOWDOWN = 0.10  # relative excess over the peers' median up to which a process is not slow
MAX_EXCESS_MS = 5.0  # excess in milliseconds per train step up to which a process is not slow
TRIMMED = 2  # number of slowest and of fastest steps that a window ignores, to exclude single pauses
MAX_WINDOWS = 100  # newest windows kept per process, because a process may be slow for days
CROWDED = 0.05  # if peers wait for a CPU core for at least this share of their time, such waits are subtracted
MIN_COVERED_SHARE = 0.5  # an engine is compared if its peers cover this share of its decode time with equal batch sizes

Times = Mapping[str, float]  # name of a part of the work → milliseconds


class DecodeTime(NamedTuple):
    """Holds the number of decode steps of one batch size, their time, and their wait time for a CPU core."""

    steps: int
    seconds: float
    core_wait_s: float = 0.0

    def a_step(self, *, waits: bool) -> float:
        """Returns the seconds of one step, with or without the waits for a CPU core."""
        return (self.seconds if waits else max(0.0, self.seconds - self.core_wait_s)) / self.steps


DecodeTimes = Mapping[int, DecodeTime]  # batch size of a decode step → its times


@dataclass(frozen=True, kw_only=True)
class Work:
    """Holds the work of one process in one train step, without waits for other processes.

    ``wall_ms`` has the wall time of each part, and ``cpu_ms`` the CPU time. ``core_wait_ms`` is the part of the wall
    time when the process was ready to run but had no CPU core. ``amount`` is the amount of work, such as the number of
    token rows. All peers use the same unit.
    """

    wall_ms: Times
    cpu_ms: Times = field(default_factory=dict)
    core_wait_ms: float = 0.0
    amount: float = 1.0

    @property
    def whole_ms(self) -> float:
        """Returns the wall time of all parts."""
        return sum(self.wall_ms.values())

    @property
    def worked_ms(self) -> float:
        """Returns the wall time of all parts without the waits for a CPU core."""
        return max(0.0, self.whole_ms - self.core_wait_ms)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Compares a process with its peers in one window. All times are milliseconds per train step.

    ``own_ms`` is the time of the process. ``others_ms`` is the median time of its peers for the same work. ``part`` is
    the part of the work with the largest difference. ``cpu_slower`` is the relative excess of the CPU time over the
    peers' CPU time, or None if unknown.
    """

    own_ms: float
    others_ms: float
    part: str
    others: tuple[str, ...]
    cpu_slower: float | None = None

    @property
    def slower(self) -> float:
        """Returns the relative excess over the peers' time. It is negative for a faster process."""
        return self.own_ms / self.others_ms - 1.0 if self.others_ms > 0 else 0.0

    @property
    def excess_ms(self) -> float:
        """Returns the excess over the peers' time, in milliseconds per train step."""
        return self.own_ms - self.others_ms

    @property
    def is_slow(self) -> bool:
        """Returns whether the time exceeds both limits."""
        return self.slower > MAX_SLOWDOWN and self.excess_ms > MAX_EXCESS_MS


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Holds the newest consecutive slow windows of one process, and the first and last train step of the streak."""

    from_step: int
    to_step: int
    windows: tuple[Compared, ...]

    @property
    def is_named(self) -> bool:
        """Returns whether the streak is long enough to call the process a straggler."""
        return len(self.windows) >= WINDOWS


# -- One window -------------------------------------------------------------------------------------------------------
def compared_work(steps: Sequence[Mapping[str, Work]]) -> dict[str, Compared]:
    """Compares each process with its peers over the steps of a window. Each step maps process → work.

    Leaves out a process that is missing or idle in a step. If fewer than two processes remain, the result is empty. The
    mean of a process ignores its slowest and fastest steps, to exclude single pauses. If the peers also wait for CPU
    cores, there are more processes than cores, and the kernel chooses between them at random. Then waits for a core are
    subtracted from the time of a process.
    """
    names = sorted(set.intersection(*(set(step) for step in steps))) if steps else []
    whole = {name: [step[name] for step in steps] for name in names}
    worked = {name: found for name, found in whole.items() if all(work.amount > 0 for work in found)}
    if len(worked) < 2:
        return {}
    shares = {name: _waiting_share(found) for name, found in worked.items()}
    means = {
        counted: {name: _mean_work(work, waits=counted) for name, work in worked.items()} for counted in (False, True)
    }
    compared = {}
    for name in worked:
        crowded = median(share for peer, share in shares.items() if peer != name) >= CROWDED
        compared[name] = _compared_with_peers(name, means[not crowded])
    return compared


def compared_decoding(engines: Mapping[str, DecodeTimes], *, steps: int) -> dict[str, Compared]:
    """Compares the decode steps of each engine with its peers, over a window of ``steps`` train steps.

    The time of a decode step is compared with the peers' time for the same batch size, so idle time has no effect.
    Leaves out an engine if its peers decoded too few batches of the same sizes. Waits for a CPU core are handled as in
    `compared_work`.
    """
    shares = {name: _decoding_share(times) for name, times in engines.items() if times}
    found = {}
    for name in shares if len(shares) > 1 else ():
        waits = median(share for peer, share in shares.items() if peer != name) < CROWDED
        covered_s = expected_s = 0.0
        peers: set[str] = set()
        for size, own in engines[name].items():
            known = {
                peer: engines[peer][size].a_step(waits=waits)
                for peer in shares
                if peer != name and size in engines[peer]
            }
            if known:
                covered_s += own.steps * own.a_step(waits=waits)
                expected_s += own.steps * median(known.values())
                peers |= known.keys()
        whole_s = sum(own.steps * own.a_step(waits=waits) for own in engines[name].values())
        if expected_s > 0.0 and covered_s >= MIN_COVERED_SHARE * whole_s:
            found[name] = Compared(
                own_ms=1e3 * covered_s / steps,
                others_ms=1e3 * expected_s / steps,
                part="decode",
                others=tuple(sorted(peers)),
            )
    return found


def _decoding_share(times: DecodeTimes) -> float:
    whole_s = sum(decode_time.seconds for decode_time in times.values())
    return sum(decode_time.core_wait_s for decode_time in times.values()) / whole_s if whole_s else 0.0


def _waiting_share(steps: Sequence[Work]) -> float:
    whole_ms = sum(step.whole_ms for step in steps)
    return sum(step.core_wait_ms for step in steps) / whole_ms if whole_ms else 0.0


def _mean_work(steps: Sequence[Work], *, waits: bool) -> Work:
    """Returns the mean per unit of work over the steps, without the slowest and the fastest steps.

    With ``waits``, waits for a CPU core are part of the work, and ``core_wait_ms`` of the result is 0.
    """
    if waits:
        steps = [replace(step, core_wait_ms=0.0) for step in steps]
    order = sorted(steps, key=lambda step: step.worked_ms / step.amount)
    kept = order[TRIMMED:-TRIMMED] if len(order) > 2 * TRIMMED else order
    parts = dict.fromkeys(part for step in kept for part in step.wall_ms)
    cpu = dict.fromkeys(part for step in kept for part in step.cpu_ms)
    return Work(
        wall_ms={part: fmean(step.wall_ms.get(part, 0.0) / step.amount for step in kept) for part in parts},
        cpu_ms={part: fmean(step.cpu_ms.get(part, 0.0) / step.amount for step in kept) for part in cpu},
        core_wait_ms=fmean(step.core_wait_ms / step.amount for step in kept),
        amount=fmean(step.amount for step in kept),
    )


def _compared_with_peers(name: str, means: Mapping[str, Work]) -> Compared:
    own = means[name]
    peers = {peer: mean for peer, mean in means.items() if peer != name}

    def of_others(times: str, part: str) -> float:
        return median(getattr(mean, times).get(part, 0.0) for mean in peers.values())

    excess = {part: value - of_others("wall_ms", part) for part, value in own.wall_ms.items()}
    own_cpu, others_cpu = (
        sum(own.cpu_ms.values()),
        median(sum(mean.cpu_ms.values()) for mean in peers.values()),
    )
    return Compared(
        own_ms=own.amount * own.worked_ms,
        others_ms=own.amount * median(mean.worked_ms for mean in peers.values()),
        part=max(sorted(excess), key=lambda part: excess[part], default=""),
        others=tuple(sorted(peers)),
        cpu_slower=own_cpu / others_cpu - 1.0 if own_cpu and others_cpu else None,
    )


# -- Consecutive windows ---------------------------------------------------------------------------------------------
def advanced(
    streaks: Mapping[str, Streak], window: Mapping[str, Compared], *, from_step: int, to_step: int
) -> dict[str, Streak]:
    """Returns the streaks after one more window, which covers train steps ``from_step`` to ``to_step``.

    A process that is not slow in the window loses its streak. A process that is missing in the window keeps its streak,
    because its speed is unknown.
    """
    found = {name: streak for name, streak in streaks.items() if name not in window}
    for name, compared in window.items():
        if not compared.is_slow:
            continue
        before = streaks.get(name)
        if before is None:
            found[name] = Streak(from_step=from_step, to_step=to_step, windows=(compared,))
        else:
            found[name] = replace(before, to_step=to_step, windows=(*before.windows, compared)[-MAX_WINDOWS:])
    return found


def without(streaks: Mapping[str, Streak], gone: Collection[str]) -> dict[str, Streak]:
    """Returns the streaks of the processes that are not among ``gone``."""
    return {name: streak for name, streak in streaks.items() if name not in gone}


STRAGGLER = "straggler"  # source of the metric records, and kind of the text records
MAX_NAMES = 4  # limit of peers that a message lists

Kind = Literal["rank", "engine", "reward worker"]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a process that was slower than its peers from train step ``from_step`` to ``to_step``.

    ``who`` is the name of the worker. ``part`` is the part of its work with the largest difference. ``slower`` is the
    relative excess: 0.3 means 1.3 times the median time of ``compared_with`` for the same work. ``excess_ms`` is the
    excess in milliseconds per train step. ``cpu_slower`` is the relative excess of CPU time, or None if unknown.
    ``ended`` is False while the process is still slow.
    """

    kind: Kind
    who: str
    part: str
    from_step: int
    to_step: int
    slower: float
    excess_ms: float
    compared_with: tuple[str, ...]
    cpu_slower: float | None = None
    ended: bool = False


def straggler_of(kind: Kind, who: str, streak: Streak, *, ended: bool) -> Straggler:
    """Returns a straggler with the metrics of a streak."""
    windows = streak.windows
    cpu = [window.cpu_slower for window in windows if window.cpu_slower is not None]
    parts = [window.part for window in windows]
    return Straggler(
        kind=kind,
        who=who,
        part=max(sorted(set(parts)), key=parts.count),
        from_step=streak.from_step,
        to_step=streak.to_step,
        slower=round(median(window.slower for window in windows), 4),
        excess_ms=round(fmean(window.excess_ms for window in windows), 3),
        compared_with=windows[-1].others,
        cpu_slower=round(median(cpu), 4) if cpu else None,
        ended=ended,
    )


def straggler_text(straggler: Straggler) -> str:
    """Returns one sentence with the facts about a straggler."""
    names = ", ".join(straggler.compared_with[:MAX_NAMES])
    names += f" and {len(straggler.compared_with) - MAX_NAMES} more" if len(straggler.compared_with) > MAX_NAMES else ""
    median_of = f"the median of {names}" if len(straggler.compared_with) > 1 else names
    cpu = "" if straggler.cpu_slower is None else f"; its processor time is {straggler.cpu_slower:+.0%}"
    was = "was" if straggler.ended else "is"
    return (
        f"{straggler.who} {was} slow: {straggler.slower:.0%} and {straggler.excess_ms:.0f} ms a "
        f"train step beyond {median_of}, "
        f"most of it in {straggler.part}, in train steps {straggler.from_step} to {straggler.to_step}{cpu}"
    )


def straggler_brief(straggler: Straggler) -> str:
    """Returns a short description of a current straggler, for a line of the panel."""
    return f"{straggler.who} +{straggler.slower:.0%} in {straggler.part}"


def straggler_numbers(straggler: Straggler) -> dict[str, float]:
    """Returns the numbers of a straggler for a record of the source `STRAGGLER`."""
    numbers = {
        "slower": straggler.slower,
        "excess_ms": straggler.excess_ms,
        "from_step": straggler.from_step,
        "to_step": straggler.to_step,
    }
    return {f"{straggler.who}/{name}": float(value) for name, value in {**numbers, "ended": straggler.ended}.items()}


def straggler_row(straggler: Straggler) -> dict[str, TextCell]:
    """Returns a straggler as a row of a text record of the kind `STRAGGLER`."""
    return {
        **msgspec.to_builtins(straggler),
        "compared_with": " ".join(straggler.compared_with),
        "words": straggler_text(straggler),
    }


def straggler_of_row(row: Mapping[str, Any]) -> Straggler:
    """Converts a row of `straggler_row` to a straggler. Raises msgspec.ValidationError for any other row."""
    known = {name: value for name, value in row.items() if name != "words"}
    return msgspec.convert({**known, "compared_with": str(row.get("compared_with", "")).split()}, Straggler)


def reported_stragglers(texts: Iterable[TextRecord]) -> list[Straggler]:
    """Returns each straggler in ``texts`` once, with its newest values, in the order of the first reports."""
    found: dict[tuple[str, int], Straggler] = {}
    for text in texts:
        if text.kind == STRAGGLER:
            for straggler in map(straggler_of_row, text.rows):
                found[straggler.who, straggler.from_step] = straggler
    return list(found.values())


REWARD_WORKER = re.compile(r"reward_worker/(\d+)/answers")


class StragglerWatch:
    """Detects stragglers among the trainer's ranks, the engines, and the reward workers of each rollout worker.

    Only one thread may use it.

    Each entry of ``equal_ranks`` lists workers that do the same work: they differ only in the data-parallel dimension.
    ``earlier`` are the stragglers that the run found before this process began. Ignores records from before ``began_s``
    (a Unix time, by default now), because an earlier process wrote them.
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
        self._steps: list[tuple[int, dict[str, Work]]] = []  # the train steps of the ranks' current window
        self._batches: dict[
            int, list[tuple[int, dict[str, Work]]]
        ] = {}  # rollout worker → prompt batches of the current window of its reward workers
        self._decoding: tuple[int, Mapping[str, DecodeTimes]] | None = None  # at the start of the window
        self._streaks: dict[Kind, dict[str, Streak]] = {"rank": {}, "engine": {}, "reward worker": {}}
        self._over = list(earlier)
        self._news: list[Straggler] = []

    def add_records(self, records: Iterable[MetricRecord]) -> None:
        """Adds the newest records, which must be in order. A resume restarts all windows."""
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
        """Adds the decode times of each engine after ``step`` train steps.

        The times are totals since the engine's start.
        """
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
        """Returns the processes that became stragglers or recovered since the last call."""
        news, self._news = self._news, []
        return news

    def present(self) -> list[Straggler]:
        """Returns the current stragglers."""
        return [
            straggler_of(kind, name, streak, ended=False)
            for kind, streaks in self._streaks.items()
            for name, streak in sorted(streaks.items())
            if streak.is_named
        ]

    def all_of_run(self) -> list[Straggler]:
        """Returns all stragglers of the run. Recovered processes come first."""
        return [*self._over, *self.present()]

    def _add_step(self, record: MetricRecord) -> None:
        if self._steps and record.step <= self._steps[-1][0]:  # the step is repeated
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
        """Adds the times of one rollout worker's reward workers for a prompt batch."""
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
    """Returns the decode steps since ``before``, or None if the engine is new or was restarted."""
    if before is None or any(size not in now or now[size].steps < old.steps for size, old in before.items()):
        return None
    none = DecodeTime(0, 0.0)
    since = {
        size: DecodeTime(new.steps - old.steps, new.seconds - old.seconds, new.core_wait_s - old.core_wait_s)
        for size, new in now.items()
        for old in (before.get(size, none),)
    }
    return {size: decode_time for size, decode_time in since.items() if decode_time.steps > 0}
