"""Tests workers that add columns: they retry after timeouts, lease complete steps, and lease again after lost leases.

The first tests use the bus core.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.bus.factory import create_bus
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements, TeacherRequirements
from relax_core.contracts.bus import BusClosed, BusProgress, BusTimeout, Group, Lease, LeaseRequest
from relax_core.contracts.columns import MEDIA
from relax_core.contracts.media import Media, MediaGone
from relax_core.contracts.media_file import FolderReader
from relax_core.roles.role_context import BUS, RunContext
from relax_core.roles.trainer import column_worker
from relax_core.roles.trainer.column_worker import (
    ColumnWorker,
    give_up_lease,
    lease_whole_step,
    without_timeout,
    write_then_lease,
)
from relax_core.roles.trainer.rank_worker import train_columns
from tests.bus.blocking import BlockingBus
from tests.bus.make_media import held, make_item, media_columns
from tests.bus.make_rows import for_actor, for_worker, make_core, make_row, make_settings
from tests.roles.run_context import context_in

OWED = "rollout has no group in flight and owes new groups"


class LateBus:
    """Runs a worker's calls on the bus core. A call that must wait calls ``meanwhile`` and times out."""

    def __init__(self, core: ReplayBuffer, meanwhile: Callable[[int], object]) -> None:
        self._core, self._meanwhile = core, meanwhile
        self.timeouts = 0

    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        lease = self._core.lease(request)
        if lease is None:
            self.timeouts += 1
            self._meanwhile(self.timeouts)
            raise BusTimeout(OWED)
        return lease

    async def write(
        self, lease_id: int, columns: Mapping[str, Mapping[str, bytes]], *, then: LeaseRequest, timeout_s: float
    ) -> Lease:
        self._core.write(lease_id, columns)
        return await self.lease(then, timeout_s=timeout_s)


def test_rows_that_come_late_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    first, second = core.admit(2)
    late = {3: first, 6: second}

    def put_late(timeouts: int) -> None:
        core.put([make_row(late[timeouts])] if timeouts in late else [])

    bus: Any = LateBus(core, put_late)
    lease = without_timeout(lambda: asyncio.run(bus.lease(for_worker(), timeout_s=1.0)))
    assert [row.group_uid for row in lease.rows] == [first.group_uid]
    columns = {first.group_uid: {"advantages": b"x"}}
    lease = write_then_lease(bus, lease.lease_id, columns, for_worker(), timeout_s=1.0)
    assert [row.group_uid for row in lease.rows] == [second.group_uid]
    assert caplog.messages == [f"waits on: {OWED}"] * 6


def test_the_end_of_the_bus_ends_the_wait() -> None:
    def closes(timeouts: int) -> None:
        if timeouts == 2:
            raise BusClosed("the run has ended")

    bus: Any = LateBus(make_core(), closes)
    with pytest.raises(BusClosed):
        without_timeout(lambda: asyncio.run(bus.lease(for_worker(), timeout_s=1.0)))
    assert bus.timeouts == 2


def test_the_trainer_leases_what_the_algorithm_needs() -> None:
    plain = {*c.ROLLOUT_COLUMNS, c.ADVANTAGES}
    teacher = TeacherRequirements(models={"default": "x"})
    top = TeacherRequirements(models={"default": "x"}, top_k=4)
    for requirements, more in (
        (Requirements(old_logprobs="rollout"), set()),
        (Requirements(old_logprobs="rollout", critic=True), {c.VALUES, c.RETURNS}),
        (Requirements(old_logprobs="actor_fwd", reference=True), {c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS}),
        (Requirements(old_logprobs="rollout", teacher=teacher), {c.TEACHER_LOGPROBS}),
        (
            Requirements(old_logprobs="rollout", teacher=top),
            {c.TEACHER_LOGPROBS, c.TEACHER_TOP_IDS, c.TEACHER_TOP_LOGPROBS},
        ),
    ):
        columns = train_columns(requirements, routing_replay=False, truncates=False)
        assert len(columns) == len(set(columns)) and set(columns) == plain | more
        columns = train_columns(requirements, routing_replay=True, truncates=True)
        assert set(columns) == plain | more | {c.ROUTED_EXPERTS, c.KEPT_TOKENS}


class ReplayBufferBus:
    """Runs the calls of the role on the bus core. A call that must wait times out at once."""

    def __init__(self, core: ReplayBuffer) -> None:
        self._core = core

    async def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        lease = self._core.lease(request)
        if lease is None:
            raise BusTimeout(f"nothing for {timeout_s} s")
        return lease

    async def release(self, lease_ids: Sequence[int], *, timeout_s: float) -> None:
        self._core.release(lease_ids)

    async def progress(self, *, timeout_s: float) -> BusProgress:
        return self._core.progress()


def whole_step(core: ReplayBuffer) -> list[str]:
    bus: Any = ReplayBufferBus(core)
    lease = lease_whole_step(bus, for_worker(groups=2), timeout_s=0.05, slice_s=0.01)
    core.write(lease.lease_id, {row.group_uid: {"advantages": b"x"} for row in lease.rows})
    return [row.group_uid for row in lease.rows]


