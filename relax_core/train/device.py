"""Selects the device of this process's trainer: the torch device of the parameters, and the CPU or the GPU branch.

Code that depends on the device reads `training_device` and nothing else. A process trains on its current CUDA device
if it has CUDA, and on the CPU otherwise. The environment variable ``RELAX_TRAIN_DEVICE`` selects another device: tests
run the GPU branch on CPU tensors (``gpu_branch_on_cpu``) and on a simulated device (``simulated``), and
``plan=rehearse`` runs it on torch's ``meta`` device, which computes shapes without numbers.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLE = "RELAX_TRAIN_DEVICE"
SIMULATED = "simgpu"  # the torch device type that tests/simulated_device registers


@dataclass(frozen=True, kw_only=True)
class Device:
    """Describes where a trainer's tensors are and which branch of the code computes with them.

    ``type`` is a torch device type. If ``gpu`` is True the branch for GPUs runs: FlexAttention, products of bfloat16
    that are summed in float32, torch's own norms. A library of GPU kernels also requires the type ``cuda``.
    """

    type: str
    gpu: bool

    @property
    def cuda(self) -> bool:
        """Returns True if the tensors are on a CUDA device, with kernels, streams and NCCL."""
        return self.type == "cuda"

    @property
    def meta(self) -> bool:
        """Returns True if tensors have shapes without numbers and there are no other ranks (plan=rehearse)."""
        return self.type == "meta"

    @property
    def torch(self) -> torch.device:
        """Returns the torch device of the parameters, with CUDA the current device of this process."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device(self.type)

    def synchronize(self) -> None:
        """Waits until the GPU has finished the passes that this thread started; elsewhere it returns at once.

        Without this wait the time of a rank's passes would be part of the first wait for the other ranks.
        """
        if self.cuda:
            import torch

            torch.cuda.current_stream().synchronize()


DEVICES = {
    "cpu": Device(type="cpu", gpu=False),
    "cuda": Device(type="cuda", gpu=True),
    "gpu_branch_on_cpu": Device(type="cpu", gpu=True),
    "simulated": Device(type=SIMULATED, gpu=True),
    "meta": Device(type="meta", gpu=True),
}


@functools.cache
def training_device() -> Device:
    """Returns this process's device; it does not change after the first call, which imports torch.

    Raises ValueError if ``RELAX_TRAIN_DEVICE`` names no device, or ``cuda`` without CUDA.
    """
    import torch

    has_cuda = torch.cuda.is_available()
    name = os.environ.get(VARIABLE) or ("cuda" if has_cuda else "cpu")
    if name not in DEVICES:
        raise ValueError(f"{VARIABLE}={name} is not known. Use one of {', '.join(DEVICES)}, or unset it.")
    if DEVICES[name].cuda and not has_cuda:
        raise ValueError(f"{VARIABLE}={name}: torch finds no CUDA device. Unset it to train on a CPU.")
    return DEVICES[name]


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which this process multiplies factors of ``dtype`` fastest: ``dtype`` itself or float32.

    If a CPU has no instructions for bfloat16, torch multiplies bfloat16 in loops that reach 3 to 25% of the throughput
    of float32. The conversion to float32 is exact, and CPUs with the instructions sum in float32, too.
    """
    import torch

    if dtype != torch.bfloat16 or training_device().gpu or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return torch.float32


def attention_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which this process computes attention over numbers of ``dtype``: on a CPU at least float32.

    torch's backward pass of attention in bfloat16 takes up to five times as long as in float32 for branches of 40
    tokens, and 0.8 times for 900 (AMD EPYC with AVX-512).
    """
    import torch

    return dtype if training_device().gpu else torch.promote_types(dtype, torch.float32)


def matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiplies as `torch.matmul` does, with the factors in `product_dtype`; the result is rounded once."""
    dtype = product_dtype(left.dtype)
    if dtype == left.dtype:
        return left.matmul(right)
    return left.to(dtype).matmul(right.to(dtype)).to(left.dtype)


def wide_product(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiplies ``left`` ``[rows, inner]`` by ``right`` ``[inner, columns]``; sums and returns in ``dtype``.

    Only CUDA has a kernel that sums bfloat16 in float32, and ``meta`` knows its shapes. Elsewhere the factors are
    converted first, which gives the same sums.
    """
    import torch

    if left.dtype == dtype:
        return torch.mm(left, right, out=out)
    if left.device.type in ("cuda", "meta"):
        return torch.mm(left, right, out_dtype=dtype, out=out)
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


def add_wide_product(to: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds the product of `wide_product` to ``to`` ``[rows, columns]`` in place, and sums in the dtype of ``to``.

    On CUDA the product itself is not stored.
    """
    import torch

    if left.device.type in ("cuda", "meta"):
        torch.addmm(to, left, right, out_dtype=to.dtype, out=to)
    else:
        to.addmm_(left.to(to.dtype), right.to(to.dtype))
