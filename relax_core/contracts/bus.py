"""The contract of the data bus, through which rollout and trainer exchange groups and which records how samples end.

The rollout enters COMPLETE groups. Several roles add columns to a group; a task sees a group only when it has every
column that the task asked for. Delivery is at least once, by leases with deadlines; training is exactly once, through
the ledger.

Every call takes ``timeout_s``, in seconds. A call that waited that long raises `BusTimeout`, which names what it waited
for and which task has to act. A call to a closed bus raises `BusClosed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from relax_core.contracts.media import MediaReader

LEASE_S = 600.0  # a lease that was not acknowledged returns to the bus after so many seconds
CALL_TIMEOUT_S = 600.0  # longest wait of one call of a role


class BusTimeout(TimeoutError):
    """A wait passed its deadline. The text names what the call waited for, since when, and which task has to act."""


class BusClosed(RuntimeError):
    """The run has ended, so no call can wait for anything more."""


class BusLost(RuntimeError):
    """The bus process died. The controller has to restore the state of the last snapshot."""


class LeaseLost(RuntimeError):
    """The lease expired or was released. Its groups went back, and another worker may have them."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Is the permission for one prompt group to enter the rollout.

    ``min_version`` is the oldest weight version with which the engine may start the group, so that it stays inside the
    window. ``attempt`` is 0 for a new group and higher if an earlier rollout worker was lost; sampling seeds do not
    depend on it. ``drawn`` is the index of the group's prompt in the order of data.mix, None in a run without it.
    """

    index: int
    group_uid: str
    min_version: int
    attempt: int = 0
    drawn: int | None = None

    @property
    def data_index(self) -> int:
        """Returns the index of the group's prompt in the endless order of the data."""
        return self.index if self.drawn is None else self.drawn