def test_a_whole_step_is_waited_for() -> None:
    core = make_core(max_staleness=0)
    first, second = core.admit(2)
    core.put([make_row(first)])
    with pytest.raises(BusTimeout):
        whole_step(core)
    assert not core.leases  # the lease of the incomplete step was released
    core.put([make_row(second)])
    assert whole_step(core) == [first.group_uid, second.group_uid]


def test_a_lost_groups_replacement_need_not_wait_for_company() -> None:
    """A step's group is lost after it got its advantages. Only its replacement arrives before the step ends."""
    core = make_core(max_staleness=1)
    old, on_policy, *later = core.admit(4)
    core.put([make_row(old), make_row(on_policy)])
    whole_step(core)
    core.put([make_row(admission) for admission in later])
    whole_step(core)
    lease = core.lease(for_actor(0))
    assert lease is not None
    core.ack([lease.lease_id], step=0, dropped={})
    # The trainer leases one of the two groups of step 1. The other group is lost with its advantages.
    held = core.lease(for_actor(1, groups=1))
    assert held is not None
    lost = next(uid for uid, group in core.groups.items() if group.actor_step is None)
    core._end_as_dropped(core.groups[lost], dict.fromkeys(core.groups[lost].uids, "lost"))
    replacement = core.admit(1)[0]
    core.put([make_row(replacement, version=1)])
    assert whole_step(core) == [replacement.group_uid]
    rest = core.lease(for_actor(1, groups=1))
    assert rest is not None and [row.group_uid for row in rest.rows] == [replacement.group_uid]


T = 60.0
WaitUntil = Callable[..., None]
INPUTS = ("a", MEDIA)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    (tmp_path / "media").mkdir()
    context = context_in(tmp_path, "mode.max_staleness=1")
    return replace(context, namespace="test-column-worker", media_folder=tmp_path / "media")


@pytest.fixture
def bus(ray_session: str, context: RunContext) -> Iterator[BlockingBus]:
    made = create_bus(
        context.config.bus,
        make_settings(groups_per_step=1, media_folder=str(context.media_folder)),
        ledger_path=context.run_dir / "ledger.sqlite",
        name=BUS,
        namespace=context.namespace,
    )
    bus = BlockingBus(made)
    yield bus
    bus.close(reason="the test is over", timeout_s=T)
    bus.terminate()


class Annotator(ColumnWorker):
    """Maps the media items of its groups. The first lease lasts until the file of its item is removed."""

    task = "annotator"
    inputs = INPUTS
    first: Path

    def prepare(self) -> None:
        """Does nothing."""

    def columns_of(self, leased: Sequence[Group]) -> c.GroupColumns:
        """Returns column "b" of each group."""
        media = {group.group_uid: msgspec.msgpack.decode(group.columns[MEDIA], type=list[Media]) for group in leased}
        items = [medium.item for placed in media.values() for medium in placed]
        if any(item.digest == self.first.name for item in items):
            self.wait_gone()
        for item in items:
            FolderReader(self.first.parent).tensors(item)
        return {uid: {"b": b"y"} for uid in media}

    def wait_gone(self) -> None:
        """Blocks until the file of the first item is removed."""
        raise NotImplementedError


def test_a_worker_whose_lease_ran_out_leases_again_though_an_item_is_gone(
    bus: BlockingBus,
    context: RunContext,
    wait_until: WaitUntil,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert context.media_folder is not None
    (early, _), (late, _) = make_item(context.media_folder, 1), make_item(context.media_folder, 2)
    admissions = bus.admit(2, timeout_s=T)
    if len(admissions) < 2:
        admissions += bus.admit(1, timeout_s=T)
    bus.hold(held(early, late), timeout_s=T)
    bus.put([make_row(admissions[0], columns=media_columns([early]))], timeout_s=T)
    bus.release_items([early.digest], timeout_s=T)
    monkeypatch.setattr(column_worker, "LEASE_S", 1.0)
    gone, begun = context.media_folder / early.digest, threading.Event()

    class Slow(Annotator):
        first = gone

        def wait_gone(self) -> None:
            begun.set()
            wait_until(lambda: not gone.exists(), what="the removal of the item")

    with caplog.at_level(logging.WARNING):
        worker = Slow("annotator-0", context)
        wait_until(begun.is_set, what="the lease of the first group")
        trained = bus.lease(for_actor(0, groups=1), timeout_s=T)  # the actor does not wait for the column
        bus.ack([trained.lease_id], step=0, dropped={}, timeout_s=T)  # then only the lease keeps the item, for a second
        wait_until(lambda: not gone.exists(), what="the removal of the item")
        bus.put([make_row(admissions[1], columns=media_columns([late]))], timeout_s=T)
        done = LeaseRequest(task="actor", columns=("a", "b"), max_groups=1, step=1)
        lease = bus.lease(done, timeout_s=T)
    assert [row.columns["b"] for row in lease.rows] == [b"y"]
    assert worker.status().state == "running", worker.status().error
    assert "is given up, and its groups are leased again: media" in caplog.text
    bus.close(reason="the test is over", timeout_s=T)
    assert worker.join(T)


def test_an_item_that_is_gone_while_its_lease_is_held_is_an_error(bus: BlockingBus, context: RunContext) -> None:
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lease = bus.lease(for_worker(task="annotator"), timeout_s=T)
    with pytest.raises(MediaGone):
        give_up_lease(bus.bus, lease, MediaGone("media 00 is not there"), timeout_s=T)
