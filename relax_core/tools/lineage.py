"""`relax lineage RUN uid=… | group=… | step=… | reason=…` shows how samples ended.

It prints all events of the samples that match all filters, and the counts of the whole run. Without a filter it prints
only the counts. It also works during the run. The exit code is 1 if a sample was lost or trained twice, and 2 for an
invalid request.
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

from relax_core.bus.ledger_reader import FILTERS, Event, LedgerFile, LedgerFileCounts, SampleHistory
from relax_core.config.errors import nearest
from relax_core.contracts.tree import Episode, Turn, group_uid, sample_uid
from relax_core.contracts.untrusted_files import decode_json, read_plain_file, shown_json, shown_line
from relax_core.observe.standard_streams import unread_streams

LEDGER = "ledger.sqlite"
MAX_SUMMARY = 4 * 2**20  # limit of bytes read of a summary.json


class _LedgerOver(msgspec.Struct):
    open: int


class _SummaryOver(msgspec.Struct):
    outcome: str
    ledger: _LedgerOver


_summary = msgspec.json.Decoder(_SummaryOver)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax lineage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("filter", nargs="*", help="uid=g00000012.3, group=g00000012, step=40, reason=stale")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    given = parser.parse_args(arguments)
    try:
        filters = parse_filters(given.filter)
        samples, counts = look_up(given.run, filters)
    except NotADirectoryError:
        print(f"relax lineage: {given.run} is not a folder. Give the folder of a run.", file=sys.stderr)
        return 2
    except (ValueError, sqlite3.Error) as error:
        print(f"relax lineage: {error}", file=sys.stderr)
        return 2
    if given.json:
        answer = {
            "run": str(given.run),
            "filters": filters,
            "samples": samples,
            "counts": states(samples),
            "books": counts,
        }
        print(shown_json(msgspec.json.encode(answer).decode()))
    else:
        for line in (
            *(line for sample in samples for line in sample_lines(sample)),
            *summary_lines(samples, counts, filters),
        ):
            print(shown_line(line))
    return 1 if counts.lost or counts.trained_twice else 0


def parse_filters(words: Sequence[str]) -> dict[str, str | int]:
    """Parses ``["step=4", "reason=stale"]`` into ``{"step": 4, "reason": "stale"}``.

    Raises ValueError with the list of filters for an unknown or wrong filter.
    """
    filters: dict[str, str | int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in FILTERS or not equals or not value:
            near = "".join(f" Did you mean {name}=?" for name in nearest(key, FILTERS)[:1])
            raise ValueError(f"{word!r} is not a filter.{near} Filters: {', '.join(f'{name}=…' for name in FILTERS)}")
        if key in filters:
            raise ValueError(f"{key}= is given twice: give it once")
        if key == "step" and not value.isdecimal():
            raise ValueError(f"step={value}: give the number of a train step, 0 or more")
        filters[key] = int(value) if key == "step" else value
    return filters


def look_up(run: Path, filters: dict[str, str | int]) -> tuple[list[SampleHistory], LedgerFileCounts]:
    """Returns the matching samples (none without a filter) and the counts of the whole run.

    Raises ValueError with the nearest existing value if the run or a filter value does not exist.
    """
    try:
        ledger = LedgerFile(run / LEDGER)
    except FileNotFoundError as error:
        raise ValueError(f"{error} is not there: {_other_runs(run)}") from None
    with ledger:
        samples = ledger.samples(filters) if filters else []
        if filters and not samples:
            for key, value in filters.items():
                if not ledger.samples({key: value}):
                    raise ValueError(_unknown(ledger, key, value))
        return samples, ledger.counts(run_over=_is_over(run))


def _is_over(run: Path) -> bool:
    """Returns whether all train steps are finished and no sample is open.

    A stopped run keeps its open samples for a resume. A run that was resumed with fewer steps may also keep open
    samples.
    """
    try:
        summary = decode_json(read_plain_file(run / "summary.json", max_bytes=MAX_SUMMARY), _summary)
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise ValueError(f"{run / 'summary.json'} is not a summary of a run: {error}") from error
    return summary.outcome == "finished" and summary.ledger.open == 0


def _other_runs(run: Path) -> str:
    other_ledgers = sorted(run.parent.glob(f"*/{LEDGER}"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not other_ledgers:
        return "give the folder of a run"
    return f"no run wrote to {run}. Newest beside it: {', '.join(str(path.parent) for path in other_ledgers[:3])}"


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
    """Returns an issued uid: the numbers in ``uid``, reduced to the largest issued numbers."""
    last_index, last_number = (int(number) for number in re.findall(r"\d+", last))
    numbers = [int(number) for number in re.findall(r"\d+", uid)][:2]
    index, number = (*numbers, 0, 0)[:2] if len(numbers) < 2 else numbers
    return sample_uid(group_uid(min(index, last_index)), min(number, last_number))


def states(samples: Sequence[SampleHistory]) -> dict[str, int]:
    """Returns the number of samples in each state."""
    return dict(sorted(Counter(sample.state for sample in samples).items()))


def sample_lines(sample: SampleHistory) -> list[str]:
    """Returns the events of a sample as lines of text."""
    born = sample.events[0].time
    lines = [f"{sample.uid}  {sample.state}"]
    for event in sample.events:
        undone = "  (undone by a resume)" if event.undone else ""
        turns = [] if event.made is None else _turn_lines(event.made)
        for when, name, words in (*turns, *((event.time, *line) for line in _event_lines(event))):
            clock = time.strftime("%H:%M:%S", time.localtime(when)) + f".{int(when % 1 * 1000):03d}"
            lines.append(f"  {clock}  {when - born:+9.3f} s  {name:<9}  {words}{undone}")
    return lines


def _turn_lines(made: Episode) -> list[tuple[float, str, str]]:
    """Returns (Unix time, name, text) of each turn of a multi-turn episode. Empty for a single-turn environment."""
    return [
        (turn.began_s, f"turn {number}", _played_text(turn))
        for number, turn in enumerate(made.turns, 1)
        if turn.began_s
    ]


def _played_text(turn: Turn) -> str:
    words = [f"{_turn_text(turn)} in {1e3 * (turn.ended_s - turn.began_s):.1f} ms", turn.finish]
    words += [f"calls {', '.join(turn.tools)}"] if turn.tools else []
    words += [f"env {turn.env_ms:.1f} ms"] if turn.env_ms else []
    words += [] if turn.reward is None else [f"reward {turn.reward:.4g}"]
    return "; ".join(words)


def _event_lines(event: Event) -> list[tuple[str, str]]:
    """Returns (name, text) for each line of an event."""
    more = f", {event.reason}" if event.reason else ""
    match event.event:
        case "issued":
            return [("issued", f"for weights {event.version} or newer{more}")]
        case "put" if event.made is not None:
            return [("generated", _sample_text(event.made)), ("rewarded", _reward_text(event.made))]
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


def _sample_text(made: Episode) -> str:
    if any(turn.began_s for turn in made.turns):
        sampled = sum(turn.end - turn.start for turn in made.turns)
        return f"turns {len(made.turns)}, sampled tokens {sampled}; {made.ended}"
    return f"{'; '.join(_turn_text(turn) for turn in made.turns)}; {made.ended}"


def _turn_text(turn: Turn) -> str:
    first, words = 0, []
    for version, tokens in turn.versions:
        words.append(f"tokens {first} to {first + tokens - 1} by weights {version}")
        first += tokens
    return f"{turn.engine}: {', '.join(words)}"


def _reward_text(made: Episode) -> str:
    parts = ", ".join(f"{name} {value:.4g}" for name, value in made.parts.items())
    why = " ".join(made.why.split())
    return f"{made.reward:.4g}" + (f" ({parts})" if parts else "") + (f": {why}" if why else "")


def summary_lines(samples: Sequence[SampleHistory], counts: LedgerFileCounts, filters: dict[str, Any]) -> list[str]:
    """Returns the counts of the selected samples and of the whole run as lines of text."""
    asked = " ".join(f"{key}={value}" for key, value in filters.items())
    lines = [f"{asked}: {len(samples):,} samples: {_counted(states(samples))}"] if filters else []
    lines.append(
        f"whole run: {counts.issued:,} issued: {counts.trained:,} trained; dropped: {_counted(counts.dropped)}; "
        f"open: {_counted(counts.open)}; lost {len(counts.lost):,}; trained twice {len(counts.trained_twice):,}"
    )
    for what, uids in (("lost", counts.lost), ("trained twice", counts.trained_twice)):
        if uids:
            lines.append(f"{what}: {', '.join(uids[:8])}{' …' if len(uids) > 8 else ''}")
    return lines


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "0"


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
