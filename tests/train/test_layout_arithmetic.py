"""Which layouts hold a model: each fault names the key, the value and a fix that works."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.config.schema import ParallelConfig
from relax_core.train.layout_arithmetic import LayoutShape, layout_faults

MIXTURE = LayoutShape(layers=48, heads=32, kv_heads=4, linear_heads=0, experts=128, widths={"hidden units": 2048})
DENSE = dataclasses.replace(MIXTURE, experts=0)


def layout(**sizes: int) -> ParallelConfig:
    return ParallelConfig(**({"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1} | sizes))


def faults(parallel: ParallelConfig, shape: LayoutShape = MIXTURE, *, ranks: int) -> list[str]:
    return list(layout_faults(parallel, shape, ranks=ranks, ranks_key="placement.roles.actor"))


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [({"tp": 4, "pp": 2, "ep": 4}, 8), ({"tp": 4, "ep": 8, "dp": 2}, 8), ({"tp": 2, "dp": 4}, 8), ({}, 1)],
)
def test_the_published_layouts_hold(sizes: dict[str, int], ranks: int) -> None:
    assert faults(layout(**sizes), ranks=ranks) == []


@pytest.mark.parametrize(
    ("sizes", "ranks", "text"),
    [
        ({"tp": 2, "dp": 2}, 8, "= 4 ranks, but the trainer has 8. Set parallel.dp=4 or placement.roles.actor=4."),
        ({"tp": 3}, 2, "Set placement.roles.actor=3."),
        ({"tp": 3}, 3, "parallel.tp=3 does not divide the model's 32 attention heads. Use parallel.tp=2."),
        ({"tp": 8}, 8, None),  # a multiple of the 4 key-value heads: they are copied
        ({"pp": 5}, 5, "parallel.pp=5 does not divide the model's 48 layers. Use parallel.pp=4."),
        ({"ep": 3, "dp": 3}, 3, "parallel.ep=3 does not divide the model's 128 experts. Use parallel.ep=2."),
        ({"ep": 8, "dp": 4}, 4, "parallel.ep=8 does not divide the tp x cp x dp = 4 ranks of a pipeline stage."),
    ],
)
def test_a_fault_names_key_value_and_fix(sizes: dict[str, int], ranks: int, text: str | None) -> None:
    found = faults(layout(**sizes), ranks=ranks)
    assert any(text in fault for fault in found) if text else found == []


def test_a_dense_model_has_no_experts_to_spread() -> None:
    assert faults(layout(ep=2, dp=2), DENSE, ranks=2) == ["parallel.ep=2: the model has no experts. Set parallel.ep=1."]


@given(tp=st.integers(1, 9), pp=st.integers(1, 9), cp=st.integers(1, 3), dp=st.integers(1, 5), ep=st.integers(1, 9))
def test_following_the_fixes_ends_with_a_layout_that_holds(tp: int, pp: int, cp: int, dp: int, ep: int) -> None:
    parallel, ranks = layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep), tp * pp * cp * dp
    for _ in range(20):
        found = faults(parallel, ranks=ranks)
        if not found:
            break
        fix = re.search(r"(?:Set|Use) (?:parallel\.(\w+)|placement\.roles\.actor)=(\d+)", found[0])
        assert fix is not None, found[0]
        if fix[1] is None:
            ranks = int(fix[2])
        else:
            setattr(parallel, fix[1], int(fix[2]))
    assert faults(parallel, ranks=ranks) == []
    assert parallel.tp * parallel.pp * parallel.cp * parallel.dp == ranks
