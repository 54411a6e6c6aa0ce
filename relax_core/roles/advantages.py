"""The advantages role's worker: whole groups in, one advantage a token out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, Needs
from relax_core.contracts.bus import Bus, BusTimeout, Lease, LeasedRow, LeaseRequest
from relax_core.registry import find_algorithm
from relax_core.roles.context import RunContext
from relax_core.roles.meet import meet_bus
from relax_core.roles.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor

SLICE_S = 5.0  # how long a wait for a whole step's groups goes on before it looks whether the step lacks fewer


class AdvantagesWorker(Worker):
    """Computes advantages on the CPU, on as many groups at a time as are ready; on a whole train step's worth where
    the algorithm normalises over the step."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "one advantages worker keeps up with any trainer"
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
        if spec.normalize is not None:
            while True:
                lease = lease_whole_step(bus, request, timeout_s=timeout_s, slice_s=SLICE_S)
                bus.write(lease.lease_id, advantage_columns(lease.rows, spec, config.algo), timeout_s=timeout_s)
        following: Lease | None = bus.lease(request, timeout_s=timeout_s)
        while following is not None:
            columns = advantage_columns(following.rows, spec, config.algo)
            following = bus.write(following.lease_id, columns, then=request, timeout_s=timeout_s)


def input_columns(needs: Needs) -> tuple[str, ...]:
    """What a group's advantages are computed from."""
    columns = [c.REWARDS, c.LOSS_MASK]
    if needs.old_logprobs == "actor_fwd":
        columns.append(c.OLD_LOGPROBS)
    if needs.reference:
        columns.append(c.REFERENCE_LOGPROBS)
        if needs.old_logprobs == "rollout":
            columns.append(c.ROLLOUT_LOGPROBS)
    return tuple(columns)


def lease_whole_step(bus: Bus, request: LeaseRequest, *, timeout_s: float, slice_s: float) -> Lease:
    """Leases ``request.max_groups`` groups, a train step's worth: statistics of a step need them together.

    Fewer only where the step under way lacks fewer: after the loss of a group that had its advantages, nothing but its
    replacement may come until that step is trained. Raises BusTimeout after ``timeout_s`` without groups.
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
    """The rows that are ready, if they are all that the step under way still lacks."""
    try:
        ready = bus.lease(request, timeout_s=timeout_s)
    except BusTimeout:
        return None
    progress = bus.progress(timeout_s=timeout_s)
    with_advantages = progress.leased + progress.waiting - len(ready.rows)
    if 0 < request.max_groups - with_advantages <= len(ready.rows):
        return ready
    bus.release([ready.lease_id], timeout_s=timeout_s)
    return None


def advantage_columns(rows: Sequence[LeasedRow], spec: AlgorithmSpec, knobs: object) -> dict[str, dict[str, bytes]]:
    """The advantages column of each group, normalised over all of them where the algorithm does that."""
    inputs = [advantage_inputs(row) for row in rows]
    values = [spec.advantages(one, knobs) for one in inputs]
    if spec.normalize is not None:
        values = spec.normalize(values, [one.loss_mask for one in inputs], knobs)
    return {
        row.group_uid: {c.ADVANTAGES: c.encode_flat(advantages.float().numpy(), one.lengths.tolist())}
        for row, one, advantages in zip(rows, inputs, values, strict=True)
    }


def advantage_inputs(row: LeasedRow) -> AdvantageInputs:
    """A row as an algorithm sees it. The engine's log-probs are the old ones where none were recomputed."""
    import torch

    def tensor(column: str) -> Tensor | None:
        payload = row.columns.get(column)
        return None if payload is None else torch.from_numpy(c.decode_ragged(payload).flat().copy())

    mask = c.decode_ragged(row.columns[c.LOSS_MASK])
    lengths = torch.tensor(mask.lengths)
    return AdvantageInputs(
        rewards=torch.from_numpy(c.decode_array(row.columns[c.REWARDS]).copy()),
        lengths=lengths,
        loss_mask=torch.from_numpy(mask.flat().astype(bool)),
        sample_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        old_logprobs=tensor(c.OLD_LOGPROBS if c.OLD_LOGPROBS in row.columns else c.ROLLOUT_LOGPROBS),
        reference_logprobs=tensor(c.REFERENCE_LOGPROBS),
    )
