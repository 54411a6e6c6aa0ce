"""Compares processes that do the same kind of work, and names one that is slower three windows in a row.

What is compared is a process's own work, and never the time in which it waits for others: a collective makes all of its
ranks as slow as the slowest one. A process is compared with the median of the others, for the same amount of work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import NamedTuple

WINDOW_STEPS = 15  # train steps of a window; three windows and a third of the one before are 50 steps
ENGINE_WINDOW_STEPS = 10  # of the engines' windows, which end up to a second later, because they are asked so often
WINDOWS = 3  # windows in a row
MOST_SLOWER = 0.10  # the share beyond the others' median up to which nobody is slow
MOST_EXCESS_MS = 5.0  # milliseconds a train step beyond the others' median up to which nobody is slow
TRIMMED = 2  # steps of a window that are left out at either end, because a single pause is no lasting slowness
MOST_WINDOWS = 100  # windows of a process that are kept, the newest; a run may be slow for days
CROWDED = 0.05  # the share of their time that the others wait for a core, from which on such waits do not count
LEAST_COVERED = 0.5  # the share of an engine's decode time for which others have decoded batches of the same size

Times = Mapping[str, float]  # a part of the work → milliseconds


class DecodeTime(NamedTuple):
    """Is how many decode steps of one size there were, their seconds, and how many of these they waited for a core."""

    steps: int
    seconds: float
    core_wait_s: float = 0.0

    def a_step(self, *, waits: bool) -> float:
        """Returns the seconds of one step, with or without its waits for a core."""
        return (self.seconds if waits else max(0.0, self.seconds - self.core_wait_s)) / self.steps


DecodeTimes = Mapping[int, DecodeTime]  # by the number of samples in a decode step


@dataclass(frozen=True, kw_only=True)
class Work:
    """Is the own work of one process in one train step.

    ``wall_ms`` has the wall time of each part, and ``cpu_ms`` the processor time. ``core_wait_ms`` is how much of the
    wall time it was ready to run and got no core. ``amount`` says how much work it was, such as token rows, in a unit
    that is the same for all equals.
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
        """Returns the wall time of all parts without the waits for a core."""
        return max(0.0, self.whole_ms - self.core_wait_ms)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Is a process beside its equals in one window; all times are milliseconds a train step.

    ``own_ms`` is its time, and ``others_ms`` what the median of the others says for the same work. ``part`` is the part
    of the work with the largest difference. ``cpu_slower`` is the share by which its processor time is beyond that of
    the others, None where it is not known.
    """

    own_ms: float
    others_ms: float
    part: str
    others: tuple[str, ...]
    cpu_slower: float | None = None

    @property
    def slower(self) -> float:
        """Returns the share by which the time is beyond that of the others; below 0 for a faster process."""
        return self.own_ms / self.others_ms - 1.0 if self.others_ms > 0 else 0.0

    @property
    def excess_ms(self) -> float:
        """Returns by how many milliseconds a train step the time is beyond that of the others."""
        return self.own_ms - self.others_ms

    @property
    def is_slow(self) -> bool:
        """Is True if the time is beyond both limits."""
        return self.slower > MOST_SLOWER and self.excess_ms > MOST_EXCESS_MS


@dataclass(frozen=True, kw_only=True)
class Streak:
    """Holds the slow windows of one process in a row, the newest ones, and the first and last train step of all."""

    from_step: int
    to_step: int
    windows: tuple[Compared, ...]

    @property
    def is_named(self) -> bool:
        """Is True if the process counts as a straggler."""
        return len(self.windows) >= WINDOWS


# -- One window -------------------------------------------------------------------------------------------------------
def compared_work(steps: Sequence[Mapping[str, Work]]) -> dict[str, Compared]:
    """Returns each process beside its equals over the steps of a window, each step a mapping of process → its work.

    A process that is not in all of the steps, or did no work in one, is left out; one that remains alone is compared
    with nobody. The steps that took a process longest and shortest are left out of its mean, so that one pause does not
    count. Where the others wait for cores, too, there are more processes than cores, and how the kernel shares them out
    is chance: then nobody's wait for a core counts. Where they do not, it counts as time of the process.
    """
    names = sorted(set.intersection(*(set(step) for step in steps))) if steps else []
    whole = {name: [step[name] for step in steps] for name in names}
    worked = {name: found for name, found in whole.items() if all(one.amount > 0 for one in found)}
    if len(worked) < 2:
        return {}
    shares = {name: _waiting_share(found) for name, found in worked.items()}
    means = {
        counted: {name: _mean_work(one, waits=counted) for name, one in worked.items()} for counted in (False, True)
    }
    compared = {}
    for name in worked:
        crowded = median(share for other, share in shares.items() if other != name) >= CROWDED
        compared[name] = _beside(name, means[not crowded])
    return compared


def compared_decoding(engines: Mapping[str, DecodeTimes], *, steps: int) -> dict[str, Compared]:
    """Returns each engine beside the others over the decode steps of a window of ``steps`` train steps.

    An idle engine does not count: the time of a decode step is compared with what the others took for a step with as
    many samples. An engine is left out if the others decoded too few batches of its sizes. Waits for a core count as
    in `compared_work`.
    """
    shares = {name: _decoding_share(times) for name, times in engines.items() if times}
    found = {}
    for name in shares if len(shares) > 1 else ():
        waits = median(share for other, share in shares.items() if other != name) < CROWDED
        covered_s = expected_s = 0.0
        others: set[str] = set()
        for size, own in engines[name].items():
            known = {
                other: engines[other][size].a_step(waits=waits)
                for other in shares
                if other != name and size in engines[other]
            }
            if known:
                covered_s += own.steps * own.a_step(waits=waits)
                expected_s += own.steps * median(known.values())
                others |= known.keys()
        whole_s = sum(own.steps * own.a_step(waits=waits) for own in engines[name].values())
        if expected_s > 0.0 and covered_s >= LEAST_COVERED * whole_s:
            found[name] = Compared(
                own_ms=1e3 * covered_s / steps,
                others_ms=1e3 * expected_s / steps,
                part="decode",
                others=tuple(sorted(others)),
            )
    return found


def _decoding_share(times: DecodeTimes) -> float:
    whole_s = sum(one.seconds for one in times.values())
    return sum(one.core_wait_s for one in times.values()) / whole_s if whole_s else 0.0


def _waiting_share(steps: Sequence[Work]) -> float:
    whole_ms = sum(step.whole_ms for step in steps)
    return sum(step.core_wait_ms for step in steps) / whole_ms if whole_ms else 0.0


def _mean_work(steps: Sequence[Work], *, waits: bool) -> Work:
    """Returns the mean a unit of work over the steps, without the slowest and the fastest ones.

    With ``waits`` the waits for a core count as work, so that none is left in what is returned.
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


