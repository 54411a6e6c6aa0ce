"""Replaces GPU kernels and other ranks, so one process without a GPU can run a rank's step.

This is the only file of the rehearsal that uses private parts of torch, Megatron and the trainer:

* GPU kernels that a build of torch for CPUs replaces by many operators. `FusedKernels` returns results of the same
  shape, keeps the same tensors for the backward pass, and counts the products.
* Shapes and numbers that come from other ranks: the pipeline's messages (`StageShapes`), the owners of weights.
* A process group without other processes (`use_group_without_ranks`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor
from torch.overrides import TorchFunctionMode

from relax_core.families.architecture import Architecture
from relax_core.train.hf import hf_weights
from relax_core.train.hf.hf_weights import GatheredWeight
from relax_core.train.hf.weight_rules import WeightRule, tensor_shape
from relax_core.train.hf.weight_slices import WeightSlice
from relax_core.train.megatron_without_cuda import namespace
from relax_core.train.model import tree_attention
from relax_core.train.model.tree_attention import BLOCK
from relax_core.train.process_group import WITHOUT_RANKS
from relax_core.train.rehearsal.counting import META, Counting

_MULTIPLY_ADD = 2  # floating-point operations
_FORWARD, _BACKWARD = 2, 5  # products of an attention kernel: QK and PV; both again, and three gradients


def use_group_without_ranks() -> None:
    """Registers the back end of process groups that only count messages."""
    from torch.testing._internal.distributed.fake_pg import _create_fake_pg

    if WITHOUT_RANKS not in dist.Backend.backend_list:
        dist.Backend.register_backend(WITHOUT_RANKS, _create_fake_pg, extended_api=True, devices=["cpu", META])


def replace_gpu_parts(counting: Counting, architecture: Architecture) -> None:
    """Replaces the functions of this process that need a GPU or other ranks of a model of ``architecture``."""
    from torch.optim import adam

    tree_attention._kernel = lambda: _FlexKernel(counting)  # type: ignore[assignment]
    namespace().Event.synchronize = lambda event: counting.count_wait()
    hf_weights.agree_on_senders = partial(_senders, architecture)
    adam._device_dtype_check_for_fused = lambda *args, **kwargs: None  # It does not know META, which has the operator.


def _senders(
    architecture: Architecture,
    rules: Sequence[WeightRule],
    slices: Mapping[str, WeightSlice],
    *,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
) -> list[GatheredWeight]:
    """Assumes that later ranks have the pieces that this rank does not have."""
    rank = dist.get_rank()
    weights = []
    for rule in rules:
        owned = slices.get(rule.hf)
        shape = tensor_shape(rule, architecture)
        senders: tuple[int, ...] = (rank + 1,)
        if owned is not None:
            shape = hf_weights._padded_shape(owned)
            senders = tuple(rank if piece == owned.piece else rank + 1 + piece for piece in range(owned.pieces))
        weights.append(GatheredWeight(rule=rule, shape=shape, senders=senders, dtype=dtype_of(rule.hf)))
    return weights


class StageShapes:
    """Returns the shapes that the neighbouring stages send: all stages pack the same micro-batches in the same order.

    Megatron's stages exchange the shapes of their messages, and wait for them on the host.
    """

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self._rows: Mapping[str, deque[int]] = {"previous": deque(), "next": deque()}
        P2PCommunicator._communicate_shapes = self._shapes

    def packed(self, rows: int) -> None:
        """Adds a micro-batch with ``rows`` rows inside the layers."""
        for waiting in self._rows.values():
            waiting.append(rows)

    def _shapes(self, send_next: Any, send_previous: Any, from_previous: bool, from_next: bool) -> Sequence[Any]:
        return tuple(
            [self._rows[side].popleft(), 1, self._hidden] if wanted else None
            for side, wanted in (("previous", from_previous), ("next", from_next))
        )


class FusedKernels(TorchFunctionMode):
    """Computes RMSNorm and attention like GPU kernels. Keeps the numbers of `torch.tensor`, which META drops."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch."""
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            with self:  # torch turns the mode off inside of this function, but layers may be recomputed there.
                return _run_backward(args[0])
        if func is torch.tensor:
            return _tensor(*args, **kwargs)
        if func is torch.nn.functional.rms_norm and _on_device(args):
            return _rms_norm(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention and _on_device(args):
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Computes attention; ``query`` is ``[…, heads, rows, dim]``."""
        products = query.shape.numel() * key.shape[-2]
        return _Attention.apply(query, key, value, products, self._counting)


def _run_backward(loss: Tensor) -> None:
    """Runs autograd like `Tensor.backward` of a scalar, without the functions that torch overrides."""
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=(loss,),
        grad_tensors=(torch.ones_like(loss),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _on_device(args: Any) -> bool:
    return bool(args) and args[0].device.type == META


def _tensor(data: Any, *, device: Any = None, **settings: Any) -> Tensor:
    made = torch.tensor(_numbers(data), **settings)
    return made if device is None else made.to(device)


def _numbers(data: Any) -> Any:
    """Reads the tensors in nested lists one by one, as torch does."""
    if isinstance(data, Tensor):
        return data.item() if data.device.type == META else data
    return [_numbers(part) for part in data] if isinstance(data, list | tuple) else data


class _Attention(torch.autograd.Function):
    """Keeps query, key, value, output and the log-sum-exp of each row, like FlashAttention and FlexAttention.

    ``products`` are the multiplications of one product of the matrices.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, products: int, counting: Counting) -> Tensor:
        assert query.shape[-1] == value.shape[-1], "both kernels give the output the strides of the query"
        output = torch.empty_like(query)
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.products, ctx.counting = products, counting
        counting.count_flops(_FORWARD * _MULTIPLY_ADD * products)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, _, log_sums = ctx.saved_tensors
        along = torch.empty_like(log_sums)  # the sum of each row's output times its gradient
        ctx.counting.count_flops(_BACKWARD * _MULTIPLY_ADD * ctx.products)
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del along
        return *grads, None, None


class _FlexKernel:
    """Replaces compiled FlexAttention, which computes the listed blocks."""

    def __init__(self, counting: Counting) -> None:
        self._counting = counting

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **settings: Any) -> Any:
        """Computes attention; ``query`` is ``[1, heads, rows, dim]``."""
        blocks = 0
        for counts in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks):
            known = self._counting.value(counts)
            assert known is not None, "the host lists the blocks"
            blocks += int(known.sum())
        products = blocks * BLOCK * BLOCK * query.shape[1] * query.shape[3]
        return _Attention.apply(query, key, value, products, self._counting)


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and the inverse root of each row, like aten::_fused_rms_norm of a CUDA build."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        inverse = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    assert weight is None or weight.dtype == x.dtype, "other dtypes have no fused kernel"
    return _RmsNorm.apply(x, weight, len(normalized_shape))
