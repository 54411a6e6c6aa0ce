"""The loop of a worker that adds columns to groups: lease, compute, write; a write returns the next lease."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from relax_core.contracts.bus import Lease, LeasedGroup, LeaseLost, LeaseRequest
from relax_core.contracts.media import MediaGone
from relax_core.roles.annotators.retry_policy import give_up_lease, without_timeout, write_then_lease
from relax_core.roles.annotators.whole_step_leases import lease_whole_step
from relax_core.roles.process.discovery import discover_bus, discover_metrics
from relax_core.roles.process.worker import Worker

GroupColumns = dict[str, dict[str, bytes]]  # group uid → column → encoded values


class ColumnWorker(Worker):
    """Adds columns to groups. All state is in the bus, so a restarted worker revokes its predecessor's leases.

    ``task`` is its name on the bus, and ``inputs`` the columns that it leases. ``version`` is that of the weights in
    use, for the metrics; -1 if they never change. With ``whole_steps`` it takes all groups of a train step together, so
    that its results do not depend, to the bit, on when each group arrived. Every such worker does so in a run that must
    be repeatable.
    """

    task: str
    inputs: tuple[str, ...]
    version = -1
    whole_steps = False

    @abstractmethod
    def prepare(self) -> None:
        """Builds what `columns_of` needs; may take seconds."""

    @abstractmethod
    def columns_of(self, leased: Sequence[LeasedGroup]) -> GroupColumns:
        """Returns the new columns of each group."""

    def work(self) -> None:
        """Leases groups, computes their columns and writes them, until the bus closes."""
        config = self.context.config
        whole_steps = self.whole_steps or config.repeatable
        self.prepare()
        bus = discover_bus(self.context, self.waiting)
        metrics = discover_metrics(self.context)
        request = LeaseRequest(
            task=self.task,
            columns=self.inputs,
            max_groups=config.rollout.prompts_per_step,
            lease_s=config.bus.lease_s,
        )
        self.set_state("running")
        timeout_s = config.run.stall_timeout_s
        bus.revoke(request.task, timeout_s=timeout_s)  # a killed predecessor may have left leases

        def next_lease() -> Lease:
            if whole_steps:
                return lease_whole_step(bus, request, timeout_s=timeout_s)
            return bus.lease(request, timeout_s=timeout_s)

        lease = without_timeout(next_lease)
        while True:
            try:
                columns = self.columns_of(lease.rows)
                metrics.record(self.task, self.version, {"groups": len(lease.rows), "version": self.version})
                if whole_steps:
                    bus.write(lease.lease_id, columns, timeout_s=timeout_s)
                    lease = without_timeout(next_lease)
                else:
                    lease = write_then_lease(bus, lease.lease_id, columns, request, timeout_s=timeout_s)
            except (LeaseLost, MediaGone) as lost:
                give_up_lease(bus, lease, lost, timeout_s=timeout_s)
                lease = without_timeout(next_lease)