def _beside(name: str, means: Mapping[str, Work]) -> Compared:
    own = means[name]
    others = {other: mean for other, mean in means.items() if other != name}

    def of_others(times: str, part: str) -> float:
        return median(getattr(mean, times).get(part, 0.0) for mean in others.values())

    excess = {part: value - of_others("wall_ms", part) for part, value in own.wall_ms.items()}
    own_cpu, others_cpu = (
        sum(own.cpu_ms.values()),
        median(sum(mean.cpu_ms.values()) for mean in others.values()),
    )
    return Compared(
        own_ms=own.amount * own.worked_ms,
        others_ms=own.amount * median(mean.worked_ms for mean in others.values()),
        part=max(sorted(excess), key=lambda part: excess[part], default=""),
        others=tuple(sorted(others)),
        cpu_slower=own_cpu / others_cpu - 1.0 if own_cpu and others_cpu else None,
    )


# -- Windows in a row -------------------------------------------------------------------------------------------------
def advanced(
    streaks: Mapping[str, Streak], window: Mapping[str, Compared], *, from_step: int, to_step: int
) -> dict[str, Streak]:
    """Returns the streaks after one more window, from train step ``from_step`` to ``to_step``.

    A process that is not slow in it has none any more. One that the window does not tell of keeps its streak, because
    nothing is known of it.
    """
    found = {name: streak for name, streak in streaks.items() if name not in window}
    for name, compared in window.items():
        if not compared.is_slow:
            continue
        before = streaks.get(name)
        if before is None:
            found[name] = Streak(from_step=from_step, to_step=to_step, windows=(compared,))
        else:
            found[name] = replace(before, to_step=to_step, windows=(*before.windows, compared)[-MOST_WINDOWS:])
    return found


def without(streaks: Mapping[str, Streak], gone: Collection[str]) -> dict[str, Streak]:
    """Returns the streaks of the processes that are not among ``gone``."""
    return {name: streak for name, streak in streaks.items() if name not in gone}