class Group(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Is a complete group: as the rollout puts it, as the bus keeps it, and as a task leases or reads it.

    ``uids`` names the samples that were kept, and ``versions`` has the oldest weight version among the trained tokens
    of each. ``columns`` has the payloads; in a lease, only those that the task asked for. ``dropped`` maps the uids of
    the other samples to the reason. ``media`` maps the digest of each media item that the tree places to its size in
    bytes; the client of a bus reads it from column `MEDIA`, so a caller leaves it empty. ``modality`` is that of the
    prompt (`relax_core.config.modality_shares`), empty in a run on text and before the group is leased.
    """

    group_uid: str
    index: int
    uids: list[str]
    versions: list[int]
    columns: dict[str, bytes]
    dropped: dict[str, str] = {}
    media: dict[str, int] = {}
    modality: str = ""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Is the request for the next lease of a task.

    The task "actor" consumes groups; any other task works on each group once and writes columns. ``columns`` names the
    columns that a group must have. ``payloads`` names those that come with the lease, None for all; `Bus.read` reads
    the others. ``min_groups`` and ``max_groups`` bound the number of groups; the call waits for the minimum. ``step``
    is the train step that consumes the groups (task "actor" only): groups that have left its window are dropped as
    stale, or leased for masking if the bus is configured so. ``lease_s`` is the time in seconds after which the groups
    go back.
    """

    task: str
    columns: tuple[str, ...]
    max_groups: int
    payloads: tuple[str, ...] | None = None
    min_groups: int = 1
    step: int | None = None
    lease_s: float = LEASE_S


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Groups that a task holds.

    ``waited_s`` is the time in seconds for which the call waited because too few were ready.
    """

    lease_id: int
    task: str
    rows: list[Group]
    waited_s: float = 0.0


class ModalityCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the samples whose prompts have one modality.

    ``dropped`` maps reasons, and ``staleness`` the staleness of trained samples, to numbers of samples.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    staleness: dict[int, int]

    @property
    def open(self) -> int:
        """Returns the number of samples without an end."""
        return self.issued - self.trained - sum(self.dropped.values())


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of samples. ``lost`` and ``trained_twice`` are computed from the ledger's entries.

    ``modalities`` has the counts by modality of the prompts whose data rows were read, in a run with media.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    open: int
    lost: int
    trained_twice: int
    modalities: dict[str, ModalityCounts] = {}


class BusProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the state of the run.

    ``version`` is the weight version in force, which equals the number of finished train steps. ``media_items`` counts
    the media items that somebody names, and ``media_bytes`` is their size in bytes. ``ledger_problem`` says why the
    ledger's events cannot be written now, "" if they can.
    """

    version: int
    admitted: int
    in_flight: int
    waiting: int
    leased: int
    credits: int
    staleness_histogram: dict[int, int]
    ledger: LedgerCounts
    media_items: int = 0
    media_bytes: int = 0
    ledger_problem: str = ""


class VersionChange(msgspec.Struct, frozen=True, kw_only=True):
    """Is a new weight version in force.

    ``retired`` names the groups in flight that ended with the change, because the train steps had enough groups without
    them (over-sampling). The rollout may stop to generate them.
    """

    version: int
    retired: list[str]


class BusWait(msgspec.Struct, frozen=True, kw_only=True):
    """Is a call that waits in the bus.

    ``task`` and ``worker`` name the caller; ``worker`` is its number among the task's workers. ``since_s`` is the time
    in seconds since the call came. ``text`` says what the call waits for, with uids. ``owed_by`` lists the tasks that
    have to act before the call can go on; rollout workers whose groups it waits for are named as "rollout-1".
    """

    task: str
    since_s: float
    text: str
    owed_by: list[str]
    worker: int = 0


class Bus(Protocol):
    """Declares the methods of every bus backend. All arguments beyond the first are keyword-only.

    A thread without an event loop runs a call by ``asyncio.run``.
    ``worker`` is the number of the calling rollout worker, from 0. An admission belongs to the worker that asked for
    it.
    """

    # -- calls of the rollout ------------------------------------------------------------------------------------
    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Waits for credit, then admits 1 to ``max_groups`` prompt groups and opens their samples in the ledger.

        Waiting workers get credit in the order in which they asked, and each has at most its part of the groups in
        flight. The groups of a restored snapshot go to the worker that asks first.
        """

    async def reclaim(self, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Returns the worker's admissions whose groups never came, in order of issue: its work after a restart.

        A waiting `admit` of this worker raises `LeaseLost`, because only its predecessor can have made the call. Media
        items that the predecessor held stay until the last of these groups is complete or has ended, because engines
        may still work on its requests.
        """

    async def put(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        """Enters complete groups. Ignores a group that is in, trained or dropped already (at-least-once delivery).

        From now on the group names the media items of its column `MEDIA`, until it ends. Raises ValueError if nobody
        names one of them, because its tensors may be gone.
        """

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        """Ends an admitted group that yields nothing. Its credit becomes free."""

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        """Says which modality the prompt of each of these groups has, by the groups' indices.

        A group keeps its first name; with data.mix it has one from its admission on. In a run on text nobody calls it.
        """

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        """Returns once another version than ``since_version`` is in force, with the worker's groups that ended since.

        One caller of each worker may call it. After ``timeout_s`` it returns the same version and no groups.
        """

    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Names media items for a rollout worker, and returns the digests of those that are not stored.

        ``items`` maps digests to sizes in bytes. The tensors of an item stay as long as a rollout worker holds it, a
        group places it or a lease has such a group; then the bus removes them. A worker writes an item's file, holds
        the item, writes those that this call returns again, and holds them again. It holds an item until it has put
        the groups whose requests use it. A file that nobody holds is removed some minutes after it was written.
        """

    async def let_go(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Ends the hold of a rollout worker on media items. Ignores those that it does not hold."""

    async def media_folder(self, *, timeout_s: float) -> Path:
        """Returns the folder of this process's node in which a rollout worker writes the files of items."""

    async def bring_media(self, digests: Sequence[str], *, node_id: str = "", timeout_s: float) -> None:
        """Waits until a node has the files of items, for a reader that has no bus, such as an engine.

        ``node_id`` is Ray's, by default that of this process. Raises `MediaGone` if an item is not stored anywhere. If
        all nodes read one folder, it does nothing.
        """

    def media_reader(self, *, timeout_s: float) -> MediaReader:
        """Returns the reader that maps the tensors of stored items, for any process that has the bus.

        ``timeout_s`` is the deadline of each read, which blocks its thread. The views stay valid after the item was
        removed.
        """

    # -- calls of workers that lease ------------------------------------------------------------------------------
    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        """Waits until enough groups are ready, then leases them."""

    async def read(
        self, lease_id: int, group_uids: Sequence[str], *, columns: Sequence[str], timeout_s: float
    ) -> list[Group]:
        """Returns columns of groups of a held lease, in the order of ``group_uids``. The lease stays as it is.

        Any process that knows the lease may call it, so that each rank can read what it trains. Raises `LeaseLost` if
        the lease or one of its groups has ended, and ValueError for a group that is not in the lease or a column that a
        group lacks.
        """

    async def write(
        self,
        lease_id: int,
        columns: Mapping[str, Mapping[str, bytes]],
        *,
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        """Adds columns (group_uid → column → payload) and ends the lease. With ``then`` it waits for the next lease."""

    async def ack(
        self,
        lease_ids: Sequence[int],
        *,
        step: int,
        dropped: Mapping[str, str],
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        """Ends the samples of these leases as trained at train step ``step``, and sets the version to ``step + 1``.

        ``dropped`` maps the uids of samples whose tokens were all masked to the reason. With ``then`` the call waits
        for the next lease.
        """

    async def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        """Gives groups back unused."""

    async def revoke(self, task: str, *, timeout_s: float) -> None:
        """Ends the leases of a task whose worker was lost.

        Their groups go back, and its waiting calls raise `LeaseLost`.
        """

    # -- calls of the controller ---------------------------------------------------------------------------------
    async def progress(self, *, timeout_s: float) -> BusProgress:
        """Returns the state of the run."""

    async def waits(self, *, timeout_s: float) -> list[BusWait]:
        """Returns the calls that wait for admissions or leases now, the longest wait first."""

    async def snapshot(self, *, timeout_s: float) -> bytes:
        """Returns the bus's part of a checkpoint as msgpack: ledger, data cursor and open groups.

        Groups in flight are not in it. Their prompts are issued again on resume, each once.
        """

    async def restore(self, snapshot: bytes, *, timeout_s: float) -> None:
        """Goes back to a snapshot."""

    async def close(self, *, reason: str, timeout_s: float) -> None:
        """Ends the run: every waiting call raises `BusClosed`."""
