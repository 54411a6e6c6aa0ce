"""A worker downstream of the trainer retries after each deadline and logs which worker it waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from relax_core.bus.state.bus_state import BusCore
from relax_core.contracts.bus import BusClosed, BusTimeout, Lease, LeaseRequest
from relax_core.roles.trainer.column_worker import without_timeout, write_then_lease
from tests.bus.make_rows import for_worker, make_core, make_row

OWED = "rollout has no group in flight and owes new ones"


class CoreBus:
    """The bus's state machine behind a worker's calls; a call that must wait times out and then calls ``meanwhile``."""

    def __init__(self, core: BusCore, meanwhile: Callable[[int], object]) -> None:
        self._core, self._meanwhile = core, meanwhile
        self.timeouts = 0

    def lease(self, request: LeaseRequest, *, timeout_s: float) -> Lease:
        lease = self._core.lease(request)
        if lease is None:
            self.timeouts += 1
            self._meanwhile(self.timeouts)
            raise BusTimeout(OWED)
        return lease

    def write(
        self, lease_id: int, columns: Mapping[str, Mapping[str, bytes]], *, then: LeaseRequest, timeout_s: float
    ) -> Lease:
        self._core.write(lease_id, columns)
        return self.lease(then, timeout_s=timeout_s)


def test_rows_that_come_late_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    first, second = core.admit(2)
    late = {3: first, 6: second}

    def put_late(timeouts: int) -> None:
        core.put([make_row(late[timeouts])] if timeouts in late else [])

    bus: Any = CoreBus(core, put_late)
    lease = without_timeout(lambda: bus.lease(for_worker(), timeout_s=1.0))
    assert [row.group_uid for row in lease.rows] == [first.group_uid]
    columns = {first.group_uid: {"advantages": b"x"}}
    lease = write_then_lease(bus, lease.lease_id, columns, for_worker(), timeout_s=1.0)
    assert [row.group_uid for row in lease.rows] == [second.group_uid]
    assert caplog.messages == [f"waits on: {OWED}"] * 6


def test_the_end_of_the_bus_ends_the_wait() -> None:
    def closes(timeouts: int) -> None:
        if timeouts == 2:
            raise BusClosed("the run has ended")

    bus: Any = CoreBus(make_core(), closes)
    with pytest.raises(BusClosed):
        without_timeout(lambda: bus.lease(for_worker(), timeout_s=1.0))
    assert bus.timeouts == 2
