"""What became of a sample: ``relax lineage RUN uid=… | group=… | step=… | reason=…``.

Prints every event of the samples that fit all filters, and the books of the whole run as its events tell them. Without
a filter it prints the books alone. Works while the run goes on. Exit code 1 where a sample was lost or trained twice,
2 for a question that cannot be answered.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_core.bus.ledger.ledger_reader import FILTERS, Event, FileCounts, LedgerFile, SampleLife
from relax_core.config.errors import nearest
from relax_core.contracts.tree import Episode, Turn, group_uid, sample_uid

LEDGER = "ledger.sqlite"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax lineage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("filter", nargs="*", help="uid=g00000012.3, group=g00000012, step=40, reason=stale")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args(arguments)
    try:
        filters = parse_filters(given.filter)
        lives, books = look_up(given.run, filters)
    except (ValueError, sqlite3.Error) as error:
        print(f"lineage: {error}", file=sys.stderr)
        return 2
    if given.json:
        answer = {"run": str(given.run), "filters": filters, "samples": lives, "counts": states(lives), "books": books}
        print(msgspec.json.encode(answer).decode())
    else:
        for line in (*(line for life in lives for line in life_lines(life)), *summary_lines(lives, books, filters)):
            print(line)
    return 1 if books.lost or books.trained_twice else 0


def parse_filters(words: Sequence[str]) -> dict[str, str | int]:
    """``["step=4", "reason=stale"]`` → ``{"step": 4, "reason": "stale"}``; ValueError lists what there is."""
    filters: dict[str, str | int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in FILTERS or not equals or not value:
            near = "".join(f" Did you mean {name}=?" for name in nearest(key, FILTERS)[:1])
            raise ValueError(f"{word!r} is no filter.{near} Filters: {', '.join(f'{name}=…' for name in FILTERS)}")
        if key in filters:
            raise ValueError(f"{key}= is given twice: give it once")
        if key == "step" and not value.isdecimal():
            raise ValueError(f"step={value}: give the number of a train step, 0 or more")
        filters[key] = int(value) if key == "step" else value
    return filters


def look_up(run: Path, filters: dict[str, str | int]) -> tuple[list[SampleLife], FileCounts]:
    """The samples that fit, none without a filter, and the whole run's books. ValueError says in words what is not
    there, and what is."""
    try:
        ledger = LedgerFile(run / LEDGER)
    except FileNotFoundError as error:
        raise ValueError(f"{error} is not there: {_other_runs(run)}") from None
    with ledger:
        lives = ledger.lives(filters) if filters else []
        if filters and not lives:
            for key, value in filters.items():
                if not ledger.lives({key: value}):
                    raise ValueError(_unknown(ledger, key, value))
        return lives, ledger.books(run_over=_is_over(run))


def _is_over(run: Path) -> bool:
    """All train steps are done, and nothing was left open: a run that was stopped, or resumed with fewer steps than it
    had groups for, keeps its open samples for a resume."""
    try:
        summary = msgspec.json.decode((run / "summary.json").read_bytes())
    except FileNotFoundError:
        return False
    return bool(summary["outcome"] == "finished" and summary["ledger"]["open"] == 0)


def _other_runs(run: Path) -> str:
    others = sorted(run.parent.glob(f"*/{LEDGER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not others:
        return "give the folder of a run"
    return f"no run wrote to {run}. Newest beside it: {', '.join(str(path.parent) for path in others[:3])}"


def _unknown(ledger: LedgerFile, key: str, value: str | int) -> str:
    if key == "step":
        steps = ledger.steps()
        return f"step={value}: no event names it. " + (
            f"Steps with events: {steps[0]} to {steps[1]}" if steps else "No step has begun yet"
        )
    if key == "reason":
        known = ledger.reasons()
        listed = ", ".join(f"{reason} ({count:,})" for reason, count in known.items()) or "none"
        near = "".join(f" Nearest: {reason!r}." for reason in nearest(str(value), known, count=1))
        return f"reason={value}: no event gives it.{near} Reasons with events: {listed}"
    last = ledger.last_uid()
    if last is None:
        return f"{key}={value}: no sample was issued yet"
    near_uid = _nearest_uid(str(value), last)
    if key == "group":
        near_uid, last = (uid.rpartition(".")[0] for uid in (near_uid, last))
    return f"{key}={value}: no such {key}. Nearest: {near_uid}; issued last: {last}"


def _nearest_uid(uid: str, last: str) -> str:
    """``uid``'s numbers, written as uids are and kept inside of what was issued."""
    last_index, last_place = (int(number) for number in re.findall(r"\d+", last))
    numbers = [int(number) for number in re.findall(r"\d+", uid)][:2]
    index, place = (*numbers, 0, 0)[:2] if len(numbers) < 2 else numbers
    return sample_uid(group_uid(min(index, last_index)), min(place, last_place))


