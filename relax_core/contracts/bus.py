"""The contract of the data bus: rollout and trainer exchange groups through it, and it records how samples end.

The rollout puts COMPLETE groups. Several roles add columns to a group; a task gets a group only when it has every
column that the task requests. Delivery is at least once, by leases with deadlines; training is exactly once, by the
ledger.

Every call takes ``timeout_s``, in seconds. After that time it raises `BusTimeout`, whose text describes the awaited
groups and the task that has to act. A call to a closed bus raises `BusClosed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from relax_core.contracts.media import MediaReader

LEASE_S = 600.0  # the groups of a lease return to the bus after this time, unless it was acknowledged
CALL_TIMEOUT_S = 600.0  # longest wait of one call of a role


class BusTimeout(TimeoutError):
    """A wait passed its deadline. The text says what the call waited for, for how long, and which task has to act."""


class BusClosed(RuntimeError):
    """The bus is closed because the run has ended."""


class BusLost(RuntimeError):
    """The bus process died. The controller has to restore the state of the last snapshot."""


class LeaseLost(RuntimeError):
    """The lease expired or was released. Its groups went back, and another worker may have them."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Permits one prompt group to enter the rollout.

    ``min_version`` is the oldest weight version with which the engine may start the group, so that the group stays
    inside the staleness window. ``attempt`` is 0 for a new group and higher after the loss of a rollout worker;
    sampling seeds do not depend on it. ``drawn`` is the index of the group's prompt in the order of data.mix, None
    without data.mix.
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
    """Holds a complete group: as the rollout puts it, as the bus stores it, and as a task leases or reads it.

    ``uids`` lists the samples that were kept, and ``versions`` has the oldest weight version among the trained tokens
    of each. ``columns`` has the payloads; in a lease, only the requested payloads. ``dropped`` maps the uids of the
    other samples to the reason. ``media`` maps the digest of each media item in the tree to its size in bytes; the
    bus client fills it from column `MEDIA`, so a caller leaves it empty. ``modality`` is the prompt's modality
    (`relax_core.config.modality`), empty in a run on text and before the group is leased.
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
    """Requests the next lease of a task.

    The task "actor" consumes groups; any other task processes each group once and writes columns. ``columns`` lists the
    columns that a group must have. ``payloads`` lists the columns whose payloads come with the lease, None for all;
    `Bus.read` reads the others. ``min_groups`` and ``max_groups`` bound the number of groups; the call waits for the
    minimum. ``step`` is the train step that consumes the groups (task "actor" only): groups that have left its window
    are dropped as stale, or leased for masking with mode.on_stale=mask. ``lease_s`` is the time in seconds after which
    the groups return to the bus.
    """

    task: str
    columns: tuple[str, ...]
    max_groups: int
    payloads: tuple[str, ...] | None = None
    min_groups: int = 1
    step: int | None = None
    lease_s: float = LEASE_S


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the groups that a task has leased.

    ``waited_s`` is the time in seconds for which the call waited because too few groups were ready.
    """

    lease_id: int
    task: str
    rows: list[Group]
    waited_s: float = 0.0


class ModalityCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the samples of one modality.

    ``dropped`` maps each reason to its number of samples. ``staleness`` is the staleness histogram of the trained
    samples.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    staleness: dict[int, int]

    @property
    def open(self) -> int:
        """Returns the number of samples that have not ended."""
        return self.issued - self.trained - sum(self.dropped.values())


class LedgerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of samples. ``lost`` and ``trained_twice`` are computed from the ledger's entries.

    ``modalities`` has the counts by modality in a run with media, for prompts whose data rows were read.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    open: int
    lost: int
    trained_twice: int
    modalities: dict[str, ModalityCounts] = {}


class BusProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the bus's view of the run's state.

    ``version`` is the weight version in force, which equals the number of finished train steps. ``media_items`` counts
    the stored media items with references, and ``media_bytes`` is their size in bytes. ``ledger_problem`` says why the
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
    """Reports a new weight version in force.

    ``retired`` lists the groups in flight that ended with the change, because the train steps had enough other groups
    (over-sampling). The rollout may stop generating them.
    """

    version: int
    retired: list[str]


