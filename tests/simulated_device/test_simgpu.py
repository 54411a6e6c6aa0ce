"""Tests that the simulated device behaves like a GPU where a CPU hides an error; `make test-simulated-device`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from relax_core.train.device import SIMULATED, VARIABLE
from tests.simulated_device.simgpu import SimulatedModule, register

pytestmark = pytest.mark.skipif(os.environ.get(VARIABLE) != "simulated", reason=f"needs {VARIABLE}=simulated")


@pytest.fixture(scope="module")
def simgpu() -> SimulatedModule:
    return register()


def on_device(*shape: int, **settings: Any) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape).to(SIMULATED).requires_grad_(**settings)


def test_it_computes_with_a_gradient(simgpu: SimulatedModule) -> None:
    x = on_device(3, 3)
    (x @ x).sum().backward()
    assert x.grad is not None and x.grad.device.type == SIMULATED
    host = x.detach().cpu().requires_grad_()
    (host @ host).sum().backward()
    assert host.grad is not None and torch.equal(x.grad.cpu(), host.grad)


@pytest.mark.parametrize("operator", [torch.add, torch.matmul, torch.cat, torch.where, torch.index_select])
def test_host_and_device_do_not_mix(simgpu: SimulatedModule, operator: Any) -> None:
    x, y = on_device(3, 3), torch.ones(3, 3)
    arguments: dict[Any, Any] = {
        torch.cat: ([x, y],),
        torch.where: (x > 2, x, y),
        torch.index_select: (x, 0, torch.arange(2)),
    }
    with pytest.raises(RuntimeError, match="same device"):
        operator(*arguments.get(operator, (x, y)))


def test_in_place_operators_do_not_mix(simgpu: SimulatedModule) -> None:
    x = on_device(3, requires_grad=False)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3).add_(x)
    with pytest.raises(RuntimeError, match="same device"):
        x.masked_fill_(torch.tensor([True, False, True]), 0.0)


def test_host_values_that_a_gpu_operation_accepts(simgpu: SimulatedModule) -> None:
    """Host values may be numbers, index tensors and sources of a copy."""
    x = on_device(3, requires_grad=False)
    assert (x * torch.tensor(2.0)).tolist() == [2.0, 4.0, 6.0]
    assert x[torch.tensor([2, 0])].tolist() == [3.0, 1.0]
    x[torch.tensor([1])] = torch.tensor(9.0)
    x[:1].copy_(torch.tensor([5.0]))
    assert x.tolist() == [5.0, 9.0, 3.0]


def test_the_host_cannot_read_without_a_copy(simgpu: SimulatedModule) -> None:
    x = on_device(3, requires_grad=False)
    with pytest.raises(TypeError, match="can't convert simgpu"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1.0, 2.0, 3.0]


def test_it_counts_memory_and_the_reads_of_the_host(simgpu: SimulatedModule) -> None:
    before, reads = simgpu.memory_allocated(), simgpu.host_reads()
    x = torch.zeros(1000, device=SIMULATED)
    assert simgpu.memory_allocated() == before + 4000
    x.untyped_storage().resize_(0)
    assert simgpu.memory_allocated() == before
    y = torch.ones(10, device=SIMULATED)
    y = (y * 3).cumsum(0)
    assert simgpu.host_reads() == reads
    assert float(y[-1]) == 30.0
    y.cpu()
    assert simgpu.host_reads() == reads + 2


@pytest.mark.parametrize("fused", [False, True])
def test_adamw(simgpu: SimulatedModule, fused: bool) -> None:
    made = []
    for device in ("cpu", SIMULATED):
        parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 5).to(device))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
        for _ in range(2):
            parameter.grad = parameter.detach() * 0.5
            optimizer.step()
        made.append(parameter.detach().cpu())
    torch.testing.assert_close(made[1], made[0])


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions(simgpu: SimulatedModule, dimensions: int) -> None:
    layer = getattr(torch.nn, f"Conv{dimensions}d")(3, 5, 2, stride=2)
    x = torch.randn(2, 3, *[6] * dimensions, generator=torch.Generator().manual_seed(0))
    expected = layer(x)
    wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    found = layer.to(SIMULATED)(x.to(SIMULATED))
    gradients = torch.autograd.grad(found.square().sum(), list(layer.parameters()))
    for mine, right in zip((found, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine.cpu(), right)
