"""Compares the planned micro-batches of an update with the packer's micro-batches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.tree import TokenTree
from relax_core.plan.workload import _largest_share, pack_update
from relax_core.train.micro_batches import MicroBatcher, split_over_ranks
from tests.trees import answers_tree


def packed(trees: list[TokenTree], *, budget: int, ranks: int) -> list[list[TokenTree]]:
    batcher = MicroBatcher(budget, ranks=ranks)
    return [batch for batch in (*batcher.add(trees), batcher.flush()) if batch]


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.integers(1, 30),
    new=st.integers(2, 20),
    answers=st.integers(1, 8),
    groups=st.integers(1, 9),
    budget=st.integers(1, 400),
    ranks=st.integers(1, 4),
)
def test_the_packer_makes_what_the_plan_says(
    prompt: int, new: int, answers: int, groups: int, budget: int, ranks: int
) -> None:
    tokens = np.zeros(answers * new)
    trees = [answers_tree(f"g{place}", np.zeros(prompt), [new] * answers, tokens) for place in range(groups)]
    batches = packed(trees, budget=budget, ranks=ranks)
    rows = [sum(tree.computed_rows for tree in share) for batch in batches for share in split_over_ranks(batch, ranks)]

    branch = new - 1
    plan = pack_update(groups, answers, prompt=prompt, branch=branch, budget=budget, ranks=ranks)
    busy = min(ranks, groups * answers)
    _, largest = _largest_share(groups, answers, prompt=prompt, branch=branch, ranks=busy)
    if plan.micro_batches > 1:
        largest = min(largest, max(budget, prompt + branch))
    assert len(batches) == plan.micro_batches
    assert max(rows) <= largest
    assert sum(rows) <= groups * (prompt + answers * branch) + plan.repeated_prompts * prompt
