"""A model of a run that executes random actions and checks every result of the bus core."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from hypothesis import strategies as st

from relax_core.contracts.bus import Admission, BusClosed, Group, Lease, LeaseLost, LeaseRequest
from tests.bus.ledger_model import FLUSH_S, LedgerModel, Saved
from tests.bus.make_rows import uids_of
from tests.bus.media_model import DIGESTS, NBYTES, MediaModel

LEASE_S = 10.0
MAX_WORKERS = 3  # maximum number of rollout workers
WORKERS = st.integers(0, MAX_WORKERS - 1)
ITEMS = st.sets(st.sampled_from(DIGESTS), max_size=4)
COLUMNS = st.sampled_from([("a",), ("a", "b")])

PromptDraw = Callable[[st.SearchStrategy[Any]], Any]


class BusModel(LedgerModel):
    """Runs the actions of clients, and their faults. Actions take Hypothesis's ``draw``."""

    # -- actions of clients -------------------------------------------------------------------------------------
    def admit(self, draw: PromptDraw) -> None:
        self.admit_groups(draw(st.integers(1, 12)), worker=draw(WORKERS))

    def admit_groups(self, max_groups: int, *, worker: int = 0) -> None:
        steps = self.max_staleness + 1
        spares = self.spare_groups * (1 if self.surplus == "keep" else steps)
        version, window = self.core.version, steps * self.gps + spares
        for admission in self.core.admit(max_groups, worker=worker):
            self.owners[admission.group_uid] = worker
            assert admission.group_uid not in self.in_flight
            assert admission.min_version <= version + 1, "at most one step early"
            self.in_flight[admission.group_uid] = admission
            self.issued.update(uids_of(admission, self.group_size))
            if admission.min_version <= version:
                outstanding = [g for g in self.core.groups.values() if g.admission.min_version <= version]
                assert len(outstanding) <= window, "more groups than credits"
        if self.rollout_workers > 1:
            own = sum(self.owners[uid] == worker for uid in self.in_flight)
            let_in = (self.max_staleness + 2) * (self.gps + self.spare_groups)
            assert own <= -(-let_in // self.rollout_workers), "a worker exceeds its share"

    def roll_out(self, draw: PromptDraw) -> None:
        """Puts some of the groups that may start generation, in any order."""
        self.admit(draw)
        ready = draw(st.permutations(self.startable()))
        for admission in ready[: draw(st.integers(0, len(ready)))]:
            self.put_row(admission, draw)

    def startable(self) -> list[Admission]:
        return [a for a in self.in_flight.values() if a.min_version <= self.core.version]

    def put_row(self, admission: Admission, draw: PromptDraw | None) -> None:
        uids = uids_of(admission, self.group_size)
        dropped: set[str] = set()
        versions = [self.core.version] * len(uids)
        if draw is not None:
            dropped = draw(st.sets(st.sampled_from(uids), max_size=draw(st.sampled_from([0, 0, self.group_size]))))
            span = st.integers(admission.min_version, self.core.version)
            versions = draw(st.lists(span, min_size=len(uids), max_size=len(uids)))
        kept = [(uid, version) for uid, version in zip(uids, versions, strict=True) if uid not in dropped]
        row = Group(
            group_uid=admission.group_uid,
            index=admission.index,
            uids=[uid for uid, _ in kept],
            versions=[version for _, version in kept],
            columns={"a": admission.group_uid.encode()},
            dropped=dict.fromkeys(dropped, "reward failed"),
            media={} if draw is None else self.draw_media(draw),
        )
        self.core.put([row])
        self.rows[row.group_uid] = row
        self.in_flight.pop(row.group_uid)

    def draw_media(self, draw: PromptDraw) -> dict[str, int]:
        """Returns some of the items that are in use."""
        self.media.check(self.core, self.rows, self.in_flight)
        if not self.media.stored:
            return {}
        digests = draw(st.sets(st.sampled_from(sorted(self.media.stored)), max_size=3))
        return {digest: NBYTES[digest] for digest in digests}

    def hold(self, draw: PromptDraw) -> None:
        self.media.hold(self.core, draw(WORKERS), draw(ITEMS))

    def release_items(self, draw: PromptDraw) -> None:
        self.media.release_items(self.core, draw(WORKERS), draw(ITEMS))

    def put_again(self, draw: PromptDraw) -> None:
        before = self.core.progress()
        for row in self.rows.values():
            self.core.put([row])
            self.core.drop(row.group_uid, reason="late")
        assert self.core.progress() == before

    def drop(self, draw: PromptDraw) -> None:
        if not self.in_flight:
            return
        uid = draw(st.sampled_from(list(self.in_flight)))
        self.core.drop(uid, reason="engine failed")
        self.core.drop(uid, reason="engine failed")
        self.in_flight.pop(uid)

    def work(self, draw: PromptDraw) -> None:
        self.work_on(draw(st.integers(1, 4)))
        if draw(st.booleans()):
            self.write(draw)

    def work_on(self, max_groups: int) -> None:
        request = LeaseRequest(task="advantages", columns=("a",), max_groups=max_groups, lease_s=LEASE_S)
        lease = self.core.lease(request)
        if lease is not None:
            for leased in lease.rows:
                row = self.core.groups[leased.group_uid].complete
                assert row is not None and "b" not in row.columns, "leased again after its column was written"
            self.worker_leases.append(lease)
            self.media.lease(lease, self.rows)

    def write(self, draw: PromptDraw | None) -> None:
        if not self.worker_leases:
            return
        lease = self.worker_leases.pop(0)
        try:
            self.core.write(lease.lease_id, {row.group_uid: {"b": b"x"} for row in lease.rows})
        except LeaseLost:
            assert lease.lease_id not in self.core.leases

    def lease(self, draw: PromptDraw) -> None:
        min_groups = draw(st.integers(1, self.gps))
        lease = self.lease_rows(min_groups, draw(st.integers(min_groups, 4)), draw(COLUMNS))
        if lease is not None:
            self.actor_leases.append(lease)

    def lease_rows(self, min_groups: int, max_groups: int, columns: tuple[str, ...]) -> Lease | None:
        step = self.core.version
        slots = self.core.slots_left()
        lease = self.core.lease(
            LeaseRequest(
                task="actor",
                columns=columns,
                max_groups=max_groups,
                min_groups=min_groups,
                step=step,
                lease_s=LEASE_S,
            )
        )
        if lease is None:
            return None
        self.media.lease(lease, self.rows)
        assert min_groups <= len(lease.rows) <= min(max_groups, slots)
        for row in lease.rows:
            assert set(row.uids) == set(self.rows[row.group_uid].uids), "a group is incomplete or mixed"
            assert row.columns == {c: b"x" if c == "b" else row.group_uid.encode() for c in columns}
            if self.on_stale == "drop":
                assert min(row.versions) >= step - self.max_staleness
        if self.max_staleness == 0 and not self.spare_groups:
            last = max(row.index for row in lease.rows)
            left = [
                g.admission.index
                for g in self.core.groups.values()
                if g.actor_step is None and g.admission.min_version <= step
            ]
            assert all(index > last for index in left), "out of order at staleness 0"
        return lease

    def ack(self, draw: PromptDraw) -> None:
        self.end_step(mask=draw(st.booleans()))

    def end_step(self, *, mask: bool) -> None:
        """Ends the step with all leases of the trainer."""
        step = self.core.version
        self.core.expire()
        held = [lease for lease in self.actor_leases if lease.lease_id in self.core.leases]
        lost = [lease for lease in self.actor_leases if lease.lease_id not in self.core.leases]
        self.actor_leases = []
        if lost:
            with pytest.raises(LeaseLost):
                self.core.ack([lease.lease_id for lease in [*held, lost[0]]], step=step, dropped={})
        if held:
            rows = [row for lease in held for row in lease.rows]
            masked = {rows[0].uids[0]: "masked"} if mask else {}
            self.core.ack([lease.lease_id for lease in held], step=step, dropped=masked)
            self.unfilled += self.gps - len(rows)
            for row in rows:
                for uid, version in zip(row.uids, row.versions, strict=True):
                    if uid not in masked:
                        assert uid not in self.trained, "trained twice"
                        self.trained[uid] = step - version
            self.check_surplus(step)

    def check_surplus(self, step: int) -> None:
        """Checks that groups in flight ended after ``step`` only if the steps have enough other groups."""
        gone = [uid for uid in self.in_flight if uid not in self.core.groups]
        for uid in gone:
            over = self.in_flight.pop(uid).min_version < step + 1 - self.max_staleness
            assert self.core.finished() or (over and self.surplus == "drop"), "it could still be trained"
        assert not gone or self.spare_groups
        if self.core.finished():
            may_be_left = 0 if self.spare_groups else self.unfilled
            assert len(self.core.groups) <= may_be_left, "groups remain that no step will train"
            return
        for worker in range(MAX_WORKERS):  # each worker gets its own groups, in any order of calls
            change = self.core.version_change(step, worker=worker)
            own = sorted(uid for uid in gone if self.owners[uid] == worker)
            assert change is not None and (change.version, sorted(change.retired)) == (step + 1, own)
            assert self.core.version_change(step + 1, worker=worker) is None

    def train(self, draw: PromptDraw) -> None:
        """Trains a step with the groups that are ready."""
        if self.core.slots_left():
            lease = self.lease_rows(1, self.gps, draw(COLUMNS))
            self.actor_leases += [lease] if lease else []
        self.ack(draw)

    def train_fully(self) -> None:
        """Trains a step without faults. The step must get all of its groups."""
        for worker in range(MAX_WORKERS):
            self.admit_groups(100, worker=worker)
        for admission in self.startable():
            self.put_row(admission, None)
        self.work_on(100)
        self.write(None)
        lease = self.lease_rows(self.gps, self.gps, ("a", "b"))
        assert lease is not None, "the run cannot go on"
        self.actor_leases = [lease]
        self.end_step(mask=False)

    # -- faults -------------------------------------------------------------------------------------------------
    def release(self, draw: PromptDraw) -> None:
        if self.actor_leases:
            self.core.release([self.actor_leases.pop().lease_id])

    def revoke(self, draw: PromptDraw) -> None:
        self.core.revoke(draw(st.sampled_from(["actor", "advantages"])))

    def wait(self, draw: PromptDraw) -> None:
        self.clock.now += draw(st.sampled_from([1.0, 6.0, LEASE_S]))
        self.core.expire()

    def reclaim(self, draw: PromptDraw) -> None:
        worker = draw(WORKERS)
        reclaimed = self.core.reclaim(worker=worker)
        own = [a.index for a in self.in_flight.values() if self.owners[a.group_uid] == worker]
        assert [a.index for a in reclaimed] == sorted(own)
        for admission in reclaimed:
            assert admission.attempt == self.in_flight[admission.group_uid].attempt + 1
            self.in_flight[admission.group_uid] = admission
        self.media.lose_worker(worker, [admission.group_uid for admission in reclaimed])

    def save(self, draw: PromptDraw) -> None:
        snapshot = self.core.snapshot()
        self.journal.flush(timeout_s=FLUSH_S)
        file = self.new_file()
        with closing(sqlite3.connect(self.file)) as source, closing(sqlite3.connect(file)) as target:
            source.backup(target)
        ended = {uid: row for uid, row in self.rows.items() if self.has_ended(uid)}
        self.saved.append(
            Saved(
                snapshot=snapshot,
                issued=set(self.issued),
                trained=dict(self.trained),
                unfilled=self.unfilled,
                ended_rows=copy.deepcopy(ended),
                file=file,
            )
        )

    def has_ended(self, group_uid: str) -> bool:
        return group_uid not in self.core.groups and group_uid not in self.in_flight

    def crash_and_resume(self, draw: PromptDraw) -> None:
        """Kills the process and resumes. Either all events after the checkpoint are on disk, or no event."""
        if not self.saved:
            return
        saved = draw(st.sampled_from(self.saved))
        self.journal.close(timeout_s=FLUSH_S)
        if saved is self.saved[-1] and draw(st.booleans()):
            self.file.unlink()
            self.file = saved.file.rename(self.new_file())
            self.saved.pop()
        self.start(self.file)
        self.media = MediaModel()
        self.back_to(saved)

    def restore(self, draw: PromptDraw) -> None:
        """Goes back to a checkpoint in the same process."""
        if self.saved:
            self.back_to(draw(st.sampled_from(self.saved)))

    def start_afresh(self, draw: PromptDraw) -> None:
        """Crashes before the first checkpoint. Then no event in the file is valid any more."""
        if self.saved:
            return
        self.journal.close(timeout_s=FLUSH_S)
        self.start(self.file)
        self.issued, self.trained, self.rows, self.unfilled = set(), {}, {}, 0
        self.in_flight, self.actor_leases, self.worker_leases = {}, [], []
        self.media = MediaModel()
        self.admit_groups(1)
        self.check_file()

    def back_to(self, saved: Saved) -> None:
        held = [lease.lease_id for lease in [*self.actor_leases, *self.worker_leases]]
        self.core.restore(saved.snapshot)
        assert not self.core.leases
        for lease_id in held:
            with pytest.raises(LeaseLost):
                self.core.write(lease_id, {})
        self.issued, self.trained, self.unfilled = set(saved.issued), dict(saved.trained), saved.unfilled
        self.rows = copy.deepcopy(saved.ended_rows)
        self.in_flight, self.actor_leases, self.worker_leases = {}, [], []
        self.media.go_back()
        self.check_file()
        open_at_cut = self.core.progress().ledger.open // self.group_size
        again = self.core.admit(open_at_cut, worker=1) if open_at_cut else []
        self.owners.update({a.group_uid: 1 for a in again})
        assert [a.index for a in again] == sorted(a.index for a in again)
        assert all(a.attempt > 0 for a in again), "new groups were admitted before lost groups"
        self.in_flight = {a.group_uid: a for a in again}

    def close(self) -> None:
        """Closes the bus. Later calls must raise, and the ledger must not change."""
        before = self.core.progress()
        self.core.close(reason="the test is over")
        self.core.close(reason="again")
        for call in (
            lambda: self.core.admit(1),
            lambda: self.core.reclaim(),
            lambda: self.core.put([]),
            lambda: self.core.drop("g00000000", reason="late"),
            lambda: self.core.hold({}),
            lambda: self.core.release_items([]),
            lambda: self.core.lease(LeaseRequest(task="advantages", columns=("a",), max_groups=1)),
            lambda: self.core.write(1, {}),
            lambda: self.core.ack([], step=self.core.version, dropped={}),
            lambda: self.core.release([]),
            lambda: self.core.revoke("actor"),
            lambda: self.core.restore(b""),
        ):
            with pytest.raises(BusClosed, match="the test is over"):
                call()
        self.clock.now += 10 * LEASE_S
        self.core.expire()
        assert self.core.progress() == before
        self.check_file()
        self.journal.close(timeout_s=FLUSH_S)
