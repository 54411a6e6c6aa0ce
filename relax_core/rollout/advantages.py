"""From the columns of groups to their advantages, and to the returns where there is a critic.

The rollout calls this for each group as it completes, and the advantages role calls it for the algorithms that need
columns of other roles or a whole train step's groups; so both give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from relax_core.config.schema import AdvantagesPlace, RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, Needs
from relax_core.registry import find_algorithm

if TYPE_CHECKING:
    from torch import Tensor


def made_as_groups_complete(config: RelaxConfig) -> bool:
    """Whether the rollout computes the advantages of each group when the group completes. It does so when the algorithm
    needs one group at a time and no column of another role, and ``rollout.advantages`` leaves the choice."""
    spec = find_algorithm(config.algo.name)
    needs = spec.needs(config.algo)
    alone = not sees_whole_step(spec, needs) and set(input_columns(needs)) <= set(c.ROLLOUT_COLUMNS)
    return alone and config.rollout.advantages is AdvantagesPlace.auto


def sees_whole_step(spec: AlgorithmSpec, needs: Needs) -> bool:
    """Whether the advantages of a group depend on the other groups of its train step."""
    return spec.normalize is not None and needs.whole_step


def input_columns(needs: Needs) -> tuple[str, ...]:
    """The columns that a group's advantages are computed from."""
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


def advantage_columns(groups: Sequence[Mapping[str, bytes]], spec: AlgorithmSpec, knobs: object) -> list[c.Columns]:
    """The new columns of each group: its advantages and, where it has a critic's values, its returns.

    ``groups``: the `input_columns` of each group, other columns are not read. They are a whole train step's where the
    algorithm normalises over the step; otherwise the columns of a group do not depend on the groups that come with it.
    The returns are made of the advantages before they are normalised.
    """
    needs = spec.needs(knobs)
    inputs = [advantage_inputs(columns, needs) for columns in groups]
    values = [spec.advantages(one, knobs) for one in inputs]
    made = [_returns_column(one, raw, spec, knobs) for one, raw in zip(inputs, values, strict=True)]
    if spec.normalize is not None and needs.whole_step:
        values = spec.normalize(values, inputs, knobs)
    for columns, advantages, one in zip(made, values, inputs, strict=True):
        columns[c.ADVANTAGES] = _encoded(advantages, one)
    return made


def advantage_inputs(columns: Mapping[str, bytes], needs: Needs) -> AdvantageInputs:
    """A group as an algorithm sees it, of the columns of `input_columns` alone. The engine's log-probs are the old ones
    where none are recomputed."""
    import torch

    wanted = input_columns(needs)

    def tensor(column: str) -> Tensor | None:
        return torch.from_numpy(c.decode_ragged(columns[column]).flat().copy()) if column in wanted else None

    mask = c.decode_ragged(columns[c.LOSS_MASK])
    lengths = torch.tensor(mask.lengths)
    return AdvantageInputs(
        rewards=torch.from_numpy(c.decode_array(columns[c.REWARDS]).copy()),
        lengths=lengths,
        loss_mask=torch.from_numpy(mask.flat().astype(bool)),
        sample_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        old_logprobs=tensor(c.OLD_LOGPROBS if c.OLD_LOGPROBS in wanted else c.ROLLOUT_LOGPROBS),
        rollout_logprobs=tensor(c.ROLLOUT_LOGPROBS),
        reference_logprobs=tensor(c.REFERENCE_LOGPROBS),
        teacher_logprobs=tensor(c.TEACHER_LOGPROBS),
        values=tensor(c.VALUES),
    )


def _returns_column(group: AdvantageInputs, advantages: Tensor, spec: AlgorithmSpec, knobs: object) -> c.Columns:
    """The column that the critic learns from; empty without a critic."""
    if group.values is None:
        return {}
    returns = advantages + group.values if spec.returns is None else spec.returns(group, advantages, knobs)
    return {c.RETURNS: _encoded(returns, group)}


def _encoded(of_tokens: Tensor, group: AdvantageInputs) -> bytes:
    return c.encode_flat(of_tokens.float().numpy(), group.lengths.tolist())
