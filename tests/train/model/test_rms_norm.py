"""Compares RMSNorm and its gradient with the definition in float64."""

from __future__ import annotations

import pytest
import torch

from relax_core.train.model.gpt import rms_norm

EPS = 1e-6


def defined(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("shape", [(5, 1, 64), (7, 1, 4, 16), (3, 1)])
def test_value_and_gradient_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = 3.0 * torch.randn(shape), torch.randn(shape[-1])
    grad = torch.randn(shape)
    found, exact = (
        [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        for dtype in (torch.float32, torch.float64)
    )
    normed = rms_norm(*found, eps=EPS)
    normed.backward(grad)
    expected = defined(*exact)
    expected.backward(grad.double())
    torch.testing.assert_close(normed.double(), expected, rtol=1e-6, atol=1e-6)
    for mine, right in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, rtol=1e-5, atol=1e-5)


def test_a_row_of_zeros_and_part_of_a_wider_row() -> None:
    """Keys and queries are parts of one product, so their rows are not contiguous in memory."""
    wide = torch.randn(6, 1, 3, 8)
    wide[2] = 0.0
    part = wide[:, :, 1:].requires_grad_()
    weight = torch.ones(8, requires_grad=True)
    normed = rms_norm(part, weight, eps=EPS)
    normed.sum().backward()
    torch.testing.assert_close(normed, defined(part, weight).detach())
    assert torch.isfinite(part.grad).all() and (normed[2] == 0).all()
