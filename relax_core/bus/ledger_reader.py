"""Reads a run's ledger.sqlite, also while the run writes it: the events of any sample, and counts over all events."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from relax_core.bus.foreign_database import bounded_rows, foreign_database
from relax_core.contracts.columns import decode_episodes
from relax_core.contracts.tree import Episode

TABLES = {"events", "rolled_back", "generated"}
BUSY_S = 10.0  # a read waits this long for a writer's lock
SETTLE_S = 2.0  # all ends of a group are on disk this long after the first of them
FILTERS = ("uid", "group", "step", "reason")
_FIELD_OF = {"uid": "uid", "group": "group_uid", "step": "step", "reason": "reason"}
_EVENT = "id, event, uid, group_uid, step, version, reason, time"


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Is one event of a sample.

    ``time`` is in Unix seconds. ``version`` of an ``issued`` event is the oldest weight version that may be used; of
    ``put`` and ``trained`` events it is the version of the oldest trained token. ``undone`` is True if a resume went
    back behind the event. ``made`` is the episode of a ``put`` event.
    """

    event: str
    time: float
    step: int | None = None
    version: int | None = None
    reason: str = ""
    undone: bool = False
    made: Episode | None = None


class SampleHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Holds every event of a sample, in order.

    ``state`` is "trained", "dropped", the last event of an open sample, or "undone" if no event is in force.
    """

    uid: str
    group: str
    state: str
    events: list[Event]


class FileCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of samples, computed from the events in the file alone.

    ``open`` counts the open samples by their last event. ``lost`` lists the samples without an end although another
    sample of their group has one (groups end as a whole), or although the run is over. ``trained_twice`` lists uids.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    open: dict[str, int]
    lost: list[str]
    trained_twice: list[str]


class EngineShare(msgspec.Struct, kw_only=True):
    """Says how many samples have a response that an engine has finished, and how many tokens these responses have.

    A response that another engine had begun counts as a whole.
    """

    samples: int = 0
    tokens: int = 0


class LedgerFile:
    """Reads a ledger file as a context manager; it never writes.

    All reads together may take ``seconds``, and the rows of each ``most_bytes`` of memory; for None there is no limit.
    Raises what `foreign_database` raises; the methods raise sqlite3.Error for a damaged file or the end of the time,
    and ValueError for too many rows.
    """

    def __init__(self, path: Path, *, seconds: float | None = None, most_bytes: int | None = None) -> None:
        self._database = foreign_database(path, tables=TABLES, busy_s=BUSY_S, seconds=seconds)
        self._most_bytes = most_bytes
        self._made: dict[int, dict[str, Episode]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._database.close()

    def samples(self, filters: Mapping[str, str | int]) -> list[SampleHistory]:
        """Returns the samples for which one event fits all of ``filters``, in order of issue.

        The keys of ``filters`` are those of `FILTERS`; without a filter, all samples are returned. ``step`` and
        ``reason`` compare with events in force, ``uid`` and ``group`` also with events that a resume has undone.
        """
        where = " AND ".join(f"{_FIELD_OF[key]} = ?" for key in filters) or "TRUE"
        values = tuple(filters.values())
        tables = ["events"] if {"step", "reason"} & filters.keys() else ["events", "rolled_back"]
        matching = " UNION ".join(f"SELECT uid FROM {table} WHERE {where}" for table in tables)
        found: dict[str, list[tuple[Any, ...]]] = {}
        rows = self._rows(
            f"WITH matching AS ({matching}) "
            f"SELECT {_EVENT}, 0 FROM events WHERE uid IN matching UNION ALL "
            f"SELECT {_EVENT}, 1 FROM rolled_back WHERE uid IN matching ORDER BY id",
            values * len(tables),
        )
        for row in rows:
            found.setdefault(row[2], []).append(row)
        return [
            self._sample_events(uid, rows)
            for uid, rows in sorted(found.items(), key=lambda item: _issue_order(item[0]))
        ]

    def _rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        return bounded_rows(self._database.execute(query, values), most_bytes=self._most_bytes)

    def _sample_events(self, uid: str, rows: list[tuple[Any, ...]]) -> SampleHistory:
        events = [
            Event(
                event=event,
                time=at,
                step=step,
                version=version,
                reason=reason,
                undone=bool(undone),
                made=self._made_of(number, uid) if event == "put" else None,
            )
            for number, event, _, _, step, version, reason, at, undone in rows
        ]
        in_force = [event.event for event in events if not event.undone]
        return SampleHistory(uid=uid, group=rows[0][3], state=in_force[-1] if in_force else "undone", events=events)

    def _made_of(self, event_id: int, uid: str) -> Episode | None:
        """Returns the episode of a ``put`` event.

        Table ``generated`` has one row for all samples of a group, under the id of the group's first ``put`` event.
        """
        row = self._database.execute(
            "SELECT id, episodes FROM generated WHERE id <= ? ORDER BY id DESC LIMIT 1",
            (event_id,),
        ).fetchone()
        if row is None:
            return None
        if row[0] not in self._made:
            self._made[row[0]] = {one.uid: one for one in decode_episodes(row[1])}
        return self._made[row[0]].get(uid)

    def counts(self, *, run_over: bool) -> FileCounts:
        """Counts all samples in one pass over the events.

        ``run_over`` says that every step is done, so no sample may be open.
        """
        samples: dict[str, str] = {}  # uid → last event
        trained: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        group_ended: dict[str, float] = {}
        for event, uid, group, reason, at in self._all_events():
            samples[uid] = event
            if event == "trained":
                trained[uid] += 1
                group_ended[group] = at
            elif event == "dropped":
                dropped[reason] += 1
                group_ended[group] = at
        settled = time.time() - SETTLE_S
        still_open = {uid: last for uid, last in samples.items() if last not in ("trained", "dropped")}
        lost = [uid for uid in still_open if run_over or group_ended.get(uid.rpartition(".")[0], settled) < settled]
        for uid in lost:
            del still_open[uid]
        return FileCounts(
            issued=len(samples),
            trained=len(trained),
            dropped=dict(sorted(dropped.items())),
            open=dict(sorted(Counter(still_open.values()).items())),
            lost=sorted(lost, key=_issue_order),
            trained_twice=sorted((uid for uid, times in trained.items() if times > 1), key=_issue_order),
        )

    def engine_shares(self) -> dict[str, EngineShare]:
        """Returns the share of each engine in all groups that were put on the bus, those that were undone included."""
        shares: defaultdict[str, EngineShare] = defaultdict(EngineShare)
        for (episodes,) in self._rows("SELECT episodes FROM generated"):
            for one in decode_episodes(episodes):
                for engine in {turn.engine for turn in one.turns}:
                    shares[engine].samples += 1
                for turn in one.turns:
                    shares[turn.engine].tokens += sum(tokens for _, tokens in turn.versions)
        return dict(shares)

    def _all_events(self) -> Iterator[tuple[str, str, str, str, float]]:
        return self._rows("SELECT event, uid, group_uid, reason, time FROM events ORDER BY id")

    def last_uid(self) -> str | None:
        """Returns the uid that was issued last; None for an empty ledger."""
        row = self._database.execute(
            "SELECT uid FROM events WHERE event = 'issued' ORDER BY group_uid DESC, id DESC LIMIT 1"
        ).fetchone()
        return row[0] if row else None

    def steps(self) -> tuple[int, int] | None:
        """Returns the first and the last train step that events name; None if no event names one."""
        first, last = self._database.execute("SELECT MIN(step), MAX(step) FROM events").fetchone()
        return None if first is None else (first, last)

    def reasons(self) -> dict[str, int]:
        """Returns every reason that events give, with the number of events."""
        return dict(self._rows("SELECT reason, COUNT(*) FROM events WHERE reason != '' GROUP BY reason"))


def _issue_order(uid: str) -> tuple[str, int]:
    """Returns a key that sorts uids in order of issue."""
    group, _, number = uid.rpartition(".")
    return group, int(number)
