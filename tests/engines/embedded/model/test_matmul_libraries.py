"""Tests that both matmul libraries compute the same products, also after weights were replaced in place."""

from __future__ import annotations

import pytest
import torch

from relax_core.engines.embedded.fused_weights import ONEDNN_FROM, add_product, product

WIDTHS = (64, 128)
FEW = 3
MANY = 2 * ONEDNN_FROM // (64 * 128)


@pytest.mark.parametrize("rows", [FEW, MANY, MANY + 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@torch.inference_mode()
def test_products_are_those_in_float64(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, WIDTHS[0], dtype=dtype), torch.randn(WIDTHS[1], WIDTHS[0], dtype=dtype)
    addend = torch.randn(rows, WIDTHS[1], dtype=dtype)
    for _ in range(2):
        exact = x.double() @ weight.double().t()
        found, added = product(x, weight.t()), add_product(addend, x, weight.t())
        assert found.dtype == added.dtype == dtype
        scale = float(exact.abs().max())
        assert float((found.double() - exact).abs().max()) <= tolerance * scale
        assert float((added.double() - exact - addend.double()).abs().max()) <= tolerance * scale
        weight.normal_()  # replaces the weights in place, like a weight update
