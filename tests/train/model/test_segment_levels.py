"""Compares a gated delta net over a random token forest with the recurrence that starts at each row's parent."""

from __future__ import annotations

import hypothesis
import numpy as np
import torch
import torch.nn.functional as F
from forests import Forest, forests
from torch import Tensor

from relax_core.contracts.family import DeltaNet
from relax_core.families.delta_rule import gated_delta_rule
from relax_core.train.model.delta_net import SegmentLevels

NET = DeltaNet(key_heads=1, value_heads=2, key_dim=4, value_dim=6, kernel=4)


def by_definition(forest: Forest, rows: Tensor, weight: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    """Computes row by row. Each row begins with the state and the inputs of its parent. Returns ``[rows, 2, 6]``."""
    states: list[Tensor] = []
    outputs: list[Tensor] = []
    for row, parent in enumerate(forest.parents):
        path = [row]
        while len(path) < NET.kernel and path[-1] >= 0:
            path.append(forest.parents[path[-1]])
        inputs = [rows[place] if place >= 0 else torch.zeros_like(rows[0]) for place in path]
        inputs += [torch.zeros_like(rows[0])] * (NET.kernel - len(inputs))
        mixed = F.silu(sum(shifted * weight[:, -1 - back] for back, shifted in enumerate(inputs)))
        query, key, value = mixed.split([NET.keys, NET.keys, NET.values])
        query, key = F.normalize(query, dim=0) / NET.key_dim**0.5, F.normalize(key, dim=0)
        state = states[parent] if parent >= 0 else torch.zeros(2, NET.key_dim, NET.value_dim, dtype=rows.dtype)
        state = state * decay[row].exp()[:, None, None]
        new = (value.view(2, -1) - torch.einsum("hkv,k->hv", state, key)) * strength[row][:, None]
        states.append(state + torch.einsum("k,hv->hkv", key, new))
        outputs.append(torch.einsum("hkv,k->hv", states[-1], query))
    return torch.stack(outputs)


def over_levels(levels: SegmentLevels, mixed: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
    query, key, value = mixed.split([NET.keys, NET.keys, NET.values], 1)
    heads = (query[:, None], key[:, None], value.unflatten(1, (2, -1)))
    states, outputs = torch.zeros(0), []
    for level in levels.levels:
        count = len(level.lengths)
        states = torch.zeros(count, 2, 4, 6) if level.parents is None else states[level.parents]
        own = [head[level.rows] for head in (*heads, decay, strength)]
        found, states = gated_delta_rule(own[0], own[1], own[2], own[3], own[4], level.segments, states)
        outputs.append(found)
    return torch.cat(outputs)[levels.row_places]


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(forest=forests(max_runs=8, longest=12), chunk_rows=hypothesis.strategies.sampled_from([1, 3, 64]))
def test_each_segment_begins_with_its_parents_state(forest: Forest, chunk_rows: int) -> None:
    count = len(forest.parents)
    random = torch.Generator().manual_seed(count)
    rows = torch.randn(count, NET.channels, generator=random)
    weight = torch.randn(NET.channels, NET.kernel, generator=random)
    decay = -torch.rand(count, 2, generator=random)
    strength = torch.rand(count, 2, generator=random)
    levels = SegmentLevels.of(forest.end, kernel=NET.kernel, chunk_rows=chunk_rows)
    found = over_levels(levels, F.silu(levels.convolved(rows, weight)), decay, strength)
    expected = by_definition(forest, *(tensor.double() for tensor in (rows, weight, decay, strength)))
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)


def test_another_token_in_a_branch_leaves_the_bits_of_every_other() -> None:
    end = Forest([-1, 0, 1, 1, 3, 1, 5, 6, -1, 8]).end
    levels = SegmentLevels.of(end, kernel=NET.kernel)
    random = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(10, NET.channels, generator=random), torch.randn(NET.channels, NET.kernel)
    decay, strength = -torch.rand(10, 2), torch.rand(10, 2)

    def outputs(rows: Tensor) -> Tensor:
        return over_levels(levels, F.silu(levels.convolved(rows, weight)), decay, strength)

    before = outputs(rows)
    rows = rows.clone()
    rows[5] += 1.0
    changed = (outputs(rows) != before).flatten(1).any(1).numpy()
    assert np.array_equal(np.flatnonzero(changed), [5, 6, 7])
