"""The replay buffer: the state machine of the bus. It is synchronous, never waits, and uses neither Ray nor asyncio.

A method that cannot proceed yet returns an empty list or None, and the bus process calls it again after the next
change. The checks of arguments raise ValueError with the key, the value and the fix.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from relax_core.bus.data_cursor import DataCursor, MixedCursor, PromptDraw, Snapshot
from relax_core.bus.ledger import Ledger
from relax_core.bus.named_media import NamedMedia
from relax_core.bus.settings import ACTOR, BusSettings
from relax_core.bus.staleness import OVER_SAMPLED, STALE, choose, is_stale, is_surplus, newest_version
from relax_core.contracts.bus import (
    Admission,
    BusClosed,
    BusProgress,
    Group,
    Lease,
    LeaseLost,
    LeaseRequest,
    LedgerCounts,
    VersionChange,
)
from relax_core.contracts.columns import payload_bytes, persisted_payloads
from relax_core.contracts.media_file import is_digest
from relax_core.contracts.tree import group_uid, sample_uid


class ReplayBuffer:
    """Stores all state of a bus: groups, leases, the ledger and the data cursor.

    ``clock`` returns monotonic seconds. A payload may be any object with a length in bytes.
    """

    def __init__(self, settings: BusSettings, *, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.ledger = ledger
        self.clock = clock
        self.version = 0
        # The groups are in order of issue, because indices of new groups increase.
        self.groups: dict[str, OpenGroup] = {}
        self.leases = LeaseTable(clock)
        self.media = NamedMedia()
        self.close_reason: str | None = None
        self._mixed = MixedCursor(settings) if settings.mix else None
        self._cursor = self._mixed or DataCursor()
        self.staleness: Counter[int] = Counter()
        self._retired = RetiredGroups()

    # -- calls of the rollout --------------------------------------------------------------------------------------
    def admit(self, max_groups: int, *, worker: int = 0) -> list[Admission]:
        """Admits up to ``max_groups`` groups for a rollout worker; the list of admissions may be empty.

        The staleness window limits the number of groups. If the run has several workers, a limit for each worker
        applies, too.
        """
        self._require_running()
        check_admit(max_groups)
        draws = self._cursor.admit(self, min(max_groups, self.free_slots_of(worker)))
        return [self._issue(draw, worker) for draw in draws]

    def _issue(self, draw: PromptDraw, worker: int) -> Admission:
        admission = Admission(
            index=draw.index,
            group_uid=group_uid(draw.index),
            min_version=draw.min_version,
            attempt=draw.attempt,
            drawn=draw.drawn,
        )
        uids = tuple(sample_uid(admission.group_uid, number) for number in range(self.settings.group_size))
        group = OpenGroup(admission=admission, uids=uids, admitted_at=self.clock(), worker=worker)
        self.groups[admission.group_uid] = group
        self.ledger.issue(draw.index, admission.group_uid, uids, attempt=draw.attempt, min_version=draw.min_version)
        if draw.modality:
            self.name_modalities({draw.index: draw.modality})
        return admission

    def name_modalities(self, modalities: Mapping[int, str]) -> None:
        """Sets the modality of prompts by group index. Later calls for the same group have no effect."""
        for index, modality in modalities.items():
            check_issued(group_uid(index), index, issued=self._cursor.next_index)
            self.ledger.name_modality(index, modality)
            if (group := self.groups.get(group_uid(index))) is not None:
                group.modality = group.modality or modality

    def reclaim(self, *, worker: int = 0) -> list[Admission]:
        """Returns the worker's admissions of incomplete groups, in order of issue.

        Increases the attempt of each admission by 1.
        """
        self._require_running()
        reclaimed = []
        for group in self.groups.values():
            if group.in_flight and group.worker == worker:
                old = group.admission
                group.admission = msgspec.structs.replace(old, attempt=old.attempt + 1)
                group.admitted_at = self.clock()
                self.ledger.issue(
                    old.index, old.group_uid, group.uids, attempt=old.attempt + 1, min_version=old.min_version
                )
                reclaimed.append(group.admission)
        self.media.lose_worker(worker, until_ended=[admission.group_uid for admission in reclaimed])
        return reclaimed

    def accepts(self, uid: str) -> bool:
        """Returns whether `put` would accept this group: the group was admitted and is neither complete nor ended."""
        group = self.groups.get(uid)
        return group is not None and group.in_flight

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raises ValueError if a group contradicts its admission or is too large."""
        for given in groups:
            check_issued(given.group_uid, given.index, issued=self._cursor.next_index)
            check_size(given.group_uid, given.columns, given.media, max_row_bytes=self.settings.max_row_bytes)
            group = self.groups.get(given.group_uid)
            if group is not None:
                check_samples(given, group.uids, version=self.version)
                if group.in_flight:
                    check_media(given, self.media)

    def put(self, groups: Sequence[Group]) -> None:
        """Adds complete groups; an invalid group refuses the whole call. A group without kept samples ends at once."""
        self._require_open()
        self.check_groups(groups)
        for given in groups:
            group = self.groups.get(given.group_uid)
            if group is None or not group.in_flight:
                continue
            self.ledger.put(given.group_uid, given.uids, given.versions, persisted=persisted_payloads(given.columns))
            if given.uids:
                group.complete = msgspec.structs.replace(given, columns=dict(given.columns))
                if self.settings.spare_groups:
                    group.newest_version = newest_version(given.columns)
                self.media.enter_group(given.group_uid, given.media)
                self._drop_if_stale(group)
            else:
                self._end_as_dropped(group, given.dropped)

    def drop(self, uid: str, *, reason: str) -> None:
        """Ends a group in flight. Does nothing if the group is complete or has ended."""
        self._require_open()
        group = self.groups.get(uid)
        if group is None:
            check_issued(uid, None, issued=self._cursor.next_index)
        elif group.in_flight:
            self._end_as_dropped(group, dict.fromkeys(group.uids, reason))

    def version_change(self, since_version: int, *, worker: int = 0) -> VersionChange | None:
        """Returns the new version and the worker's groups that ended since the old version; None without a change."""
        self._require_running()
        if self.version == since_version:
            return None
        return VersionChange(version=self.version, retired=self._retired.since(since_version, worker=worker))

    def hold(self, items: Mapping[str, int], *, worker: int = 0) -> None:
        """Adds a rollout worker's references to media items (digest → bytes)."""
        self._require_open()
        check_digests(items)
        self.media.hold(worker, items)

    def release_items(self, digests: Sequence[str], *, worker: int = 0) -> None:
        """Removes a rollout worker's references to media items."""
        self._require_open()
        self.media.release_items(worker, digests)

    # -- calls of workers that lease --------------------------------------------------------------------------------
    def lease(self, request: LeaseRequest) -> Lease | None:
        """Leases groups. Returns None if fewer than ``min_groups`` groups are ready."""
        self._require_running()
        check_lease_request(request, version=self.version, groups_per_step=self.settings.groups_per_step)
        self.expire()
        if request.task == ACTOR and request.step != self.version:
            return None
        chosen = self._mixed.choose(self, request) if self._mixed else choose(self, request)
        if len(chosen) < request.min_groups:
            return None
        return self._hand_out(request, chosen)

    def _hand_out(self, request: LeaseRequest, chosen: list[OpenGroup]) -> Lease:
        lease = self.leases.open(request, [group.admission.group_uid for group in chosen])
        payloads = request.columns if request.payloads is None else request.payloads
        leased = []
        for group in chosen:
            complete = group.complete
            assert complete is not None
            group.leases[request.task] = lease.lease_id
            if request.task == ACTOR:
                group.actor_step = self.version
                group.deliveries += 1
                self.ledger.lease(complete.group_uid, complete.uids, step=self.version, delivery=group.deliveries)
            leased.append(group.leased_group(payloads))
        self.media.lease(lease.lease_id, lease.group_uids)
        return Lease(lease_id=lease.lease_id, task=lease.task, rows=leased)

    def read(self, lease_id: int, group_uids: Sequence[str], columns: Sequence[str]) -> Lease:
        """Returns ``columns`` of some groups of a lease. The lease stays valid."""
        self._require_running()
        self.expire()
        lease = self.leases.held(lease_id)
        check_read(lease.lease_id, group_uids, held=lease.group_uids)
        if ended := [uid for uid in group_uids if uid not in self.groups]:
            raise LeaseLost(f"group {ended[0]} of lease {lease_id} has ended: it was trained or dropped")
        leased = [self.groups[uid].leased_group(columns) for uid in group_uids]
        return Lease(lease_id=lease_id, task=lease.task, rows=leased)

    def write(self, lease_id: int, columns: Mapping[str, Mapping[str, bytes]]) -> None:
        """Adds columns to every group of a worker's lease and ends the lease. Skips groups that have ended."""
        self._require_open()
        self.expire()
        lease = self.leases.held(lease_id)
        check_write(lease_id, columns, task=lease.task, held=lease.group_uids)
        written = [(group, columns[uid]) for uid in lease.group_uids if (group := self.groups.get(uid)) is not None]
        for group, payloads in written:
            complete = group.complete
            assert complete is not None
            together = {**complete.columns, **payloads}
            check_size(complete.group_uid, together, complete.media, max_row_bytes=self.settings.max_row_bytes)
        for group, payloads in written:
            assert group.complete is not None
            group.complete.columns.update(payloads)
            group.done.add(lease.task)
            del group.leases[lease.task]
        self._remove_lease(lease_id)

    def ack(self, lease_ids: Sequence[int], *, step: int, dropped: Mapping[str, str]) -> None:
        """Records the leases' samples as trained at ``step`` or as ``dropped``. The version becomes ``step + 1``."""
        self._require_open()
        check_ack_step(step, version=self.version)
        self.expire()
        leases = self.leases.of_step(lease_ids, step)
        groups = [self.groups[uid] for lease in leases for uid in lease.group_uids]
        check_dropped(dropped, [group.complete.uids for group in groups if group.complete is not None])
        for group in groups:
            self._end_as_trained(group, step=step, masked=dropped)
        for lease in leases:
            self._remove_lease(lease.lease_id)
        self.version = step + 1
        for group in list(self.groups.values()):
            if not self._drop_if_surplus(group):
                self._drop_if_stale(group)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Returns groups to the buffer untrained. Skips leases that have ended already."""
        self._require_open()
        for lease_id in lease_ids:
            if lease_id in self.leases:
                self._end_lease(self.leases.held(lease_id), reason="released")

    def revoke(self, task: str) -> None:
        """Ends all leases of a lost worker's task."""
        self._require_open()
        for lease in self.leases.of_task(task):
            self._end_lease(lease, reason="revoked")

    def expire(self) -> None:
        """Ends every expired lease and returns its groups to the buffer. Does nothing on a closed bus."""
        if self.close_reason is not None:
            return
        for lease in self.leases.overdue():
            self._end_lease(lease, reason="expired")

    # -- calls of the controller -----------------------------------------------------------------------------------
    def slots_left(self) -> int:
        """Returns how many more groups the current train step may lease."""
        leased = sum(group.actor_step == self.version for group in self.groups.values())
        return self.settings.groups_per_step - leased

    def credits(self) -> int:
        """Returns how many more groups may start with the current weights (docs/rollout.md)."""
        outstanding = sum(group.admission.min_version <= self.version for group in self.groups.values())
        return max(0, self.settings.window_groups - outstanding)

    def free_slots_of(self, worker: int) -> int:
        """Returns how many more groups a rollout worker may have in flight, regardless of the staleness window."""
        most = self.settings.max_in_flight
        if most is None:
            return sys.maxsize
        return most - sum(group.in_flight and group.worker == worker for group in self.groups.values())

    def finished(self) -> bool:
        """Returns whether all train steps are done."""
        return self.version >= self.settings.total_steps

    def progress(self) -> BusProgress:
        """Returns the counts of groups and samples, and the staleness histogram of all trained samples."""
        open_indices = [*(group.admission.index for group in self.groups.values()), *self._cursor.waiting()]
        counts = self.ledger.counts(open_indices)
        return run_progress(self, admitted=self._cursor.next_index, staleness=self.staleness, ledger=counts)

    def snapshot(self) -> bytes:
        """Returns the bus's state for a checkpoint, as msgpack without payloads."""
        return msgspec.msgpack.encode(self._cursor.state(self))

    def restore(self, snapshot: bytes) -> None:
        """Restores a snapshot. The snapshot's open groups will be admitted again before new groups."""
        self._require_open()
        state = msgspec.msgpack.decode(snapshot, type=Snapshot)
        self.ledger.restore(state.ledger)
        self.version = state.version
        self.groups.clear()
        self.leases.clear()
        self.media.end_groups_and_leases()
        self._retired.clear()
        self._cursor.restore(state)
        self.staleness = Counter(state.staleness_histogram)

    def close(self, *, reason: str) -> None:
        """Closes the bus: later calls raise `BusClosed` with the first ``reason``."""
        if self.close_reason is None:
            self.close_reason = reason

    # -- ends of groups and leases ------------------------------------------------------------------------------
    def _end_as_trained(self, group: OpenGroup, *, step: int, masked: Mapping[str, str]) -> None:
        complete = group.complete
        assert complete is not None
        trained = [
            (uid, version) for uid, version in zip(complete.uids, complete.versions, strict=True) if uid not in masked
        ]
        self.staleness.update(step - version for _, version in trained)
        self.ledger.train(
            complete.index, complete.group_uid, [uid for uid, _ in trained], [v for _, v in trained], step=step
        )
        drops = {uid: masked[uid] for uid in complete.uids if uid in masked} | complete.dropped
        self.ledger.drop(complete.index, complete.group_uid, drops, step=step)
        self._forget(group.admission.group_uid)

    def _end_as_dropped(self, group: OpenGroup, reasons: Mapping[str, str]) -> None:
        admission = group.admission
        self.ledger.drop(admission.index, admission.group_uid, reasons, step=self.version)
        self._forget(group.admission.group_uid)

    def _drop_if_surplus(self, group: OpenGroup) -> bool:
        """Ends the group if no train step needs it; returns whether the group was ended."""
        if group.actor_step is not None or not is_surplus(group, self.settings, version=self.version):
            return False
        if group.complete is None:
            self._retired.add(self.version, group)
            self._end_as_dropped(group, dict.fromkeys(group.uids, OVER_SAMPLED))
        else:
            self._end_as_dropped(group, dict.fromkeys(group.complete.uids, OVER_SAMPLED) | group.complete.dropped)
        return True

    def _drop_if_stale(self, group: OpenGroup) -> None:
        """Ends the group if it has left the window: it can no longer be trained, and its slot becomes free."""
        if is_stale(group, self.settings, version=self.version):
            assert group.complete is not None
            self._end_as_dropped(group, dict.fromkeys(group.complete.uids, STALE) | group.complete.dropped)

    def _end_lease(self, lease: HeldLease, *, reason: str) -> None:
        self._remove_lease(lease.lease_id)
        for uid in lease.group_uids:
            group = self.groups.get(uid)
            if group is None:
                continue
            del group.leases[lease.task]
            if lease.step is not None:
                assert group.complete is not None
                group.actor_step = None
                self.ledger.give_back(uid, group.complete.uids, step=lease.step, reason=reason)
                self._drop_if_stale(group)

    def _remove_lease(self, lease_id: int) -> None:
        self.leases.remove(lease_id)
        self.media.end_lease(lease_id)

    def _forget(self, uid: str) -> None:
        del self.groups[uid]
        self.media.end_group(uid)

    # -- checks of calls ----------------------------------------------------------------------------------------
    def _require_open(self) -> None:
        if self.close_reason is not None:
            raise BusClosed(f"the bus is closed: {self.close_reason}")

    def _require_running(self) -> None:
        self._require_open()
        if self.finished():
            raise BusClosed(f"all {self.settings.total_steps} train steps are done")


