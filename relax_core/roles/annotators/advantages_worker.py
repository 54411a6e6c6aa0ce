"""The worker of the advantages role, for runs in which the rollout does not compute the advantages."""

from __future__ import annotations

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Lease, LeaseRequest
from relax_core.registry import find_algorithm
from relax_core.roles.annotators.retry_policy import without_timeout, write_then_lease
from relax_core.roles.annotators.whole_step_leases import lease_whole_step
from relax_core.roles.process.discovery import discover_bus
from relax_core.roles.process.role_context import RunContext
from relax_core.roles.process.worker import Worker
from relax_core.rollout.group_advantages import advantage_extras, input_columns, sees_whole_step


class AdvantagesWorker(Worker):
    """Computes advantages on the CPU, for all groups that are ready.

    It computes them for a whole train step at once if the algorithm normalises over the step.
    """

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "one advantages worker is fast enough for any trainer"
        super().__init__(name, context)

    def work(self) -> None:
        """Leases groups, computes their advantages and writes them, until the bus closes."""
        import torch

        torch.set_num_threads(1)
        config = self.context.config
        spec = find_algorithm(config.algo.name)
        bus = discover_bus(self.context, self.waiting)
        requirements = spec.requirements(config.algo)
        request = LeaseRequest(
            task="advantages",
            columns=input_columns(requirements),
            max_groups=config.rollout.prompts_per_step,
            lease_s=config.bus.lease_s,
        )

        def columns_of(lease: Lease) -> dict[str, dict[str, bytes]]:
            made = advantage_extras([c.decode_tree(row) for row in lease.rows], spec, config.algo)
            return {
                row.group_uid: {name: c.encode_column(name, values) for name, values in extras.items()}
                for row, extras in zip(lease.rows, made, strict=True)
            }

        self.set_state("running")
        timeout_s = config.run.stall_timeout_s
        bus.revoke(request.task, timeout_s=timeout_s)  # a killed predecessor may have left leases
        if sees_whole_step(spec, requirements):
            while True:
                lease = without_timeout(lambda: lease_whole_step(bus, request, timeout_s=timeout_s))
                bus.write(lease.lease_id, columns_of(lease), timeout_s=timeout_s)
        lease = without_timeout(lambda: bus.lease(request, timeout_s=timeout_s))
        while True:
            lease = write_then_lease(bus, lease.lease_id, columns_of(lease), request, timeout_s=timeout_s)
