"""The advantages role's worker: whole groups in, one advantage a token out, and one return where there is a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, Needs
from relax_core.contracts.bus import LeasedRow, LeaseRequest
from relax_core.contracts.tree import TokenTree
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
    columns = [*c.FORWARD_COLUMNS, c.LOSS_MASK]
    if needs.old_logprobs == "actor_fwd":
        columns.append(c.OLD_LOGPROBS)
    if needs.reference:
        columns.append(c.REFERENCE_LOGPROBS)
    if needs.teacher is not None:
        columns.append(c.TEACHER_LOGPROBS)
    as_old = needs.old_logprobs == "rollout" and (needs.reference or needs.teacher is not None)
    if as_old or needs.rollout_logprobs:
        columns.append(c.LOGPROBS)
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
        row.group_uid: {c.ADVANTAGES: c.encode_column(c.ADVANTAGES, advantages.float().numpy())}
        for row, advantages in zip(rows, values, strict=True)
    }
    for row, returns in zip(rows, of_critic, strict=True):
        if returns is not None:
            columns[row.group_uid][c.RETURNS] = c.encode_column(c.RETURNS, returns.float().numpy())
    return columns


def _returns(group: AdvantageInputs, advantages: Tensor, spec: AlgorithmSpec, knobs: object) -> Tensor | None:
    """What the critic learns of a group; None without a critic."""
    if group.values is None:
        return None
    return advantages + group.values if spec.returns is None else spec.returns(group, advantages, knobs)


def advantage_inputs(row: LeasedRow) -> AdvantageInputs:
    """A row as an algorithm sees it. The engine's log-probs are the old ones where none were recomputed."""
    return inputs_of_tree(c.decode_tree(row), with_logprobs=c.LOGPROBS in row.columns)


def inputs_of_tree(tree: TokenTree, *, with_logprobs: bool) -> AdvantageInputs:
    """A group as an algorithm sees it. ``with_logprobs``: of the engine, which are the old ones where none were
    recomputed."""
    import torch

    episodes, rows = tree.tokens

    def tensor(name: str) -> Tensor | None:
        values = tree.of_tokens(name)
        return None if values is None else torch.from_numpy(values)

    rollout = torch.from_numpy(tree.logprobs[rows]) if with_logprobs else None
    return AdvantageInputs(
        rewards=torch.tensor([one.reward for one in tree.episodes], dtype=torch.float32),
        lengths=torch.from_numpy(tree.lengths),
        loss_mask=torch.from_numpy(tree.loss_mask[rows]),
        sample_ids=torch.from_numpy(episodes),
        old_logprobs=tensor(c.OLD_LOGPROBS) if c.OLD_LOGPROBS in tree.extras else rollout,
        rollout_logprobs=rollout,
        reference_logprobs=tensor(c.REFERENCE_LOGPROBS),
        teacher_logprobs=tensor(c.TEACHER_LOGPROBS),
        values=tensor(c.VALUES),
    )
