"""The contract of the data bus, through which rollout and trainer exchange groups. It also records how samples end.

The rollout puts COMPLETE groups. Several roles add columns to a group. A task gets a group only when the group has
every column that the task requests. A group may be delivered more than once, because leases have deadlines. The ledger
ensures that a group is trained only once.

Every call has a timeout ``timeout_s``, in seconds. After that time the call raises `BusTimeout`; the error's text
describes the awaited groups and the task that has to act. A call to a closed bus raises `BusClosed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from relax_core.contracts.media import MediaReader

LEASE_S = 600.0  # after this time the groups of an unacknowledged lease return to the bus
CALL_TIMEOUT_S = 600.0  # longest wait of one call of a role


class BusTimeout(TimeoutError):
    """A wait passed its deadline. The text names the awaited data, the duration, and the task that has to act."""


class BusClosed(RuntimeError):
    """The bus is closed because the run has ended."""


class BusLost(RuntimeError):
    """The bus process died. The controller has to restore the state of the last snapshot."""


class LeaseLost(RuntimeError):
    """The lease expired or was released. Its groups returned to the bus, and another worker may have leased them."""


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Permits one prompt group to enter the rollout.

    ``min_version`` is the oldest weight version with which an engine may start the group; older weights would leave the
    staleness window. ``attempt`` is 0 for a new group and higher after the loss of a rollout worker; sampling seeds do
    not depend on ``attempt``. ``drawn`` is the index of the group's prompt in the order of data.mix, None without
    data.mix.
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
    """Holds a complete group: the rollout puts it, the bus stores it, and tasks lease or read it.

    ``uids`` lists the kept samples. ``versions`` has the oldest weight version among the trained tokens of each kept
    sample. ``columns`` has the payloads; in a lease, only the requested payloads. ``dropped`` maps the uids of the
    dropped samples to the reason. ``media`` maps the digest of each media item in the tree to the item's size in bytes;
    the bus client fills ``media`` from column `MEDIA`, so a caller leaves it empty. ``modality`` is the prompt's
    modality (`relax_core.config.modality`). It is empty in a text-only run and before the group is leased.
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
    columns that a group must have. ``payloads`` lists the columns to return with the lease, None for all; `Bus.read`
    returns further columns. ``min_groups`` and ``max_groups`` bound the number of groups; the call waits for the
    minimum. ``step`` is the train step that consumes the groups (task "actor" only). Groups outside this step's
    staleness window are dropped as stale; with mode.on_stale=mask they are leased, and their stale tokens are masked
    later. ``lease_s`` is the time in seconds after which the groups return to the bus.
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

    ``waited_s`` is the time in seconds that the call waited because too few groups were ready.
    """

    lease_id: int
    task: str
    rows: list[Group]
    waited_s: float = 0.0


class ModalityCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts the samples of one modality.

    ``dropped`` maps each reason to the number of samples dropped for it. ``staleness`` is the staleness histogram of
    the trained samples.
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
    """Counts samples. ``lost`` and ``trained_twice`` are computed from the ledger's entries.

    ``modalities`` has the counts by modality in a run with media. It covers only prompts with a data row that was read.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    open: int
    lost: int
    trained_twice: int
    modalities: dict[str, ModalityCounts] = {}


class BusProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the state of the run that the bus knows.

    ``version`` is the current weight version, which equals the number of finished train steps. ``media_items`` is the
    number of stored media items with references, and ``media_bytes`` their total size in bytes. ``ledger_problem`` says
    why the bus cannot write the ledger's events now. It is "" if the bus can write them.
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
    """Reports a new current weight version.

    ``retired`` lists groups in flight that the bus ended at this change, because over-sampling provided enough other
    groups for the train steps. The rollout may stop generating the retired groups.
    """

    version: int
    retired: list[str]


