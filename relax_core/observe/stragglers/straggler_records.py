"""Defines what is told of a straggler: one entry of summary.json, the words of it, and its records in the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any, Literal

import msgspec

from relax_core.observe.service.records import TextCell, TextRecord
from relax_core.observe.stragglers.slow_equals import Streak

STRAGGLER = "straggler"  # source of the numbers, and kind of the texts
MOST_NAMES = 4  # equals that the words name

Kind = Literal["rank", "engine", "reward worker"]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Is one process that was slower than its equals from one train step to another.

    ``who`` is its worker's name, and ``part`` the part of its work with the largest difference. ``slower`` is a share:
    0.3 means that it took 1.3 times as long as the median of ``compared_with`` for the same work; ``excess_ms`` is that
    in milliseconds a train step. ``cpu_slower`` is the same share of processor time, None where it is not known.
    ``ended`` is False while it is still slow.
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
    """Returns what is told of a streak; its figures are those of the newest windows."""
    windows = streak.windows
    cpu = [one.cpu_slower for one in windows if one.cpu_slower is not None]
    parts = [one.part for one in windows]
    return Straggler(
        kind=kind,
        who=who,
        part=max(sorted(set(parts)), key=parts.count),
        from_step=streak.from_step,
        to_step=streak.to_step,
        slower=round(median(one.slower for one in windows), 4),
        excess_ms=round(fmean(one.excess_ms for one in windows), 3),
        compared_with=windows[-1].others,
        cpu_slower=round(median(cpu), 4) if cpu else None,
        ended=ended,
    )


def straggler_words(one: Straggler) -> str:
    """Returns one sentence about a straggler, with facts alone."""
    names = ", ".join(one.compared_with[:MOST_NAMES])
    names += f" and {len(one.compared_with) - MOST_NAMES} more" if len(one.compared_with) > MOST_NAMES else ""
    median_of = f"the median of {names}" if len(one.compared_with) > 1 else names
    cpu = "" if one.cpu_slower is None else f"; its processor time is {one.cpu_slower:+.0%}"
    was = "was" if one.ended else "is"
    return (
        f"{one.who} {was} slow: {one.slower:.0%} and {one.excess_ms:.0f} ms a train step beyond {median_of}, "
        f"most of it in {one.part}, in train steps {one.from_step} to {one.to_step}{cpu}"
    )


def straggler_brief(one: Straggler) -> str:
    """Returns a few words about a straggler of now, for a line of the panel."""
    return f"{one.who} +{one.slower:.0%} in {one.part}"


def straggler_numbers(one: Straggler) -> dict[str, float]:
    """Returns the numbers of a straggler for a record of the source `STRAGGLER`."""
    numbers = {"slower": one.slower, "excess_ms": one.excess_ms, "from_step": one.from_step, "to_step": one.to_step}
    return {f"{one.who}/{name}": float(value) for name, value in {**numbers, "ended": one.ended}.items()}


def straggler_row(one: Straggler) -> dict[str, TextCell]:
    """Returns a straggler as a row of a text of the kind `STRAGGLER`."""
    return {**msgspec.to_builtins(one), "compared_with": " ".join(one.compared_with), "words": straggler_words(one)}


def straggler_of_row(row: Mapping[str, Any]) -> Straggler:
    """Returns the straggler of a row that `straggler_row` made. Raises msgspec.ValidationError for another row."""
    known = {name: value for name, value in row.items() if name != "words"}
    return msgspec.convert({**known, "compared_with": str(row.get("compared_with", "")).split()}, Straggler)


def told_stragglers(texts: Iterable[TextRecord]) -> list[Straggler]:
    """Returns the stragglers of texts, each once with what was told of it last, in the order of their first text."""
    found: dict[tuple[str, int], Straggler] = {}
    for text in texts:
        if text.kind == STRAGGLER:
            for one in map(straggler_of_row, text.rows):
                found[one.who, one.from_step] = one
    return list(found.values())
