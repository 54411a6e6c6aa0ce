"""The data bus: rollout and trainer meet here, and every sample's fate is persisted here.

A row is a COMPLETE group. Columns arrive from several roles; a task sees a row only when every column that it asked
for is there. Delivery is at least once, by leases with deadlines; training is exactly once, through the ledger.

Every call takes ``timeout_s``, in seconds; a call that waited that long raises `BusTimeout`, which says for what and on
whom it waited. A bus that was closed raises `BusClosed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class BusTimeout(TimeoutError):
    """A wait ran past its deadline. The text names what was waited for, since when, and who owes it."""


class BusClosed(RuntimeError):
    """The run has ended: there is nothing more to wait for."""


class BusLost(RuntimeError):
    """The bus process died. Its state is that of the last snapshot: whoever owns the run has to restore it."""


class LeaseLost(RuntimeError):
    """The lease expired or was released; its rows went back and may be with another worker."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Leave for one prompt group to enter rollout.

    ``min_version``: the engine must not start it with weights older than this, else it could fall out of the window.
    ``attempt``: 0 for a fresh group; more when an earlier owner was lost. Sampling seeds do not depend on it.
    """

    index: int
    group_uid: str
    min_version: int
    attempt: int = 0


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A complete group as it enters the bus.

    ``uids``: the samples kept; ``versions``: for each of them the oldest weight version among its trained tokens.
    ``dropped``: samples of the group that were not kept, uid → reason.
    """

    group_uid: str
    index: int
    uids: list[str]
    versions: list[int]
    columns: dict[str, bytes]
    dropped: dict[str, str] = {}


class LeasedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row as a task sees it: only the payloads that it asked for."""

    group_uid: str
    index: int
    uids: list[str]
    versions: list[int]
    columns: dict[str, bytes]


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a task wants next.

    ``task``: "actor" consumes rows; any other name works on rows once and writes columns.
    ``columns``: what a row must have. ``payloads``: those of them that come with the lease, None for all; whoever needs
    the others calls `Bus.read`.
    ``min_groups``, ``max_groups``: how many rows come back; the call waits for the minimum.
    ``step``: train step that will consume the rows (task "actor" only): rows older than ``step - max_staleness`` are
    dropped as stale (or handed out for masking, as the bus was configured).
    ``lease_s``: seconds until the rows go back by themselves.
    """

    task: str
    columns: tuple[str, ...]
    max_groups: int
    payloads: tuple[str, ...] | None = None
    min_groups: int = 1
    step: int | None = None
    lease_s: float = 600.0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Rows on loan. ``waited_s``: seconds that the call for it waited in the bus because too few rows were ready."""

    lease_id: int
    task: str
    rows: list[LeasedRow]
    waited_s: float = 0.0


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of samples. ``lost`` and ``trained_twice`` are computed from the ledger's entries, not asserted."""

    issued: int
    trained: int
    dropped: dict[str, int]
    open: int
    lost: int
    trained_twice: int


class BusProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the run stands. ``version``: weight version in force, = train steps done."""

    version: int
    admitted: int
    in_flight: int
    waiting: int
    leased: int
    credits: int
    staleness_histogram: dict[int, int]
    ledger: LedgerCounts


class VersionChange(msgspec.Struct, frozen=True, kw_only=True):
    """``version`` is in force now. ``retired``: groups in flight that ended with the change, since the train steps had
    enough without them (over-sampling): whoever generates them may stop."""

    version: int
    retired: list[str]


class BusWait(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits in the bus. ``task``, ``worker``: whose, the latter as the place of that worker among the
    task's. ``text``: for what, and who owes it, with uids. ``owed_by``: the tasks that have to act before it can go on;
    of rollout the workers, as "rollout-1", whose groups it waits for."""

    task: str
    since_s: float
    text: str
    owed_by: list[str]
    worker: int = 0


class Bus(Protocol):
    """What every backend does. All arguments beyond the first are keyword-only. ``worker``: which of the rollout's
    workers calls, counted from 0; an admission belongs to the worker that asked for it."""

    # -- rollout's side -----------------------------------------------------------------------------------------
    def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Waits for credit, then lets 1..max_groups prompt groups in. Opens their samples in the ledger. Workers that
        wait get credit in the order in which they asked, and each has its part of the groups in flight at most. Groups
        of a restored snapshot go to whoever asks first."""

    def reclaim(self, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """The worker's admissions whose rows never came: what it has to do again after a restart, in order of issue.
        A waiting `admit` of this worker, which only its predecessor can have left, gets `LeaseLost`."""

    def put(self, rows: Sequence[GroupRow], *, timeout_s: float) -> None:
        """Enters complete groups. A group that is already in, trained or dropped is ignored (at-least-once)."""

    def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        """Closes an admitted group that yields nothing; its credit comes back."""

    def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        """Returns once another version than ``since_version`` is in force, with which of the worker's groups ended
        since then; one caller of each worker may follow it. After ``timeout_s`` it returns as well, with the same
        version and nothing."""

    # -- workers' side ------------------------------------------------------------------------------------------
    def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        """Waits until at least one row fits, then leases it."""

    def read(
        self, lease_id: int, group_uids: Sequence[str], *, columns: Sequence[str], timeout_s: float
    ) -> list[LeasedRow]:
        """Columns of rows of a lease that is held, in the order of ``group_uids``; any process that knows the lease may
        ask, so each rank can read what it trains. The lease goes on as it was. Raises `LeaseLost` where the lease or a
        row of it has ended, ValueError for a group that is not in the lease and for a column that a row lacks."""

    def write(
        self,
        lease_id: int,
        columns: Mapping[str, Mapping[str, bytes]],
        *,
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        """Adds columns (group_uid → column → payload), ends the lease; ``then`` waits for the next one at once."""

    def ack(
        self,
        lease_ids: Sequence[int],
        *,
        step: int,
        dropped: Mapping[str, str],
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        """Train step ``step`` consumed these leases: closes their samples as trained (``dropped``: uid → reason for
        those that were masked whole), sets the version to ``step + 1``. ``then`` waits for the next lease at once."""

    def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        """Gives rows back unused."""

    def revoke(self, task: str, *, timeout_s: float) -> None:
        """A worker of this task was lost: its leases end, their rows go back, its waiting calls get `LeaseLost`."""

    # -- the run's side -----------------------------------------------------------------------------------------
    def progress(self, *, timeout_s: float) -> BusProgress: ...

    def waits(self, *, timeout_s: float) -> list[BusWait]:
        """Who waits for admissions or leases right now, the longest wait first."""

    def snapshot(self, *, timeout_s: float) -> bytes:
        """The bus's part of a checkpoint's cut, as msgpack: ledger, cursor, what is open. Rows in flight are not in
        it: their prompts are issued again on resume, each once."""

    def restore(self, snapshot: bytes, *, timeout_s: float) -> None: ...

    def close(self, *, reason: str, timeout_s: float) -> None:
        """Ends the run: whoever waits gets `BusClosed`."""