class BusWait(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a call that waits in the bus.

    ``task`` and ``worker`` identify the caller; ``worker`` is its number among the task's workers. ``since_s`` is the
    time in seconds since the start of the wait. ``text`` says what the call waits for, with uids. ``owed_by`` lists the
    tasks that have to act before the call can continue, with rollout workers as "rollout-1".
    """

    task: str
    since_s: float
    text: str
    owed_by: list[str]
    worker: int = 0


class Bus(Protocol):
    """Declares the methods of all bus backends.

    A thread without an event loop runs a call by ``asyncio.run``.
    ``worker`` is the number of the calling rollout worker, from 0. An admission belongs to the worker that requested
    it.
    """

    # -- calls of the rollout ------------------------------------------------------------------------------------
    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Waits for credit, then admits 1 to ``max_groups`` prompt groups and opens their samples in the ledger.

        Waiting workers get credit in order of their requests, and each has at most its share of the groups in flight.
        The groups of a restored snapshot go to the first worker that requests groups.
        """

    async def reclaim(self, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Returns the worker's admissions without a complete group, in order of issue: its work after a restart.

        A waiting `admit` of this worker raises `LeaseLost`, because only the worker's previous process can have made
        the call. Media items that the previous process held stay until the last of these groups is complete or has
        ended, because engines may still process its requests.
        """

    async def put(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        """Adds complete groups. Ignores a group that was put, trained or dropped before (at-least-once delivery).

        The group references the media items of its column `MEDIA` until it ends. Raises ValueError if an item has no
        reference before the call, because its tensors may be gone.
        """

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        """Ends an admitted group without a result. Its credit becomes free."""

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        """Sets the modality of each group's prompt, by group index.

        A group keeps the first modality that it gets; with data.mix admission sets it. A run on text does not use it.
        """

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        """Waits until the version is not ``since_version``; returns it with the worker's groups that ended since.

        Each worker may have one such call at a time. After ``timeout_s`` it returns the same version and no groups.
        """

    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Adds a rollout worker's references to media items, and returns the digests of items that are not stored.

        ``items`` maps digests to sizes in bytes. The tensors of an item stay as long as a rollout worker holds it, a
        group places it or a lease has such a group; then the bus removes them. A worker writes an item's file and
        holds the item; if this call returns the item, the worker writes and holds it again. It holds an item until it
        has put the groups whose requests use it. A file without references is removed some minutes after it was
        written.
        """

    async def release_items(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Removes a rollout worker's references to media items. Ignores items that it does not hold."""

    async def media_folder(self, *, timeout_s: float) -> Path:
        """Returns this node's folder, in which a rollout worker writes the files of items."""

    async def fetch_media(self, digests: Sequence[str], *, node_id: str = "", timeout_s: float) -> None:
        """Waits until a node has the files of items, for a reader without a bus client, such as an engine.

        ``node_id`` is Ray's node id, by default that of this process. Raises `MediaGone` if no node stores an item.
        Does nothing if all nodes read one folder.
        """

    def media_reader(self, *, timeout_s: float) -> MediaReader:
        """Returns the reader that maps the tensors of stored items, for any process with a bus client.

        ``timeout_s`` is the deadline of each read, which blocks its thread. The views stay valid after the item is
        removed.
        """

    # -- calls of workers that lease ------------------------------------------------------------------------------
    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        """Waits until enough groups are ready, then leases them."""

    async def read(
        self, lease_id: int, group_uids: Sequence[str], *, columns: Sequence[str], timeout_s: float
    ) -> list[Group]:
        """Returns columns of groups of a held lease, in the order of ``group_uids``. The lease stays valid.

        Any process that knows the lease id may call it, so that each rank can read the groups that it trains. Raises
        `LeaseLost` if the lease or one of its groups has ended, and ValueError for a group outside the lease or for a
        missing column.
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

        ``dropped`` maps the uids of samples whose tokens were all masked to the reason. With ``then`` it waits for the
        next lease.
        """

    async def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        """Ends leases and returns their groups to the bus untrained."""

    async def revoke(self, task: str, *, timeout_s: float) -> None:
        """Ends the leases of a task whose worker was lost.

        Their groups return to the bus, and its waiting calls raise `LeaseLost`.
        """

    # -- calls of the controller ---------------------------------------------------------------------------------
    async def progress(self, *, timeout_s: float) -> BusProgress:
        """Returns the state of the run."""

    async def waits(self, *, timeout_s: float) -> list[BusWait]:
        """Returns the calls that wait for admissions or leases now, longest wait first."""

    async def snapshot(self, *, timeout_s: float) -> bytes:
        """Returns the bus's state for a checkpoint as msgpack: ledger, data cursor and open groups.

        It contains no payloads. The prompts of open groups are issued again on resume, each once.
        """

    async def restore(self, snapshot: bytes, *, timeout_s: float) -> None:
        """Restores a snapshot."""

    async def close(self, *, reason: str, timeout_s: float) -> None:
        """Closes the bus: every waiting call raises `BusClosed`."""