def run_progress(
    core: ReplayBuffer, *, admitted: int, staleness: Mapping[int, int], ledger: LedgerCounts
) -> BusProgress:
    """Returns the progress of the run. ``staleness`` counts the trained samples by staleness."""
    in_flight = sum(group.in_flight for group in core.groups.values())
    leased = sum(group.actor_step is not None for group in core.groups.values())
    return BusProgress(
        version=core.version,
        admitted=admitted,
        in_flight=in_flight,
        waiting=len(core.groups) - in_flight - leased,
        leased=leased,
        credits=core.credits(),
        staleness_histogram=dict(sorted(staleness.items())),
        ledger=ledger,
        media_items=len(core.media),
        media_bytes=core.media.nbytes,
    )


@dataclass(slots=True, kw_only=True)
class OpenGroup:
    """Holds the state of an admitted group that has not ended.

    ``complete`` is None until the rollout puts the complete group. ``worker`` is the rollout worker with the admission.
    ``done`` contains the tasks that have written their columns. ``leases`` maps a task to the id of its lease of the
    group. ``actor_step`` is the train step that has leased the group, if any. ``deliveries`` counts the actor's leases
    of the group. ``newest_version`` is the weight version of the newest token, if the columns contain the episodes.
    ``modality`` is the prompt's modality. It is empty in a text run and before the prompt's data row is read.
    """

    admission: Admission
    uids: tuple[str, ...]
    admitted_at: float
    worker: int
    complete: Group | None = None
    done: set[str] = field(default_factory=set)
    leases: dict[str, int] = field(default_factory=dict)
    actor_step: int | None = None
    deliveries: int = 0
    newest_version: int | None = None
    modality: str = ""

    @property
    def in_flight(self) -> bool:
        """Returns whether the rollout has not put the complete group yet."""
        return self.complete is None

    def ready_from(self, version: int) -> int:
        """Returns the first weight version at which the group can be trained. ``version`` is the current version."""
        return self.admission.min_version if self.in_flight else version

    @property
    def oldest_version(self) -> int:
        """Returns the weight version of the oldest trained token; for a group in flight, the oldest allowed version."""
        return self.admission.min_version if self.complete is None else min(self.complete.versions)

    def has_columns(self, columns: Iterable[str]) -> bool:
        """Returns whether the group is complete and has all ``columns``."""
        return self.complete is not None and all(column in self.complete.columns for column in columns)

    def leased_group(self, columns: Iterable[str]) -> Group:
        """Returns the group with ``columns`` for a lease. Raises ValueError for a missing column."""
        group = self.complete
        assert group is not None, "only complete groups are leased"
        try:
            asked = {column: group.columns[column] for column in columns}
        except KeyError as lacking:
            there = ", ".join(group.columns)
            raise ValueError(
                f"bus: group {group.group_uid} has no column {lacking}: ask for one of {there}"
            ) from lacking
        return msgspec.structs.replace(group, columns=asked, dropped={}, media={}, modality=self.modality)


