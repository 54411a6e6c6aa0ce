"""The advantages role's worker: whole groups in, one advantage a token out, and one return where there is a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, Needs
from relax_core.contracts.bus import LeasedRow, LeaseRequest
from relax_core.registry import find_algorithm
from relax_core.roles.context import RunContext
from relax_core.roles.meet import meet_bus
from relax_core.roles.patience import patiently, write_then_lease
from relax_core.roles.whole_step import lease_whole_step
from relax_core.roles.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


class AdvantagesWorker(Worker):
    """Computes advantages on the CPU, on as many groups at a time as are ready; on a whole train step's worth where
    the algorithm normalises over the step under the run's knobs."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "one advantages worker keeps up with any trainer"
        super().__init__(name, context)

    def work(self) -> None:
        import torch

        torch.set_num_threads(1)
        config = self.context.config
        spec = find_algorithm(config.algo.name)
        bus = meet_bus(self.context, self.waiting)
        needs = spec.needs(config.algo)
        request = LeaseRequest(
            task="advantages",
            columns=input_columns(needs),
            max_groups=config.rollout.prompts_per_step,
            lease_s=config.bus.lease_s,
        )
        self.set_state("running")
        timeout_s = config.run.stall_timeout_s
        bus.revoke(request.task, timeout_s=timeout_s)  # what a predecessor that was killed had in hand
        if spec.normalize is not None and needs.whole_step:
            while True:
                lease = patiently(lambda: lease_whole_step(bus, request, timeout_s=timeout_s))
                bus.write(lease.lease_id, advantage_columns(lease.rows, spec, config.algo), timeout_s=timeout_s)
        lease = patiently(lambda: bus.lease(request, timeout_s=timeout_s))
        while True:
            columns = advantage_columns(lease.rows, spec, config.algo)
            lease = write_then_lease(bus, lease.lease_id, columns, request, timeout_s=timeout_s)


def input_columns(needs: Needs) -> tuple[str, ...]:
    """What a group's advantages are computed from."""
    columns = [c.REWARDS, c.LOSS_MASK]
    if needs.old_logprobs == "actor_fwd":
        columns.append(c.OLD_LOGPROBS)
    if needs.reference:
        columns.append(c.REFERENCE_LOGPROBS)
    if needs.teacher is not None:
        columns.append(c.TEACHER_LOGPROBS)
    as_old = needs.old_logprobs == "rollout" and (needs.reference or needs.teacher is not None)
    if as_old or needs.rollout_logprobs:
        columns.append(c.ROLLOUT_LOGPROBS)
    if needs.critic:
        columns.append(c.VALUES)
    return tuple(columns)


def advantage_columns(rows: Sequence[LeasedRow], spec: AlgorithmSpec, knobs: object) -> dict[str, dict[str, bytes]]:
    """The advantages column of each group, normalised over all of them where the algorithm does that; with a critic the
    returns too, made of what the advantages were before that."""
    inputs = [advantage_inputs(row) for row in rows]
    values = [spec.advantages(one, knobs) for one in inputs]
    of_critic = [_returns(one, raw, spec, knobs) for one, raw in zip(inputs, values, strict=True)]
    if spec.normalize is not None:
        values = spec.normalize(values, inputs, knobs)
    columns = {
        row.group_uid: {c.ADVANTAGES: _ragged(advantages, one)}
        for row, one, advantages in zip(rows, inputs, values, strict=True)
    }
    for row, one, returns in zip(rows, inputs, of_critic, strict=True):
        if returns is not None:
            columns[row.group_uid][c.RETURNS] = _ragged(returns, one)
    return columns


def _returns(group: AdvantageInputs, advantages: Tensor, spec: AlgorithmSpec, knobs: object) -> Tensor | None:
    """What the critic learns of a group; None without a critic."""
    if group.values is None:
        return None
    return advantages + group.values if spec.returns is None else spec.returns(group, advantages, knobs)


def _ragged(of_tokens: Tensor, group: AdvantageInputs) -> bytes:
    return c.encode_flat(of_tokens.float().numpy(), group.lengths.tolist())


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
        rollout_logprobs=tensor(c.ROLLOUT_LOGPROBS),
        reference_logprobs=tensor(c.REFERENCE_LOGPROBS),
        teacher_logprobs=tensor(c.TEACHER_LOGPROBS),
        values=tensor(c.VALUES),
    )