class BusWait(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a call that waits in the bus.

    ``task`` and ``worker`` identify the caller; ``worker`` is its index among the task's workers. ``since_s`` is the
    time in seconds since the start of the wait. ``text`` describes the awaited data, with uids. ``owed_by`` lists the
    tasks that have to act before the call can continue; a rollout worker appears as "rollout-1".
    """

    task: str
    since_s: float
    text: str
    owed_by: list[str]
    worker: int = 0


class Bus(Protocol):
    """Declares the methods of all bus backends.

    In a thread without an event loop, run a call with ``asyncio.run``. ``worker`` is the index of the calling rollout
    worker, from 0. An admission belongs to the worker that requested the admission.
    """

    # -- calls of the rollout ------------------------------------------------------------------------------------
    async def admit(self, max_groups: int, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Waits for credit, then admits 1 to ``max_groups`` prompt groups and adds their samples to the ledger as open.

        Credit is the number of groups that may still start. Waiting workers get credit in the order of their requests.
        Each worker has at most its share of the groups in flight. The groups of a restored snapshot go to the first
        worker that requests groups.
        """

    async def reclaim(self, *, worker: int = 0, timeout_s: float) -> list[Admission]:
        """Returns a restarted worker's admissions without a complete group, in order of issue.

        A waiting `admit` of this worker raises `LeaseLost`, because only the worker's previous process can have made
        that call. Media items with references of the previous process stay until the last of these groups is complete
        or has ended, because engines may still process requests of the previous process.
        """

    async def put(self, groups: Sequence[Group], *, timeout_s: float) -> None:
        """Adds complete groups. Ignores a group that was put, trained or dropped before (at-least-once delivery).

        A group has references to the media items in its column `MEDIA` until the group ends. Raises ValueError if an
        item has no reference before the call, because the item's tensors may have been removed.
        """

    async def drop(self, group_uid: str, *, reason: str, timeout_s: float) -> None:
        """Ends an admitted group without a result and frees its credit."""

    async def name_modalities(self, modalities: Mapping[int, str], *, timeout_s: float) -> None:
        """Sets the modality of each group's prompt, by group index.

        Only the first modality that is set for a group counts. With data.mix, `admit` sets the modality. A text-only
        run has no modalities.
        """

    async def wait_version(self, since_version: int, *, worker: int = 0, timeout_s: float) -> VersionChange:
        """Waits until the version differs from ``since_version``; returns it and the worker's groups that ended since.

        Each worker may have one such call at a time. After ``timeout_s`` the call returns ``since_version`` and no
        groups.
        """

    async def hold(self, items: Mapping[str, int], *, worker: int = 0, timeout_s: float) -> list[str]:
        """Adds a rollout worker's references to media items, and returns the digests of items that are not stored.

        ``items`` maps digests to sizes in bytes. The bus stores the tensors of an item while a rollout worker, a group
        or a lease has a reference to the item, then removes them. A worker first writes an item's file and then calls
        this method. If the call returns the item's digest, the worker writes the file again and repeats the call. The
        worker keeps its reference until it has put all groups with requests that use the item. A file without
        references is removed some minutes after it was written.
        """

    async def release_items(self, digests: Sequence[str], *, worker: int = 0, timeout_s: float) -> None:
        """Removes a rollout worker's references to media items. Ignores items without such a reference."""

    async def media_folder(self, *, timeout_s: float) -> Path:
        """Returns this node's media folder. Rollout workers write the files of items there."""

    async def fetch_media(self, digests: Sequence[str], *, node_id: str = "", timeout_s: float) -> None:
        """Waits until a node has the files of items, for a reader without a bus client, such as an engine.

        ``node_id`` is Ray's node id, by default the id of this process's node. Raises `MediaGone` if no node stores an
        item. Does nothing if all nodes read the same folder.
        """

    def media_reader(self, *, timeout_s: float) -> MediaReader:
        """Returns the reader that maps the tensors of stored items, for any process with a bus client.

        ``timeout_s`` is the time limit of each read. A read blocks the calling thread. The views stay valid after the
        item is removed.
        """

    # -- calls of workers that lease ------------------------------------------------------------------------------
    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        """Waits until enough groups are ready, then leases them."""

    async def read(
        self, lease_id: int, group_uids: Sequence[str], *, columns: Sequence[str], timeout_s: float
    ) -> list[Group]:
        """Returns columns of groups in a valid lease, in the order of ``group_uids``. The lease stays valid.

        Any process that knows the lease id may call this method, so each rank can read the groups that it trains.
        Raises `LeaseLost` if the lease or one of its groups has ended. Raises ValueError for a group outside the lease
        and for a missing column.
        """

    async def write(
        self,
        lease_id: int,
        columns: Mapping[str, Mapping[str, bytes]],
        *,
        then: LeaseRequest | None = None,
        timeout_s: float,
    ) -> Lease | None:
        """Adds columns (group_uid → column → payload) and ends the lease.

        With ``then`` the call also waits for the next lease and returns it.
        """

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

        ``dropped`` maps the uids of samples with only masked tokens to the reason. With ``then`` the call also waits
        for the next lease and returns it.
        """

    async def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        """Ends leases and returns their groups to the bus untrained."""

    async def revoke(self, task: str, *, timeout_s: float) -> None:
        """Ends the leases of a task after the loss of its worker.

        The groups of the leases return to the bus. Waiting calls of the task raise `LeaseLost`.
        """

    # -- calls of the controller ---------------------------------------------------------------------------------
    async def progress(self, *, timeout_s: float) -> BusProgress:
        """Returns the state of the run."""

    async def waits(self, *, timeout_s: float) -> list[BusWait]:
        """Returns the calls that wait for admissions or leases now, longest wait first."""

    async def snapshot(self, *, timeout_s: float) -> bytes:
        """Returns the bus's state for a checkpoint as msgpack: ledger, data cursor and open groups.

        The snapshot contains no payloads. A resumed run issues the prompt of each open group once more.
        """

    async def restore(self, snapshot: bytes, *, timeout_s: float) -> None:
        """Restores a snapshot."""

    async def close(self, *, reason: str, timeout_s: float) -> None:
        """Closes the bus: every waiting call raises `BusClosed`."""
