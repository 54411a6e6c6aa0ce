"""Compares the kernels for Qwen3.5 on a CPU with transformers: requests in chunks, then one token at a time."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

from relax_core.engines.sglang.cpu import sgl_kernel
from relax_core.engines.sglang.cpu.delta_net_kernels import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)
from relax_core.engines.sglang.media.placed_items import FRACTION_UNITS, WHOLE_BITS, packed_positions

KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 12, 16  # both sizes of a state differ, so a transposed state would be noticed
LENGTHS = (70, 5)
SLOTS = torch.tensor([3, 1])  # of 5
CHUNKS = ((33, 2), (30, 1))  # rows of each request in two prefills; the remaining rows are decoded


def rows(count: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def pieces(of_request: list[torch.Tensor]) -> list[tuple[torch.Tensor, list[int], torch.Tensor]]:
    """Returns the rows of each prefill, their lengths, and whether the requests have a state before it."""
    found, done = [], [0] * len(LENGTHS)
    for sizes in CHUNKS:
        parts = [rows[at : at + size] for rows, at, size in zip(of_request, done, sizes, strict=True)]
        found.append((torch.cat(parts), list(sizes), torch.tensor([at > 0 for at in done])))
        done = [at + size for at, size in zip(done, sizes, strict=True)]
    return found


def starts(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)


def test_a_convolution_goes_on_from_its_slot() -> None:
    channels, width = 6, 4
    weight = rows(channels, width, seed=1)
    given = [rows(length, channels, seed=10 + length) for length in LENGTHS]
    expected = [
        F.silu(F.conv1d(F.pad(x.T, (width - 1, 0))[None], weight[:, None], groups=channels))[0].T for x in given
    ]
    pool = rows(5, channels, width - 1, seed=2)  # the slots have rests of other requests
    untouched = pool[[0, 2, 4]].clone()
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for inputs, sizes, has_state in pieces(given):
        out = causal_conv1d_fn_cpu(
            inputs.T,
            weight,
            None,
            activation="silu",
            conv_states=pool,
            has_initial_state=has_state,
            cache_indices=SLOTS,
            query_start_loc=starts(sizes),
        )
        for request, part in enumerate(out.T.split(sizes)):
            found[request].append(part)
    for step in range(2):
        new = torch.stack([x[sum(size[request] for size in CHUNKS) + step] for request, x in enumerate(given)])
        for request, row in enumerate(
            causal_conv1d_update_cpu(new, pool, weight, None, "silu", conv_state_indices=SLOTS)
        ):
            found[request].append(row[None])
    for mine, theirs in zip(found, expected, strict=True):
        whole = torch.cat(mine)
        torch.testing.assert_close(whole, theirs[: len(whole)], atol=1e-6, rtol=1e-5)
    assert torch.equal(pool[[0, 2, 4]], untouched)


def test_a_delta_net_goes_on_from_its_slot() -> None:
    sizes = ((KEY_HEADS, KEY), (KEY_HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
    given = [[rows(length, *shape, seed=7 * length + at) for at, shape in enumerate(sizes)] for length in LENGTHS]
    a_log, bias = rows(HEADS, seed=3), rows(HEADS, seed=4)
    expected = []
    for q, k, v, a, b in given:
        g = -a_log.exp() * F.softplus(a + bias)
        q, k = (heads.repeat_interleave(HEADS // KEY_HEADS, 1) for heads in (q, k))
        out, _ = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
            *(tensor[None] for tensor in (q, k, v, g, b.sigmoid())), use_qk_l2norm_in_kernel=True
        )
        expected.append(out[0])
    pool = torch.zeros(5, HEADS, VALUE, KEY)
    found: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for place in range(len(CHUNKS)):
        q, k, v, a, b = (pieces([request[at] for request in given])[place][0] for at in range(len(sizes)))
        g, beta = torch.ops.sgl_kernel.fused_gdn_gating_cpu(a_log, a, b, bias)
        lengths = list(CHUNKS[place])
        out, _, _ = chunk_gated_delta_rule_cpu(
            q[None],
            k[None],
            v[None],
            g,
            beta,
            initial_state=pool,
            cu_seqlens=starts(lengths),
            initial_state_indices=SLOTS,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
        )
        for request, part in enumerate(out[0].split(lengths)):
            found[request].append(part)
    for step in range(2):
        at_row = [sum(size[request] for size in CHUNKS) + step for request in range(len(LENGTHS))]
        q, k, v, a, b = (
            torch.stack([request[at][row] for request, row in zip(given, at_row, strict=True)])
            for at in range(len(sizes))
        )
        out = torch.ops.sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu(
            a_log, bias, q[None], k[None], v[None], a, b, pool, SLOTS, starts([1, 1]), True, 1.0, 20.0
        )
        for request, row in enumerate(out[0]):
            found[request].append(row[None])
    for mine, theirs in zip(found, expected, strict=True):
        whole = torch.cat(mine)
        torch.testing.assert_close(whole, theirs[: len(whole)], atol=1e-5, rtol=1e-4)
    assert not pool[[0, 2, 4]].any()


def test_norms_and_splits() -> None:
    norm = modeling_qwen3_5.Qwen3_5RMSNormGated(VALUE, eps=1e-5)
    weight, x, z = rows(VALUE, seed=1), rows(9, VALUE, seed=2), rows(9, VALUE, seed=3)
    norm.weight.data = weight
    torch.testing.assert_close(sgl_kernel.fused_rmsnorm_gated(x, weight, z, 1e-5), norm(x, z).detach())

    heads, size = 3, 8
    head_norm = modeling_qwen3_5.Qwen3_5RMSNorm(size, eps=1e-5)
    head_norm.weight.data = rows(size, seed=4)
    q_gate, k = rows(5, heads * 2 * size, seed=5), rows(5, 2 * size, seed=6)
    q, gate = q_gate.view(5, heads, 2 * size).chunk(2, dim=-1)
    found = sgl_kernel.fused_qk_gemma_rmsnorm_with_gate(
        q_gate, k, head_norm.weight, head_norm.weight, 1e-5, size, heads
    )
    expected = (head_norm(q), head_norm(k.view(5, 2, size)), gate)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs.reshape(-1, size).detach())

    qkvz = torch.arange(2 * (2 * KEY_HEADS * KEY + 2 * HEADS * VALUE)).view(2, -1)
    ba = torch.arange(2 * 2 * HEADS).view(2, -1)
    qkv, gates, b, a = torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEY_HEADS, HEADS, KEY, VALUE
    )
    assert torch.equal(torch.cat([qkv, gates.flatten(1)], 1), qkvz) and torch.equal(torch.cat([b, a], 1), ba)
    assert gates.shape == (2, HEADS, VALUE) and b.shape == (2, HEADS)
    gated = rows(4, 6, seed=7)
    multiplied = gated.clone()
    torch.ops.sgl_kernel.fused_sigmoid_mul_cpu(multiplied, rows(4, 2, 3, seed=8))
    torch.testing.assert_close(multiplied, gated * rows(4, 2, 3, seed=8).flatten(1).sigmoid())


def test_a_packed_position_keeps_its_fraction_when_whole_numbers_are_added() -> None:
    """SGLang adds a request's length to the distance of positions, which may be negative."""
    positions = np.array([0.0, 3.0, 9.1, 27.3, 32767.999999999, -4.0, -3.25])
    for added in (0, 5, 40000):
        packed = packed_positions(positions) + added
        low, parts = packed & (2**WHOLE_BITS - 1), packed >> WHOLE_BITS
        if added >= 4:  # a sum is never negative
            assert np.abs(low + parts / FRACTION_UNITS - (positions + added)).max() <= 1 / FRACTION_UNITS
    assert packed_positions(np.array([[7, 12]])).tolist() == [[7, 12]]