def states(lives: Sequence[SampleLife]) -> dict[str, int]:
    """How many samples are in which state."""
    return dict(sorted(Counter(life.state for life in lives).items()))


def life_lines(life: SampleLife) -> list[str]:
    """A sample's life as text."""
    born = life.events[0].time
    lines = [f"{life.uid}  {life.state}"]
    for event in life.events:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time)) + f".{int(event.time % 1 * 1000):03d}"
        undone = "  (undone by a resume)" if event.undone else ""
        for name, words in _told(event):
            lines.append(f"  {clock}  {event.time - born:+9.3f} s  {name:<9}  {words}{undone}")
    return lines


def _told(event: Event) -> list[tuple[str, str]]:
    """(name, words) of each line that an event makes."""
    more = f", {event.reason}" if event.reason else ""
    match event.event:
        case "issued":
            return [("issued", f"for weights {event.version} or newer{more}")]
        case "put" if event.made is not None:
            return [("generated", _made_words(event.made)), ("rewarded", _reward_words(event.made))]
        case "put":
            return [("put", f"oldest weights {event.version}")]
        case "leased":
            return [("leased", f"for step {event.step}{more}")]
        case "returned":
            return [("returned", f"of step {event.step}{more}")]
        case "trained":
            assert event.step is not None and event.version is not None
            age = event.step - event.version
            return [("trained", f"at step {event.step}, oldest weights {event.version}, staleness {age}")]
        case "dropped":
            return [("dropped", f"at step {event.step}{more}")]
    raise AssertionError(f"the ledger has an event {event.event!r}")


def _made_words(made: Episode) -> str:
    return f"{'; '.join(_turn_words(turn) for turn in made.turns)}; {made.ended}"


def _turn_words(turn: Turn) -> str:
    first, words = 0, []
    for version, tokens in turn.versions:
        words.append(f"tokens {first} to {first + tokens - 1} by weights {version}")
        first += tokens
    return f"{turn.engine}: {', '.join(words)}"


def _reward_words(made: Episode) -> str:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in made.parts.items())
    return f"{made.reward:.4g}" + (f" ({parts})" if parts else "")


def summary_lines(lives: Sequence[SampleLife], books: FileCounts, filters: dict[str, Any]) -> list[str]:
    """Counts of what was asked for, and of the whole run."""
    asked = " ".join(f"{key}={value}" for key, value in filters.items())
    lines = [f"{asked}: {len(lives):,} samples: {_counted(states(lives))}"] if filters else []
    lines.append(
        f"whole run: {books.issued:,} issued: {books.trained:,} trained; dropped: {_counted(books.dropped)}; "
        f"open: {_counted(books.open)}; lost {len(books.lost):,}; trained twice {len(books.trained_twice):,}"
    )
    for what, uids in (("lost", books.lost), ("trained twice", books.trained_twice)):
        if uids:
            lines.append(f"{what}: {', '.join(uids[:8])}{' …' if len(uids) > 8 else ''}")
    return lines


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "0"


if __name__ == "__main__":
    sys.exit(main())
