"""A plain model of a run, moved by random choices, that checks every answer of the bus's core against itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from relax_core.bus.core import BusCore
from relax_core.contracts.bus import Admission, GroupRow, Lease, LeaseLost, LeaseRequest
from tests.bus.make_rows import Clock, make_core, uids_of

LEASE_S = 10.0
TOTAL_STEPS = 12
COLUMNS = st.sampled_from([("a",), ("a", "b")])

Draw = Callable[[st.SearchStrategy[Any]], Any]


class BusModel:
    """What clients did, and what became of each sample. Actions take Hypothesis's ``draw``."""

    def __init__(self, *, groups_per_step: int, group_size: int, max_staleness: int, on_stale: str) -> None:
        self.gps, self.group_size = groups_per_step, group_size
        self.max_staleness, self.on_stale = max_staleness, on_stale
        self.clock = Clock()
        self.core = self.new_core()
        self.in_flight: dict[str, Admission] = {}
        self.rows: dict[str, GroupRow] = {}  # every row that was put
        self.actor_leases: list[Lease] = []
        self.worker_leases: list[Lease] = []
        self.issued: set[str] = set()
        self.trained: dict[str, int] = {}  # uid → staleness
        self.saved: tuple[bytes, Any] | None = None

    def new_core(self) -> BusCore:
        return make_core(
            clock=self.clock,
            groups_per_step=self.gps,
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            on_stale=self.on_stale,
            total_steps=TOTAL_STEPS,
        )

    # -- what clients do ----------------------------------------------------------------------------------------
    def admit(self, draw: Draw) -> None:
        self.admit_groups(draw(st.integers(1, 12)))

    def admit_groups(self, max_groups: int) -> None:
        version, window = self.core.version, (self.max_staleness + 1) * self.gps
        for admission in self.core.admit(max_groups):
            assert admission.group_uid not in self.in_flight
            assert admission.min_version <= version + 1, "at most one step early"
            self.in_flight[admission.group_uid] = admission
            self.issued.update(uids_of(admission, self.group_size))
            if admission.min_version <= version:
                outstanding = [g for g in self.core.groups.values() if g.admission.min_version <= version]
                assert len(outstanding) <= window, "more groups than credits"

    def roll_out(self, draw: Draw) -> None:
        """Some of what may be generated arrives, in any order."""
        self.admit(draw)
        ready = draw(st.permutations(self.startable()))
        for admission in ready[: draw(st.integers(0, len(ready)))]:
            self.put_row(admission, draw)

    def startable(self) -> list[Admission]:
        return [a for a in self.in_flight.values() if a.min_version <= self.core.version]

    def put_row(self, admission: Admission, draw: Draw | None) -> None:
        uids = uids_of(admission, self.group_size)
        dropped: set[str] = set()
        versions = [self.core.version] * len(uids)
        if draw is not None:
            dropped = draw(st.sets(st.sampled_from(uids), max_size=draw(st.sampled_from([0, 0, self.group_size]))))
            span = st.integers(admission.min_version, self.core.version)
            versions = draw(st.lists(span, min_size=len(uids), max_size=len(uids)))
        kept = [(uid, version) for uid, version in zip(uids, versions, strict=True) if uid not in dropped]
        row = GroupRow(
            group_uid=admission.group_uid,
            index=admission.index,
            uids=[uid for uid, _ in kept],
            versions=[version for _, version in kept],
            columns={"a": admission.group_uid.encode()},
            dropped=dict.fromkeys(dropped, "reward failed"),
        )
        self.core.put([row])
        self.rows[row.group_uid] = row
        self.in_flight.pop(row.group_uid)

    def put_again(self, draw: Draw) -> None:
        before = self.core.progress()
        for row in self.rows.values():
            self.core.put([row])
            self.core.drop(row.group_uid, reason="late")
        assert self.core.progress() == before

    def drop(self, draw: Draw) -> None:
        if not self.in_flight:
            return
        uid = draw(st.sampled_from(list(self.in_flight)))
        self.core.drop(uid, reason="engine failed")
        self.core.drop(uid, reason="engine failed")
        self.in_flight.pop(uid)

    def work(self, draw: Draw) -> None:
        self.work_on(draw(st.integers(1, 4)))
        if draw(st.booleans()):
            self.write(draw)

    def work_on(self, max_groups: int) -> None:
        request = LeaseRequest(task="advantages", columns=("a",), max_groups=max_groups, lease_s=LEASE_S)
        lease = self.core.lease(request)
        if lease is not None:
            for leased in lease.rows:
                row = self.core.groups[leased.group_uid].row
                assert row is not None and "b" not in row.columns, "worked on twice"
            self.worker_leases.append(lease)

    def write(self, draw: Draw | None) -> None:
        if not self.worker_leases:
            return
        lease = self.worker_leases.pop(0)
        try:
            self.core.write(lease.lease_id, {row.group_uid: {"b": b"x"} for row in lease.rows})
        except LeaseLost:
            assert lease.lease_id not in self.core.leases

    def lease(self, draw: Draw) -> None:
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
        assert min_groups <= len(lease.rows) <= min(max_groups, slots)
        for row in lease.rows:
            assert set(row.uids) == set(self.rows[row.group_uid].uids), "a group came in parts or mixed"
            assert row.columns == {c: b"x" if c == "b" else row.group_uid.encode() for c in columns}
            if self.on_stale == "drop":
                assert min(row.versions) >= step - self.max_staleness
        if self.max_staleness == 0:
            last = max(row.index for row in lease.rows)
            left = [
                g.admission.index
                for g in self.core.groups.values()
                if g.actor_step is None and g.admission.min_version <= step
            ]
            assert all(index > last for index in left), "out of order at staleness 0"
        return lease

    def ack(self, draw: Draw) -> None:
        self.end_step(mask=draw(st.booleans()))

    def end_step(self, *, mask: bool) -> None:
        """The step ends with all leases that are still held."""
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
            for row in rows:
                for uid, version in zip(row.uids, row.versions, strict=True):
                    if uid not in masked:
                        assert uid not in self.trained, "trained twice"
                        self.trained[uid] = step - version

    def train(self, draw: Draw) -> None:
        """A step with whatever is ready."""
        if self.core.slots_left():
            lease = self.lease_rows(1, self.gps, draw(COLUMNS))
            self.actor_leases += [lease] if lease else []
        self.ack(draw)

    def train_fully(self) -> None:
        """A step of a run in which nothing goes wrong: it must get all of its groups."""
        self.admit_groups(100)
        for admission in self.startable():
            self.put_row(admission, None)
        self.work_on(100)
        self.write(None)
        lease = self.lease_rows(self.gps, self.gps, ("a", "b"))
        assert lease is not None, "the run cannot go on"
        self.actor_leases = [lease]
        self.end_step(mask=False)

    # -- what goes wrong ----------------------------------------------------------------------------------------
    def release(self, draw: Draw) -> None:
        if self.actor_leases:
            self.core.release([self.actor_leases.pop().lease_id])

    def revoke(self, draw: Draw) -> None:
        self.core.revoke(draw(st.sampled_from(["actor", "advantages"])))

    def wait(self, draw: Draw) -> None:
        self.clock.now += draw(st.sampled_from([1.0, 6.0, LEASE_S]))
        self.core.expire()

    def reclaim(self, draw: Draw) -> None:
        reclaimed = self.core.reclaim()
        assert [a.index for a in reclaimed] == sorted(a.index for a in self.in_flight.values())
        for admission in reclaimed:
            assert admission.attempt == self.in_flight[admission.group_uid].attempt + 1
            self.in_flight[admission.group_uid] = admission

    def save(self, draw: Draw) -> None:
        model = (self.issued, self.trained, {uid: row for uid, row in self.rows.items() if self.has_ended(uid)})
        self.saved = (self.core.snapshot(), copy.deepcopy(model))

    def has_ended(self, group_uid: str) -> bool:
        return group_uid not in self.core.groups and group_uid not in self.in_flight

    def crash_and_resume(self, draw: Draw) -> None:
        if self.saved is None:
            return
        snapshot, model = self.saved
        self.core = self.new_core()
        self.core.restore(snapshot)
        self.issued, self.trained, self.rows = copy.deepcopy(model)
        self.in_flight, self.actor_leases, self.worker_leases = {}, [], []
        open_at_cut = self.core.progress().ledger.open // self.group_size
        again = self.core.admit(open_at_cut) if open_at_cut else []
        assert [a.index for a in again] == sorted(a.index for a in again)
        assert all(a.attempt > 0 for a in again), "fresh groups came before lost ones"
        self.in_flight = {a.group_uid: a for a in again}

    # -- what must always hold ----------------------------------------------------------------------------------
    def check_books(self) -> None:
        progress = self.core.progress()
        books = progress.ledger
        assert books.lost == 0
        assert books.trained_twice == 0
        assert books.issued == len(self.issued)
        assert books.trained == len(self.trained)
        assert books.issued == books.trained + sum(books.dropped.values()) + books.open
        assert sum(progress.staleness_histogram.values()) == books.trained
        assert {k: list(self.trained.values()).count(k) for k in set(self.trained.values())} == (
            progress.staleness_histogram
        )
        if self.on_stale == "drop":
            assert max(progress.staleness_histogram, default=0) <= self.max_staleness
        assert [g.admission.index for g in self.core.groups.values()] == sorted(
            g.admission.index for g in self.core.groups.values()
        )
