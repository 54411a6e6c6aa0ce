"""A worker whose lease ran out in the middle of its work leases again, also if the items of the groups are gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from relax_core.bus.factory import create_bus
from relax_core.bus.ray.ray_bus import RayBus
from relax_core.contracts.bus import LeasedGroup, LeaseRequest
from relax_core.contracts.columns import MEDIA
from relax_core.contracts.media import Media, MediaGone
from relax_core.contracts.media_file import FolderReader
from relax_core.roles.process.role_context import BUS, RunContext
from relax_core.roles.trainer import column_worker
from relax_core.roles.trainer.column_worker import ColumnWorker, GroupColumns, give_up_lease
from tests.bus.make_media import held, make_item, media_columns
from tests.bus.make_rows import for_actor, for_worker, make_row
from tests.roles.run_context import context_in

T = 60.0
WaitUntil = Callable[..., None]
INPUTS = ("a", MEDIA)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    (tmp_path / "media").mkdir()
    context = context_in(tmp_path, "bus.lease_s=1.0", "mode.max_staleness=1")
    return replace(context, namespace="test-column-worker", media_folder=tmp_path / "media")


@pytest.fixture
def bus(ray_session: str, context: RunContext) -> Iterator[RayBus]:
    bus = create_bus(
        context.config.bus,
        groups_per_step=1,
        group_size=2,
        max_staleness=1,
        on_stale="drop",
        total_steps=100,
        ledger_path=context.run_dir / "ledger.sqlite",
        name=BUS,
        namespace=context.namespace,
        media_folder=context.media_folder,
    )
    yield bus
    bus.close(reason="the test is over", timeout_s=T)
    bus.terminate()


class Annotator(ColumnWorker):
    """Maps the items of its groups; the first lease takes until the file of its item is gone."""

    task = "annotator"
    inputs = INPUTS
    first: Path

    def prepare(self) -> None:
        """Has nothing to build."""

    def columns_of(self, leased: Sequence[LeasedGroup]) -> GroupColumns:
        """Returns column "b" of each group."""
        media = {one.group_uid: msgspec.msgpack.decode(one.columns[MEDIA], type=list[Media]) for one in leased}
        items = [one.item for placed in media.values() for one in placed]
        if any(item.digest == self.first.name for item in items):
            self.wait_gone()
        for item in items:
            FolderReader(self.first.parent).tensors(item)
        return {uid: {"b": b"y"} for uid in media}

    def wait_gone(self) -> None:
        """Waits until the first item has no file."""
        raise NotImplementedError


class Records:
    """Takes the metrics of a worker."""

    def record(self, *_: object) -> None:
        """Forgets a record."""


def test_a_worker_whose_lease_ran_out_leases_again_though_an_item_is_gone(
    bus: RayBus,
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
    bus.let_go([early.digest], timeout_s=T)
    monkeypatch.setattr(column_worker, "discover_metrics", lambda context: Records())
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
        bus.ack([trained.lease_id], step=0, dropped={}, timeout_s=T)  # so the lease alone keeps the item, for a second
        wait_until(lambda: not gone.exists(), what="the removal of the item")
        bus.put([make_row(admissions[1], columns=media_columns([late]))], timeout_s=T)
        done = LeaseRequest(task="actor", columns=("a", "b"), max_groups=1, step=1)
        lease = bus.lease(done, timeout_s=T)
    assert [row.columns["b"] for row in lease.rows] == [b"y"]
    assert worker.status().state == "running", worker.status().error
    assert "is given up, and its groups are leased again: media" in caplog.text
    bus.close(reason="the test is over", timeout_s=T)
    assert worker.join(T)


def test_an_item_that_is_gone_while_its_lease_is_held_is_an_error(bus: RayBus, context: RunContext) -> None:
    (admission,) = bus.admit(1, timeout_s=T)
    bus.put([make_row(admission)], timeout_s=T)
    lease = bus.lease(for_worker(task="annotator"), timeout_s=T)
    with pytest.raises(MediaGone):
        give_up_lease(bus, lease, MediaGone("media 00 is not there"), timeout_s=T)
