"""Computes the advantages of token trees and, with a critic, the returns.

The rollout computes the advantages of a group when the group completes. If an algorithm needs columns of other roles or
the groups of a whole train step, the advantages role computes them. The results are bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import AdvantageInputs, AlgorithmSpec, GroupTurns, Requirements
from relax_core.contracts.tree import TokenTree
from relax_core.registry import find_algorithm

if TYPE_CHECKING:
    from torch import Tensor


def computes_advantages_per_group(config: RelaxConfig) -> bool:
    """Returns True if the rollout computes the advantages of a group when the group completes.

    This is possible if the algorithm needs only one group at a time, and only columns of the rollout. The feeder of an
    algorithm on data rows writes constant advantages, which are final if the algorithm has no use for a whole step.
    """
    spec = find_algorithm(config.algo.name)
    requirements = spec.requirements(config.algo)
    if needs_whole_step(spec, requirements):
        return False
    return requirements.offline is not None or set(input_columns(requirements)) <= set(c.ROLLOUT_COLUMNS)


def needs_whole_step(spec: AlgorithmSpec, requirements: Requirements) -> bool:
    """Returns True if the advantages of a group depend on the other groups of its train step."""
    return spec.normalize is not None and requirements.whole_step


def input_columns(requirements: Requirements) -> tuple[str, ...]:
    """Returns the columns that the advantages of a group depend on."""
    columns = [*c.FORWARD_COLUMNS, c.LOSS_MASK]
    if requirements.old_logprobs == "actor_fwd":
        columns.append(c.OLD_LOGPROBS)
    if requirements.reference:
        columns.append(c.REFERENCE_LOGPROBS)
    if requirements.teacher is not None:
        columns.append(c.TEACHER_LOGPROBS)
    as_old = requirements.old_logprobs == "rollout" and (requirements.reference or requirements.teacher is not None)
    if as_old or requirements.rollout_logprobs:
        columns.append(c.LOGPROBS)
    if requirements.critic:
        columns.append(c.VALUES)
    return tuple(columns)


def group_advantages(spec: AlgorithmSpec, config: RelaxConfig) -> Callable[[TokenTree], Mapping[str, np.ndarray]]:
    """Returns a function that computes the advantages of one complete group."""
    return lambda tree: advantage_extras([tree], spec, config.algo)[0]


def advantage_extras(trees: Sequence[TokenTree], spec: AlgorithmSpec, config: object) -> list[Mapping[str, np.ndarray]]:
    """Returns the new columns of each group, float32 ``[tokens]``: advantages and, with a critic, returns.

    If the algorithm normalises over a train step, ``trees`` must be the trees of the whole step. Otherwise the columns
    of a group do not depend on the other groups in the call. The returns are computed before the advantages are
    normalised.
    """
    requirements = spec.requirements(config)
    inputs = [advantage_inputs(tree, requirements) for tree in trees]
    values = [spec.advantages(group_input, config) for group_input in inputs]
    made = [_returns(group_input, raw, spec, config) for group_input, raw in zip(inputs, values, strict=True)]
    if spec.normalize is not None and requirements.whole_step:
        values = spec.normalize(values, inputs, config)
    return [
        _by_row(tree, {c.ADVANTAGES: advantages, **returns})
        for tree, advantages, returns in zip(trees, values, made, strict=True)
    ]


def advantage_inputs(tree: TokenTree, requirements: Requirements) -> AdvantageInputs:
    """Returns the input of an algorithm for one group, from the columns of `input_columns`.

    If no role recomputes the old log-probs, the engine's log-probs are the old log-probs. The tokens of an episode are
    in the order of turns. This differs from the order of rows if an episode returned to an older part of its history.
    """
    import torch

    wanted = input_columns(requirements)
    episodes, rows = tree.tokens
    order = _by_turn(tree)
    episodes, rows = episodes[order], rows[order]

    def tensor(column: str) -> Tensor | None:
        values = tree.of_tokens(column) if column in wanted else None
        return None if values is None else torch.from_numpy(values[order])

    rollout = torch.from_numpy(tree.logprobs[rows]) if c.LOGPROBS in wanted else None
    return AdvantageInputs(
        rewards=torch.from_numpy(tree.rewards),
        lengths=torch.from_numpy(tree.lengths),
        loss_mask=torch.from_numpy(tree.loss_mask[rows]),
        sample_ids=torch.from_numpy(np.array(episodes)),
        old_logprobs=tensor(c.OLD_LOGPROBS) if c.OLD_LOGPROBS in wanted else rollout,
        rollout_logprobs=rollout,
        reference_logprobs=tensor(c.REFERENCE_LOGPROBS),
        teacher_logprobs=tensor(c.TEACHER_LOGPROBS),
        values=tensor(c.VALUES),
        turns=_turns(tree, _turns_of_tokens(tree)[order]) if requirements.needs_turns else None,
    )


def _turns_of_tokens(tree: TokenTree) -> np.ndarray:
    """Returns the number of each token's turn, int64 ``[tokens]``; turns are counted over all episodes, in order."""
    owners = np.repeat(np.arange(len(tree.episodes)), [len(episode.turns) for episode in tree.episodes])
    starts = np.array([turn.start for episode in tree.episodes for turn in episode.turns], dtype=np.int64)
    keys = owners * tree.rows + starts  # ascending by episode and row
    by_row = np.argsort(keys)
    episodes, rows = tree.tokens
    return by_row[np.searchsorted(keys[by_row], episodes * tree.rows + rows, side="right") - 1]


def _by_turn(tree: TokenTree) -> np.ndarray | slice:
    """Returns the indices that sort a tree's tokens by episode and turn, int64 ``[tokens]``.

    The result is a slice of all tokens if no episode returned to an older part of its history.
    """
    if all(turn.start > before.start for episode in tree.episodes for before, turn in pairwise(episode.turns)):
        return slice(None)
    return np.argsort(_turns_of_tokens(tree), kind="stable")


def _by_row(tree: TokenTree, columns: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Reorders columns from the token order of `advantage_inputs` to the order of the tree's tokens."""
    by_turn, order = {name: values.float().numpy() for name, values in columns.items()}, _by_turn(tree)
    if isinstance(order, slice):
        return by_turn
    back = np.argsort(order)  # the inverse of the order by turn
    return {name: values[back] for name, values in by_turn.items()}


def _turns(tree: TokenTree, of_tokens: np.ndarray) -> GroupTurns:
    """Returns the turns of a group; ``of_tokens``, int64 ``[tokens]``, has each token's turn, sorted by turn."""
    import torch

    rewards: list[float] = []
    for episode in tree.episodes:
        own = [turn.reward or 0.0 for turn in episode.turns]
        assert episode.reward is not None, "an episode without a reward is in no tree"
        own[-1] += episode.reward - math.fsum(own)
        rewards += own
    return GroupTurns(
        of_tokens=torch.from_numpy(of_tokens),
        samples=torch.from_numpy(
            np.repeat(np.arange(len(tree.episodes)), [len(episode.turns) for episode in tree.episodes])
        ),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        state_keys=[turn.state_key for episode in tree.episodes for turn in episode.turns],
    )


def _returns(group: AdvantageInputs, advantages: Tensor, spec: AlgorithmSpec, config: object) -> dict[str, Tensor]:
    """Returns the returns (the targets of the critic); empty without a critic."""
    if group.values is None:
        return {}
    returns = advantages + group.values if spec.returns is None else spec.returns(group, advantages, config)
    return {c.RETURNS: returns}