class RetiredGroups:
    """Stores groups that ended in flight because no step needs them, until their rollout worker has read the list."""

    def __init__(self) -> None:
        self._retired: list[tuple[int, OpenGroup]] = []  # (version at the group's end, group)

    def add(self, version: int, group: OpenGroup) -> None:
        """Adds a group that ended when ``version`` came into force."""
        self._retired.append((version, group))

    def since(self, version: int, *, worker: int) -> list[str]:
        """Returns the uids of the worker's groups that ended after ``version``; removes the worker's older groups.

        Groups of workers that have exited stay stored. They are few, because such workers get no new groups.
        """
        self._retired = [entry for entry in self._retired if entry[0] > version or entry[1].worker != worker]
        return [group.admission.group_uid for _, group in self._retired if group.worker == worker]

    def clear(self) -> None:
        """Forgets all groups."""
        self._retired.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLease:
    """Holds an active lease. ``step`` is set only for the task "actor". Times are in seconds of the buffer's clock."""

    lease_id: int
    task: str
    step: int | None
    group_uids: list[str]
    leased_at: float
    expires_at: float


class LeaseTable:
    """Stores all active leases in order of issue. A lease id is never used twice.

    The caller must update the leased groups.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[int, HeldLease] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._held

    def open(self, request: LeaseRequest, group_uids: Sequence[str]) -> HeldLease:
        """Adds and returns a new lease of ``group_uids``."""
        now = self._clock()
        lease = HeldLease(
            lease_id=self._next_id,
            task=request.task,
            step=request.step if request.task == ACTOR else None,
            group_uids=list(group_uids),
            leased_at=now,
            expires_at=now + request.lease_s,
        )
        self._next_id += 1
        self._held[lease.lease_id] = lease
        return lease

    def held(self, lease_id: int) -> HeldLease:
        """Returns an active lease. Raises `LeaseLost` if the lease has ended."""
        lease = self._held.get(lease_id)
        if lease is None:
            raise LeaseLost(
                f"lease {lease_id} is not held: it expired, was released or revoked, or the bus was restored; "
                "its groups returned to the bus and another worker may have leased them"
            )
        return lease

    def of_step(self, lease_ids: Iterable[int], step: int) -> list[HeldLease]:
        """Returns the actor's leases with these ids, without duplicates. Raises ValueError for another step or task."""
        leases = [self.held(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        for lease in leases:
            if lease.step != step:
                what = f"was given for step {lease.step}" if lease.task == ACTOR else f"belongs to task {lease.task}"
                raise ValueError(f"bus: ack of step {step} names lease {lease.lease_id}, which {what}")
        return leases

    def of_task(self, task: str) -> list[HeldLease]:
        """Returns the leases of a task."""
        return [lease for lease in self._held.values() if lease.task == task]

    def overdue(self) -> list[HeldLease]:
        """Returns the expired leases."""
        now = self._clock()
        return [lease for lease in self._held.values() if lease.expires_at <= now]

    def next_expiry(self) -> float | None:
        """Returns when the next lease expires, in seconds of the buffer's clock; None without an active lease."""
        return min((lease.expires_at for lease in self._held.values()), default=None)

    def remove(self, lease_id: int) -> HeldLease:
        """Removes a lease and returns it."""
        return self._held.pop(lease_id)

    def clear(self) -> None:
        """Removes all leases."""
        self._held.clear()


def check_admit(max_groups: int) -> None:
    """Refuses a call for fewer than one group."""
    if max_groups < 1:
        raise ValueError(f"bus: admit got max_groups={max_groups}: request 1 or more")


def check_lease_request(request: LeaseRequest, *, version: int, groups_per_step: int) -> None:
    """Refuses requests with impossible counts, and requests of the actor for a finished step."""
    if not 1 <= request.min_groups <= request.max_groups or request.lease_s <= 0:
        raise ValueError(
            f"bus: a lease needs 1 <= min_groups <= max_groups and lease_s > 0, not min_groups={request.min_groups}, "
            f"max_groups={request.max_groups}, lease_s={request.lease_s}"
        )
    if request.task != ACTOR:
        return
    if request.step is None or request.step < version:
        raise ValueError(
            f"bus: the actor requested groups of step {request.step}, version {version} is in force: "
            f"give step={version} or later"
        )
    if request.min_groups > groups_per_step:
        raise ValueError(
            f"bus: the actor requested min_groups={request.min_groups}, a step has groups_per_step={groups_per_step}: "
            "request at most that many"
        )


def check_read(lease_id: int, group_uids: Sequence[str], *, held: Sequence[str]) -> None:
    """Refuses groups outside ``held``, the groups of the lease."""
    unknown = sorted(set(group_uids).difference(held))
    if unknown:
        raise ValueError(
            f"bus: lease {lease_id} does not hold {', '.join(unknown[:4])}: read only the groups of this lease"
        )


def check_write(lease_id: int, group_uids: Iterable[str], *, task: str, held: Sequence[str]) -> None:
    """Refuses writes to the actor's lease, and writes that do not cover exactly ``held``, the groups of the lease."""
    if task == ACTOR:
        raise ValueError(f"bus: lease {lease_id} is the actor's: end it with ack or release, not write")
    if wrong := sorted(set(group_uids) ^ set(held)):
        raise ValueError(
            f"bus: a write must give columns for each group of lease {lease_id}; wrong: {', '.join(wrong[:4])}"
        )


def check_ack_step(step: int, *, version: int) -> None:
    """Refuses the ack of a step that is not the current step."""
    if step != version:
        raise ValueError(f"bus: ack of step {step}, but version {version} is in force: ack step {version}")


def check_dropped(dropped: Iterable[str], leased: Iterable[Sequence[str]]) -> None:
    """Refuses dropped samples outside ``leased``, the sample uids of each leased group."""
    if unknown := sorted(set(dropped).difference(*leased)):
        raise ValueError(f"bus: ack drops samples that are not in its leases: {', '.join(unknown[:4])}")


def check_issued(uid: str, index: int | None, *, issued: int) -> None:
    """Refuses a group with an index of ``issued`` or more. If ``index`` is None, it is read from the uid."""
    if index is None:
        index = int(uid[1:]) if uid[1:].isdecimal() else -1
    if not (0 <= index < issued and uid == group_uid(index)):
        raise ValueError(f"bus: group {uid!r} (index {index}) was never admitted: use the admission's uid and index")


def check_samples(group: Group, issued: Sequence[str], *, version: int) -> None:
    """Refuses a group with samples or versions that contradict its admission.

    ``issued`` lists the sample uids of the admission. ``version`` is the current version. ``version + 1`` is allowed,
    too, because an engine may get the next version before the trainer's ack of the step.
    """
    named = [*group.uids, *group.dropped]
    if len(named) != len(issued) or set(named) != set(issued):
        wrong = sorted(set(named) ^ set(issued)) or sorted({uid for uid in named if named.count(uid) > 1})
        raise ValueError(
            f"bus: group {group.group_uid} must name each of its {len(issued)} samples once, as kept or as dropped; "
            f"wrong: {', '.join(wrong[:4])}"
        )
    if len(group.versions) != len(group.uids):
        raise ValueError(
            f"bus: group {group.group_uid} has {len(group.uids)} samples and {len(group.versions)} versions: give one "
            "version for each sample"
        )
    if max(group.versions, default=0) > version + 1:
        raise ValueError(
            f"bus: group {group.group_uid} names weights {max(group.versions)}, but version {version} is in force: no "
            "engine can have them. Does an engine serve another run's weights?"
        )


def check_size(group_uid: str, columns: Mapping[str, bytes], media: Mapping[str, int], *, max_row_bytes: int) -> None:
    """Refuses a group if payloads and media items (digest → bytes) take more than ``max_row_bytes`` together."""
    media_bytes = sum(media.values())
    nbytes = payload_bytes(columns) + media_bytes
    if nbytes > max_row_bytes:
        of_media = f", {media_bytes} of them in media items" if media else ""
        raise ValueError(
            f"bus: group {group_uid} has {nbytes} bytes{of_media}, the largest group has {max_row_bytes}: "
            "raise it or make the group smaller"
        )


def check_media(group: Group, named: Container[str]) -> None:
    """Refuses a group with a media item without references; ``named`` contains the items with references."""
    if lost := [digest for digest in group.media if digest not in named]:
        raise ValueError(
            f"bus: group {group.group_uid} uses media item {lost[0]}, which has no holder, so its tensors may be "
            "deleted: hold an item until all groups with the item are put"
        )


def check_digests(digests: Iterable[str]) -> None:
    """Refuses invalid digests, because digests become file names."""
    if wrong := [digest for digest in digests if not is_digest(digest)]:
        raise ValueError(f"bus: {wrong[0]!r} is not a digest of a media item: give 32 hexadecimal digits")
