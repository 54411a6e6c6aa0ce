"""Tests the mask rule, the blocks and the torch graphs of FlexAttention on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forests import Forest, dense_attention, forests, random_rows, two_level
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from relax_core.train.context_parallel import WHOLE, RowSharding
from relax_core.train.model import tree_attention as ours
from relax_core.train.model.tree_attention import BLOCK, FlexBlocks

torch.set_num_threads(1)
CPU = torch.device("cpu")
LARGE = forests(max_runs=8, longest=3 * BLOCK)


def padded_sees(forest: Forest, padded: int) -> np.ndarray:
    """Returns the visibility with padding. A padding row attends to itself."""
    sees = np.eye(padded, dtype=bool)
    sees[: len(forest.parents), : len(forest.parents)] = forest.sees
    return sees


def listed(counts: torch.Tensor, indices: torch.Tensor) -> list[set[int]]:
    """Returns the key blocks of each query block."""
    return [set(row[:count].tolist()) for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]


@settings(max_examples=25, deadline=None)
@given(forest=LARGE, pads=st.sampled_from([0, 1, BLOCK]))
def test_the_blocks_are_those_that_torch_finds_from_every_pair(forest: Forest, pads: int) -> None:
    padded = len(forest.parents) + pads
    mask = FlexBlocks.of(forest.end, WHOLE, padded=padded, device=CPU).mask
    pairs = create_mask(mask.mask_mod, None, None, padded, padded, device="cpu")[0, 0]
    assert np.array_equal(pairs.numpy(), padded_sees(forest, padded))
    expected = create_block_mask(mask.mask_mod, None, None, padded, padded, device="cpu")
    assert mask.shape == expected.shape and mask.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        mine, right = (
            listed(getattr(blocks, f"{name}_num_blocks"), getattr(blocks, f"{name}_indices"))
            for blocks in (mask, expected)
        )
        assert mine == right, name


@settings(max_examples=25, deadline=None)
@given(forest=LARGE, ranks=st.integers(2, 3))
def test_no_block_of_a_context_parallel_rank_is_forgotten(forest: Forest, ranks: int) -> None:
    """The plan lists all blocks with visible pairs.

    A block with rows of two chunks may be computed unnecessarily, but the plan never treats it as a full block.
    """
    for rank in range(ranks):
        sharding = RowSharding(multiple=2 * ranks, ranks=ranks, rank=rank)
        padded = sharding.padded(len(forest.parents))
        mask = FlexBlocks.of(forest.end, sharding, padded=padded, device=CPU).mask
        mine, order = sharding.rows_of_rank(padded), np.argsort(sharding.gathered_order(padded))
        pairs = create_mask(mask.mask_mod, None, None, len(mine), padded, device="cpu")[0, 0].numpy()
        assert np.array_equal(pairs, padded_sees(forest, padded)[np.ix_(mine, order)])
        some = listed(mask.kv_num_blocks, mask.kv_indices)
        every = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        for query in range(len(some)):
            for key in range(-(-padded // BLOCK)):
                block = pairs[query * BLOCK : (query + 1) * BLOCK, key * BLOCK : (key + 1) * BLOCK]
                assert key not in every[query] or (block.all() and block.shape == (BLOCK, BLOCK))
                assert not block.any() or key in some[query] | every[query]
                assert key not in some[query] & every[query]


def test_it_is_the_dense_attention_and_lengths_share_their_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients are equal, and all lengths share the same graphs.

    Otherwise a GPU would compile for every micro-batch. torch refuses the backward pass on a CPU. With this check
    disabled, torch computes the gradient by its definition.
    """
    graphs = []

    def captured(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    kernel = torch.compile(flex_attention, fullgraph=True, backend=aot_autograd(fw_compiler=captured))
    monkeypatch.setattr(ours, "_kernel", lambda: kernel)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    for prompt in (40, 150, 200, 250, 300, 350, 400):
        forest = two_level([[90, 30, 200], [70]], [prompt, 60])
        rows = len(forest.parents)
        *inputs, incoming = random_rows(rows, dtype=torch.float64, seed=prompt)
        output = FlexBlocks.of(forest.end, WHOLE, padded=rows, device=CPU).attend(*inputs, scale=0.3)
        dense = dense_attention(*inputs, forest.sees, scale=0.3)
        torch.testing.assert_close(output, dense, rtol=1e-12, atol=1e-12)
        grads, expected = (torch.autograd.grad(result, inputs, incoming) for result in (output, dense))
        for mine, right in zip(grads, expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    assert len(graphs) <= 2 * 2  # fewer than one for each of the seven lengths


def test_a_plan_of_blocks_takes_no_memory_by_pairs_of_rows() -> None:
    """A mask for a stream of 2**18 rows would take 64 GB."""
    rows = 2**18
    end = np.full(rows, rows)
    end[rows // 4 :] = np.repeat(np.arange(rows // 4, rows, rows // 4) + rows // 4, rows // 4)
    mask = FlexBlocks.of(end, WHOLE, padded=rows, device=CPU).mask
    blocks = rows // BLOCK
    counts = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert int(counts.sum()) == blocks // 4 * (blocks // 4 + 1) // 2 * 4 + 3 * (blocks // 4) ** 2
