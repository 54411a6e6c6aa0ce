"""Retry policy for workers downstream of the trainer. They wait without a timeout; the controller detects stalls.

The trainer may be busy for long, for example with a checkpoint on a slow disk. The controller knows that and ends a run
that stalls (`run.stall_timeout_s`), and the trainer's own waits for groups have that limit too. A worker that waits
longer logs what it waits for and retries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from relax_core.contracts.bus import Bus, BusTimeout, Lease, LeaseLost, LeaseRequest
from relax_core.contracts.media import MediaGone

T = TypeVar("T")
log = logging.getLogger(__name__)


def without_timeout(call: Callable[[], T]) -> T:
    """Returns the result of ``call``, which is repeated as long as it raises `BusTimeout`."""
    while True:
        try:
            return call()
        except BusTimeout as late:
            log.warning("waits on: %s", late)


def write_then_lease(
    bus: Bus, lease_id: int, columns: Mapping[str, Mapping[str, bytes]], request: LeaseRequest, *, timeout_s: float
) -> Lease:
    """Writes a lease's columns and returns the next lease, with one call if groups are ready within ``timeout_s``."""
    try:
        following = bus.write(lease_id, columns, then=request, timeout_s=timeout_s)
        assert following is not None, "a write with a lease request returns a lease"
        return following
    except BusTimeout as late:  # the bus has stored the columns
        log.warning("waits on: %s", late)
    return without_timeout(lambda: bus.lease(request, timeout_s=timeout_s))


def give_up_lease(bus: Bus, lease: Lease, lost: LeaseLost | MediaGone, *, timeout_s: float) -> None:
    """Gives up a lease that ended before its work was done, because its groups are leased again.

    Raises ``lost`` again if an item is gone although the lease is held, because the bus keeps the items of a lease.
    """
    if isinstance(lost, MediaGone):
        try:
            bus.read(lease.lease_id, [row.group_uid for row in lease.rows], columns=(), timeout_s=timeout_s)
        except LeaseLost:
            pass
        else:
            raise lost
    log.warning("lease %d is given up, and its groups are leased again: %s", lease.lease_id, lost)
    bus.release([lease.lease_id], timeout_s=timeout_s)
