"""The advantages role's worker: whole groups in, one advantage a token out."""

from __future__ import annotations

from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, Needs
from relax_core.contracts.bus import LeasedRow, LeaseRequest
from relax_core.registry import find_algorithm
from relax_core.roles.context import RunContext
from relax_core.roles.meet import meet_bus
from relax_core.roles.worker import Worker


class AdvantagesWorker(Worker):
    """Computes advantages on the CPU, on as many groups at a time as are ready."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        self._rank = rank
        super().__init__(name, context)

    def work(self) -> None:
        import torch

        torch.set_num_threads(1)
        config = self.context.config
        spec = find_algorithm(config.algo.name)
        bus = meet_bus(self.context)
        request = LeaseRequest(
            task="advantages",
            columns=input_columns(spec.needs(config.algo)),
            max_groups=config.rollout.prompts_per_step,
            lease_s=config.bus.lease_s,
        )
        self.set_state("running")
        timeout_s = config.run.stall_timeout_s
        bus.revoke(request.task, timeout_s=timeout_s)  # what a predecessor that was killed had in hand
        lease = bus.lease(request, timeout_s=timeout_s)
        while lease is not None:
            columns = {row.group_uid: {c.ADVANTAGES: advantages(row, spec, config.algo)} for row in lease.rows}
            lease = bus.write(lease.lease_id, columns, then=request, timeout_s=timeout_s)


def input_columns(needs: Needs) -> tuple[str, ...]:
    """What a group's advantages are computed from."""
    columns = [c.REWARDS, c.LOSS_MASK]
    if needs.old_logprobs == "actor_fwd":
        columns.append(c.OLD_LOGPROBS)
    if needs.reference:
        columns.append(c.REFERENCE_LOGPROBS)
    return tuple(columns)


def advantages(row: LeasedRow, spec: AlgorithmSpec, knobs: object) -> bytes:
    """The advantages column of one group."""
    import torch

    def tensor(column: str) -> torch.Tensor | None:
        payload = row.columns.get(column)
        return None if payload is None else torch.from_numpy(c.decode_ragged(payload).flat().copy())

    mask = c.decode_ragged(row.columns[c.LOSS_MASK])
    lengths = torch.tensor(mask.lengths)
    values = spec.advantages(
        AdvantageInputs(
            rewards=torch.from_numpy(c.decode_array(row.columns[c.REWARDS]).copy()),
            lengths=lengths,
            loss_mask=torch.from_numpy(mask.flat().astype(bool)),
            sample_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
            old_logprobs=tensor(c.OLD_LOGPROBS),
            reference_logprobs=tensor(c.REFERENCE_LOGPROBS),
        ),
        knobs,
    )
    return c.encode_flat(values.to(torch.float32).numpy(), mask.lengths)
