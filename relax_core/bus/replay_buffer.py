"""The bus as a synchronous state machine without Ray, asyncio and waiting; a backend adds transport and waits.

A method that cannot proceed yet returns an empty list or None. The backend calls it again after the next change.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from relax_core.bus import call_checks as checks
from relax_core.bus.data_cursor import DataCursor, Draw, MixedCursor, Snapshot
from relax_core.bus.ledger import Ledger
from relax_core.bus.named_media import NamedMedia
from relax_core.bus.open_groups import HeldLease, LeaseTable, OpenGroup, RetiredGroups
from relax_core.bus.settings import BusSettings
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
from relax_core.contracts.columns import persisted_payloads
from relax_core.contracts.tree import group_uid, sample_uid


class BusCore:
    """Holds all state of a bus.

    ``clock`` returns seconds and never goes back. A payload may be any object that has a length in bytes.
    """

    def __init__(self, settings: BusSettings, *, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.ledger = ledger
        self.clock = clock
        self.version = 0
        # The groups are in order of issue, because each new group has a higher index than all before it.
        self.groups: dict[str, OpenGroup] = {}
        self.leases = LeaseTable(clock)
        self.media = NamedMedia()
        self.closed_because: str | None = None
        self._mixed = MixedCursor(settings) if settings.mix else None
        self._cursor = self._mixed or DataCursor()
        self.staleness: Counter[int] = Counter()
        self._retired = RetiredGroups()

    # -- calls of the rollout --------------------------------------------------------------------------------------
    def admit(self, max_groups: int, *, worker: int = 0) -> list[Admission]:
        """Admits up to ``max_groups`` groups of a rollout worker; the list of admissions may be empty.

        The staleness window limits the groups, and each of several workers has a limit of its own.
        """
        self._require_running()
        checks.check_admit(max_groups)
        draws = self._cursor.admit(self, min(max_groups, self.room_of(worker)))
        return [self._issue(draw, worker) for draw in draws]

    def _issue(self, draw: Draw, worker: int) -> Admission:
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
        """Says which modality the prompts of these groups have, by index; a group keeps its first name."""
        for index, modality in modalities.items():
            checks.check_issued(group_uid(index), index, issued=self._cursor.next_index)
            self.ledger.name_modality(index, modality)
            if (group := self.groups.get(group_uid(index))) is not None:
                group.modality = group.modality or modality

    def reclaim(self, *, worker: int = 0) -> list[Admission]:
        """Returns the worker's admissions whose groups are not complete, in order of issue.

        Each has one attempt more.
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
        """Returns whether `put` would enter this group: it was admitted, is not complete and has not ended."""
        group = self.groups.get(uid)
        return group is not None and group.in_flight

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Raises ValueError for the first group that contradicts its admission or is too large."""
        for given in groups:
            checks.check_issued(given.group_uid, given.index, issued=self._cursor.next_index)
            checks.check_size(given.group_uid, given.columns, given.media, max_row_bytes=self.settings.max_row_bytes)
            group = self.groups.get(given.group_uid)
            if group is not None:
                checks.check_samples(given, group.uids, version=self.version)
                if group.in_flight:
                    checks.check_media(given, self.media)

    def put(self, groups: Sequence[Group]) -> None:
        """Enters complete groups: all of them, or none if one is refused. A group without kept samples ends at once."""
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
        """Ends a group that is in flight. Does nothing if the group is complete or has ended."""
        self._require_open()
        group = self.groups.get(uid)
        if group is None:
            checks.check_issued(uid, None, issued=self._cursor.next_index)
        elif group.in_flight:
            self._end_as_dropped(group, dict.fromkeys(group.uids, reason))

    def version_change(self, since_version: int, *, worker: int = 0) -> VersionChange | None:
        """Returns the new version and the worker's groups that ended with it; None before the version changes."""
        self._require_running()
        if self.version == since_version:
            return None
        return VersionChange(version=self.version, retired=self._retired.since(since_version, worker=worker))

    def hold(self, items: Mapping[str, int], *, worker: int = 0) -> None:
        """Names media items (digest → bytes) for a rollout worker."""
        self._require_open()
        checks.check_digests(items)
        self.media.hold(worker, items)

    def let_go(self, digests: Sequence[str], *, worker: int = 0) -> None:
        """Ends the hold of a rollout worker on media items."""
        self._require_open()
        self.media.let_go(worker, digests)

    # -- calls of workers that lease --------------------------------------------------------------------------------
    def lease(self, request: LeaseRequest) -> Lease | None:
        """Leases groups, or returns None while fewer than ``min_groups`` are ready."""
        self._require_running()
        checks.check_lease_request(request, version=self.version, groups_per_step=self.settings.groups_per_step)
        self.expire()
        if request.task == checks.ACTOR and request.step != self.version:
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
            if request.task == checks.ACTOR:
                group.actor_step = self.version
                group.deliveries += 1
                self.ledger.lease(complete.group_uid, complete.uids, step=self.version, delivery=group.deliveries)
            leased.append(group.leased_group(payloads))
        self.media.lease(lease.lease_id, lease.group_uids)
        return Lease(lease_id=lease.lease_id, task=lease.task, rows=leased)

    def read(self, lease_id: int, group_uids: Sequence[str], columns: Sequence[str]) -> Lease:
        """Returns these groups of a lease with these columns. The lease stays as it is."""
        self._require_running()
        self.expire()
        lease = self.leases.held(lease_id)
        checks.check_read(lease.lease_id, group_uids, held=lease.group_uids)
        if ended := [uid for uid in group_uids if uid not in self.groups]:
            raise LeaseLost(f"group {ended[0]} of lease {lease_id} has ended: it was trained or dropped")
        leased = [self.groups[uid].leased_group(columns) for uid in group_uids]
        return Lease(lease_id=lease_id, task=lease.task, rows=leased)

    def write(self, lease_id: int, columns: Mapping[str, Mapping[str, bytes]]) -> None:
        """Adds columns to every group of a worker's lease and ends the lease. Skips groups that have ended."""
        self._require_open()
        self.expire()
        lease = self.leases.held(lease_id)
        checks.check_write(lease_id, columns, task=lease.task, held=lease.group_uids)
        written = [(group, columns[uid]) for uid in lease.group_uids if (group := self.groups.get(uid)) is not None]
        for group, payloads in written:
            complete = group.complete
            assert complete is not None
            together = {**complete.columns, **payloads}
            checks.check_size(complete.group_uid, together, complete.media, max_row_bytes=self.settings.max_row_bytes)
        for group, payloads in written:
            assert group.complete is not None
            group.complete.columns.update(payloads)
            group.done.add(lease.task)
            del group.leases[lease.task]
        self._remove_lease(lease_id)

    def ack(self, lease_ids: Sequence[int], *, step: int, dropped: Mapping[str, str]) -> None:
        """Records the leases' samples as trained at ``step`` or as ``dropped``. The version becomes ``step + 1``."""
        self._require_open()
        checks.check_ack_step(step, version=self.version)
        self.expire()
        leases = self.leases.of_step(lease_ids, step)
        groups = [self.groups[uid] for lease in leases for uid in lease.group_uids]
        checks.check_dropped(dropped, [group.complete.uids for group in groups if group.complete is not None])
        for group in groups:
            self._end_as_trained(group, step=step, masked=dropped)
        for lease in leases:
            self._remove_lease(lease.lease_id)
        self.version = step + 1
        for group in list(self.groups.values()):
            if not self._drop_if_surplus(group):
                self._drop_if_stale(group)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Gives groups back unused. Skips leases that have ended already."""
        self._require_open()
        for lease_id in lease_ids:
            if lease_id in self.leases:
                self._end_lease(self.leases.held(lease_id), reason="released")

    def revoke(self, task: str) -> None:
        """Ends all leases of a task whose worker was lost."""
        self._require_open()
        for lease in self.leases.of_task(task):
            self._end_lease(lease, reason="revoked")

    def expire(self) -> None:
        """Takes back the groups of every lease whose time is over. Does nothing on a closed bus."""
        if self.closed_because is not None:
            return
        for lease in self.leases.overdue():
            self._end_lease(lease, reason="expired")

    # -- calls of the controller -----------------------------------------------------------------------------------
    def slots_left(self) -> int:
        """Returns how many more groups the current train step may still get."""
        leased = sum(group.actor_step == self.version for group in self.groups.values())
        return self.settings.groups_per_step - leased

    def credits(self) -> int:
        """Returns how many more groups may start with the weights in force (docs/design.md)."""
        outstanding = sum(group.admission.min_version <= self.version for group in self.groups.values())
        return max(0, self.settings.window_groups - outstanding)

    def room_of(self, worker: int) -> int:
        """Returns how many more groups a rollout worker may have in flight, regardless of the staleness window."""
        most = self.settings.most_in_flight
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
        """Returns the state that a checkpoint stores, as msgpack. It contains no payloads."""
        return msgspec.msgpack.encode(self._cursor.state(self))

    def restore(self, snapshot: bytes) -> None:
        """Goes back to a snapshot. The snapshot's open groups are admitted again, before any new group."""
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
        if self.closed_because is None:
            self.closed_because = reason

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
        """Ends a group that no train step needs any more, and returns whether it did."""
        if group.actor_step is not None or not is_surplus(group, self.settings, version=self.version):
            return False
        if group.complete is None:
            self._retired.add(self.version, group)
            self._end_as_dropped(group, dict.fromkeys(group.uids, OVER_SAMPLED))
        else:
            self._end_as_dropped(group, dict.fromkeys(group.complete.uids, OVER_SAMPLED) | group.complete.dropped)
        return True

    def _drop_if_stale(self, group: OpenGroup) -> None:
        """Ends a waiting group that left the window: it can never be trained, and its slot is free at once."""
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
        if self.closed_because is not None:
            raise BusClosed(f"the bus is closed: {self.closed_because}")

    def _require_running(self) -> None:
        self._require_open()
        if self.finished():
            raise BusClosed(f"all {self.settings.total_steps} train steps are done")


def run_progress(core: BusCore, *, admitted: int, staleness: Mapping[int, int], ledger: LedgerCounts) -> BusProgress:
    """Returns the state of the run; ``staleness`` counts the trained samples by staleness."""
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
