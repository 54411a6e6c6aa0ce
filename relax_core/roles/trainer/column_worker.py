"""Implements the loop of workers that add columns to groups: lease, compute, write. A write returns the next lease.

These workers wait for leases without a timeout, because the trainer may be busy for long, for example with a checkpoint
on a slow disk. If the whole run stalls for `run.stall_timeout_s`, the controller ends it; the trainer's waits for
groups have the same limit. After a timeout of one bus call a worker logs the awaited work and repeats the call. A
worker with results that must not depend on the arrival times of groups leases whole train steps.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from relax_core.bus.ray_bus import blocking
from relax_core.contracts import columns as c
from relax_core.contracts.bus import LEASE_S, Bus, BusTimeout, Group, Lease, LeaseLost, LeaseRequest
from relax_core.contracts.media import MediaGone
from relax_core.registry import find_algorithm
from relax_core.roles.discovery import discover_bus
from relax_core.roles.role_context import RunContext
from relax_core.roles.worker import Worker
from relax_core.rollout.group_advantages import advantage_extras, input_columns, needs_whole_step

T = TypeVar("T")
log = logging.getLogger(__name__)


def without_timeout(call: Callable[[], T]) -> T:
    """Repeats ``call`` while it raises `BusTimeout`. Returns its result."""
    while True:
        try:
            return call()
        except BusTimeout as late:
            log.warning("waits on: %s", late)


def write_then_lease(
    bus: Bus, lease_id: int, columns: Mapping[str, Mapping[str, bytes]], request: LeaseRequest, *, timeout_s: float
) -> Lease:
    """Writes a lease's columns and returns the next lease.

    One bus call does both if groups are ready within ``timeout_s``.
    """
    try:
        following = blocking(bus.write(lease_id, columns, then=request, timeout_s=timeout_s))
        assert following is not None, "a write with a lease request returns a lease"
        return following
    except BusTimeout as late:  # the bus has stored the columns
        log.warning("waits on: %s", late)
    return without_timeout(lambda: blocking(bus.lease(request, timeout_s=timeout_s)))


def give_up_lease(bus: Bus, lease: Lease, lost: LeaseLost | MediaGone, *, timeout_s: float) -> None:
    """Gives up a lease that ended before its work was done; the bus leases its groups again.

    Raises ``lost`` again if a media item is gone and the lease is still valid. This is a bug, because the bus keeps the
    items of a valid lease.
    """
    if isinstance(lost, MediaGone):
        try:
            blocking(bus.read(lease.lease_id, [row.group_uid for row in lease.rows], columns=(), timeout_s=timeout_s))
        except LeaseLost:
            pass
        else:
            raise lost
    log.warning("lease %d is given up, and its groups are leased again: %s", lease.lease_id, lost)
    blocking(bus.release([lease.lease_id], timeout_s=timeout_s))


SLICE_S = 5.0  # interval in seconds at which a waiting lease checks whether the step needs fewer groups


def lease_whole_step(bus: Bus, request: LeaseRequest, *, timeout_s: float, slice_s: float = SLICE_S) -> Lease:
    """Leases ``request.max_groups`` groups, the groups of one train step.

    It leases fewer groups only if the current step needs fewer groups. Example: a group that this task had finished is
    lost; then only its replacement arrives before the step is trained. Raises BusTimeout after ``timeout_s`` without
    groups.
    """
    deadline = time.monotonic() + timeout_s
    whole = msgspec.structs.replace(request, min_groups=request.max_groups)
    while True:
        try:
            return blocking(bus.lease(whole, timeout_s=slice_s))
        except BusTimeout:
            if time.monotonic() > deadline:
                raise
        rest = _lease_rest_of_step(bus, request, timeout_s=slice_s)
        if rest is not None:
            return rest


def _lease_rest_of_step(bus: Bus, request: LeaseRequest, *, timeout_s: float) -> Lease | None:
    """Leases the ready groups if the current step needs no groups in addition to them; otherwise returns None."""
    try:
        ready = blocking(bus.lease(request, timeout_s=timeout_s))
    except BusTimeout:
        return None
    progress = blocking(bus.progress(timeout_s=timeout_s))
    done = progress.leased + progress.waiting - len(ready.rows)
    if 0 < request.max_groups - done <= len(ready.rows):
        return ready
    blocking(bus.release([ready.lease_id], timeout_s=timeout_s))
    return None


class ColumnWorker(Worker):
    """Adds columns to groups. All state is in the bus, so a restarted worker revokes the leases of its earlier process.

    ``task`` is the worker's name on the bus, and ``inputs`` lists the columns that it leases. ``version`` is the
    version of the weights in use, -1 for weights that never change. With ``recorded`` the metrics of each lease contain
    ``version``. With ``whole_steps`` the worker leases all groups of a train step together, so its results are bitwise
    independent of the arrival times of groups. In a repeatable run every column worker has ``whole_steps``.
    """

    task: str
    inputs: tuple[str, ...]
    version = -1
    whole_steps = False
    recorded = True

    @abstractmethod
    def prepare(self) -> None:
        """Prepares the worker for `columns_of`; this may take seconds."""

    @abstractmethod
    def columns_of(self, leased: Sequence[Group]) -> c.GroupColumns:
        """Returns the new columns of each group."""

    def work(self) -> None:
        """Leases groups, computes their columns and writes them, until the bus closes."""
        config, timeout_s = self.context.config, self.context.config.run.stall_timeout_s
        self.prepare()
        whole_steps = self.whole_steps or config.repeatable
        bus = discover_bus(self.context, self.waiting)
        metrics = self.context.event_writer(self.name)
        request = LeaseRequest(
            task=self.task,
            columns=self.inputs,
            max_groups=config.rollout.prompts_per_step,
            lease_s=LEASE_S,
        )
        self.set_state("running")
        blocking(bus.revoke(request.task, timeout_s=timeout_s))  # a killed earlier process may have left leases

        def next_lease() -> Lease:
            if whole_steps:
                return lease_whole_step(bus, request, timeout_s=timeout_s)
            return blocking(bus.lease(request, timeout_s=timeout_s))

        lease = without_timeout(next_lease)
        while True:
            try:
                columns = self.columns_of(lease.rows)
                if self.recorded:
                    metrics.record(self.task, self.version, {"groups": len(lease.rows), "version": self.version})
                if whole_steps:
                    blocking(bus.write(lease.lease_id, columns, timeout_s=timeout_s))
                    lease = without_timeout(next_lease)
                else:
                    lease = write_then_lease(bus, lease.lease_id, columns, request, timeout_s=timeout_s)
            except (LeaseLost, MediaGone) as lost:
                give_up_lease(bus, lease, lost, timeout_s=timeout_s)
                lease = without_timeout(next_lease)


class AdvantagesWorker(ColumnWorker):
    """Computes advantages on the CPU, for algorithms that need other roles' columns or all groups of a train step."""

    task = "advantages"
    recorded = False

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "one advantages worker is fast enough for any trainer"
        super().__init__(name, context)

    def prepare(self) -> None:
        """Selects the columns, and limits torch to one thread."""
        import torch

        torch.set_num_threads(1)
        self._algo = self.context.config.algo
        self._spec = find_algorithm(self._algo.name)
        requirements = self._spec.requirements(self._algo)
        self.inputs, self.whole_steps = input_columns(requirements), needs_whole_step(self._spec, requirements)

    def columns_of(self, leased: Sequence[Group]) -> c.GroupColumns:
        """Returns the advantages of each group's tokens and, with a critic, the returns."""
        made = advantage_extras([c.decode_tree(row) for row in leased], self._spec, self._algo)
        return {
            row.group_uid: {name: c.encode_column(name, values) for name, values in extras.items()}
            for row, extras in zip(leased, made, strict=True)
        }
