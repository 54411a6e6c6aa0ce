"""Leases the groups of a whole train step, for work whose result must not depend on when each group arrived."""

from __future__ import annotations

import time

import msgspec

from relax_core.contracts.bus import Bus, BusTimeout, Lease, LeaseRequest

SLICE_S = 5.0  # the time after which a waiting lease checks if the step needs fewer groups


def lease_whole_step(bus: Bus, request: LeaseRequest, *, timeout_s: float, slice_s: float = SLICE_S) -> Lease:
    """Leases ``request.max_groups`` groups, those of one train step.

    It leases fewer only if the current step needs fewer: after the loss of a group that this task had finished, only
    its replacement comes before that step is trained. Raises BusTimeout after ``timeout_s`` without groups.
    """
    deadline = time.monotonic() + timeout_s
    whole = msgspec.structs.replace(request, min_groups=request.max_groups)
    while True:
        try:
            return bus.lease(whole, timeout_s=slice_s)
        except BusTimeout:
            if time.monotonic() > deadline:
                raise
        rest = _lease_rest_of_step(bus, request, timeout_s=slice_s)
        if rest is not None:
            return rest


def _lease_rest_of_step(bus: Bus, request: LeaseRequest, *, timeout_s: float) -> Lease | None:
    """Leases the groups that are ready if they are all that the current step still needs; otherwise returns None."""
    try:
        ready = bus.lease(request, timeout_s=timeout_s)
    except BusTimeout:
        return None
    progress = bus.progress(timeout_s=timeout_s)
    done = progress.leased + progress.waiting - len(ready.rows)
    if 0 < request.max_groups - done <= len(ready.rows):
        return ready
    bus.release([ready.lease_id], timeout_s=timeout_s)
    return None
