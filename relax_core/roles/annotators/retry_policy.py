"""How workers wait that follow the trainer: without an end of their own.

The trainer may hold them up for long with a work of its own, such as a checkpoint on a slow disk. Whether the run
stands still the controller judges (`run.stall_timeout_s`), which knows of that; and the trainer itself waits for rows
only so long. So a wait of theirs that is over is told in the log, with who owes, and begun again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from relax_core.contracts.bus import Bus, BusTimeout, Lease, LeaseRequest

T = TypeVar("T")
log = logging.getLogger(__name__)


def without_timeout(call: Callable[[], T]) -> T:
    """What ``call``, a wait with a deadline of its own, gives in the end."""
    while True:
        try:
            return call()
        except BusTimeout as late:
            log.warning("waits on: %s", late)


def write_then_lease(
    bus: Bus, lease_id: int, columns: Mapping[str, Mapping[str, bytes]], request: LeaseRequest, *, timeout_s: float
) -> Lease:
    """Writes a lease's columns and waits for the next one, in one call where rows are there within ``timeout_s``."""
    try:
        following = bus.write(lease_id, columns, then=request, timeout_s=timeout_s)
        assert following is not None, "it was asked for"
        return following
    except BusTimeout as late:  # the write is persisted
        log.warning("waits on: %s", late)
    return without_timeout(lambda: bus.lease(request, timeout_s=timeout_s))
