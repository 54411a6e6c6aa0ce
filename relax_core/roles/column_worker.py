"""The loop of a worker that adds columns to every row: lease, compute, write, and with that the next lease."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from relax_core.contracts.bus import Lease, LeasedRow, LeaseRequest
from relax_core.roles.meet import meet_bus, meet_metrics
from relax_core.roles.whole_step import lease_whole_step
from relax_core.roles.worker import Worker

RowColumns = dict[str, dict[str, bytes]]  # group uid → column → payload


class ColumnWorker(Worker):
    """All of its state is in the bus: a restarted one revokes what its predecessor had in hand.

    ``task``: its name on the bus. ``inputs``: columns that it asks for. ``version``: of the weights in use, for the
    metrics; -1 where they never change. ``whole_steps``: takes the rows of a train step together, so that what it
    writes does not depend, to the bit, on when each of them came.
    """

    task: str
    inputs: tuple[str, ...]
    version = -1
    whole_steps = False

    @abstractmethod
    def prepare(self) -> None:
        """Builds what `columns_of` needs; seconds."""

    @abstractmethod
    def columns_of(self, rows: Sequence[LeasedRow]) -> RowColumns:
        """The new columns of each row."""

    def work(self) -> None:
        config = self.context.config
        self.prepare()
        bus = meet_bus(self.context, self.waiting)
        metrics = meet_metrics(self.context)
        request = LeaseRequest(
            task=self.task,
            columns=self.inputs,
            max_groups=config.rollout.prompts_per_step,
            lease_s=config.bus.lease_s,
        )
        self.set_state("running")
        timeout_s = config.run.stall_timeout_s
        bus.revoke(request.task, timeout_s=timeout_s)  # what a predecessor that was killed had in hand
        then = None if self.whole_steps else request
        lease: Lease | None = None
        while True:
            if lease is None and self.whole_steps:
                lease = lease_whole_step(bus, request, timeout_s=timeout_s)
            elif lease is None:
                lease = bus.lease(request, timeout_s=timeout_s)
            columns = self.columns_of(lease.rows)
            metrics.record(self.task, self.version, {"groups": len(lease.rows), "version": self.version})
            lease = bus.write(lease.lease_id, columns, then=then, timeout_s=timeout_s)
