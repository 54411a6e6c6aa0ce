"""Tests that the train-step benchmark compares equal work: every way has the same gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.train_step import measure
from benchmarks.train_step_ways import (
    SIZES,
    HuggingFace,
    Ours,
    as_rows,
    make_groups,
    response_lengths,
    with_own_experts,
    write_model,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("experts", [0, 4])
def test_every_way_has_the_same_gradient(tmp_path: Path, experts: int) -> None:
    """The gradients are also equal after a step that changes each way's weights."""
    path = write_model(tmp_path, replace(SIZES["demo"], experts=experts))
    groups = make_groups(np.array([[9, 1, 20], [7, 7, 3]]), prompt=11, vocabulary=64)
    rows = as_rows(groups)
    family = "qwen3_moe" if experts else "qwen3"
    padded, packed, tree, plain = (
        HuggingFace(path),
        HuggingFace(path),
        Ours(path, family=family),
        Ours(path, family=family),
    )
    for _ in range(2):
        norms = [padded.padded_step(rows), packed.packed_step(rows, budget=50), tree.step(groups), plain.step(rows)]
        assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)


def test_experts_that_the_model_chose_itself_change_nothing(tmp_path: Path) -> None:
    path = write_model(tmp_path, replace(SIZES["demo"], experts=4))
    groups = make_groups(np.array([[9, 1, 20], [7, 7, 3]]), prompt=11, vocabulary=64)
    routed = with_own_experts(HuggingFace(path).model, groups)
    for group in routed:
        assert group.extras["routed_experts"].shape == (group.rows, SIZES["demo"].layers, 2)
    other_experts = [group.with_extras(routed_experts=(group.extras["routed_experts"] + 1) % 4) for group in routed]
    ours = [Ours(path, family="qwen3_moe").step(some) for some in (groups, routed, other_experts)]
    assert ours[1] == pytest.approx(ours[0], rel=1e-5)
    assert ours[2] != pytest.approx(ours[0], rel=1e-3)


@given(samples=st.integers(2, 100), longest=st.integers(20, 500), share=st.floats(0.1, 1.0))
def test_lengths_have_their_mean_and_their_longest(samples: int, longest: int, share: float) -> None:
    lengths = response_lengths(samples, longest=longest, mean=share * longest)
    assert lengths.max() == longest and lengths.min() >= 1
    assert abs(lengths.mean() - max(share, 1 / samples) * longest) <= 0.02 * longest + longest / samples


def test_ways_with_other_gradients_are_no_comparison() -> None:
    with pytest.raises(AssertionError, match="second"):
        measure("x", {"first": lambda: 1.0, "second": lambda: 1.1}, tokens=1, rounds=1)
