"""Compares the gated delta rule over ragged segments with transformers' recurrent rule, segment by segment."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from relax_core.families.delta_rule import Segments, gated_delta_rule

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 12, 16
LENGTHS = (
    (1,),
    (3, 1, 200, 64),
    (63, 65, 64, 1),
    (130, 2, 129, 128, 130),
)


def inputs(lengths: Sequence[int], *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns random rows and states that require gradients. Decays last for a few or for hundreds of rows."""
    random = torch.Generator().manual_seed(sum(lengths))
    rows = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    rates = torch.logspace(-3, 0, HEADS, dtype=dtype)
    found = {
        "query": normal(rows, KEY_HEADS, KEY),
        "key": normal(rows, KEY_HEADS, KEY),
        "value": normal(rows, HEADS, VALUE),
        "decay": -rates * torch.rand(rows, HEADS, generator=random, dtype=torch.float64).to(dtype),
        "strength": normal(rows, HEADS).sigmoid(),
        "states": normal(len(lengths), HEADS, KEY, VALUE),
    }
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def transformers_rule(given: dict[str, Tensor], lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    outputs, states, first = [], [], 0
    for number, rows in enumerate(lengths):
        own = {name: tensor[first : first + rows][None] for name, tensor in given.items() if name != "states"}
        output, state = torch_recurrent_gated_delta_rule(
            own["query"].repeat_interleave(HEADS // KEY_HEADS, 2),
            own["key"].repeat_interleave(HEADS // KEY_HEADS, 2),
            own["value"],
            g=own["decay"],
            beta=own["strength"],
            initial_state=given["states"][number][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(output[0])
        states.append(state[0])
        first += rows
    return torch.cat(outputs), torch.stack(states)


@pytest.mark.parametrize("chunk_rows", [1, 7, 64])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments_of_any_length_are_those_of_transformers(lengths: tuple[int, ...], chunk_rows: int) -> None:
    given = inputs(lengths)
    outputs, states = gated_delta_rule(
        *list(given.values())[:5], Segments.of(lengths, chunk_rows=chunk_rows), given["states"]
    )
    expected_outputs, expected_states = transformers_rule(given, lengths)
    torch.testing.assert_close(outputs, expected_outputs, atol=5e-6, rtol=1e-5)
    torch.testing.assert_close(states, expected_states, atol=5e-6, rtol=1e-5)
    weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)), torch.randn_like(states)
    loss = (outputs * weights[0]).sum() + (states * weights[1]).sum()
    expected = (expected_outputs * weights[0]).sum() + (expected_states * weights[1]).sum()
    for name, ours, theirs in zip(
        given,
        torch.autograd.grad(loss, list(given.values())),
        torch.autograd.grad(expected, list(given.values())),
        strict=True,
    ):
        difference = float((ours - theirs).norm() / theirs.norm())
        assert difference <= 1e-5, f"{name}: {difference:.1e}"


def test_rows_of_one_segment_do_not_change_another() -> None:
    lengths = (70, 5, 64)
    given = {name: tensor.detach() for name, tensor in inputs(lengths).items()}
    segments = Segments.of(lengths)
    before, states = gated_delta_rule(*list(given.values())[:5], segments, given["states"])
    given["value"] = given["value"].clone()
    given["value"][70:75] += 1.0
    after, new_states = gated_delta_rule(*list(given.values())[:5], segments, given["states"])
    assert torch.equal(before[:70], after[:70]) and torch.equal(before[75:], after[75:])
    assert not torch.equal(before[70:75], after[70:75])
    assert torch.equal(states[0], new_states[0]) and torch.equal(states[2], new_states[2])
