"""Three small repairs without which SGLang 0.5.23 does not run on a CPU that has no build of sgl_kernel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from relax_core.engines.sglang.server.import_hooks import after_import

ATTENTION = "torch_native"
_kept: list[object] = []  # torch forgets the schemas of a library object that is collected


def install() -> None:
    """Call it before sglang is imported, in the server and in each of its processes."""
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(str(Path(__file__).parent))
    _define_torchvision_schemas()
    after_import("sglang.srt.mem_cache.pool_host.common", _pins_no_memory)
    after_import("sglang.srt.arg_groups.choices", _allows_seeds)
    after_import("sglang.srt.batch_invariant_ops", _keeps_torchs_kernels)


def _define_torchvision_schemas() -> None:
    """torchvision registers fake kernels for two operators that its CUDA wheel defines."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _pins_no_memory(module: ModuleType) -> None:
    """Host memory is pinned for a GPU's sake, by a call into CUDA (of return_routed_experts)."""
    module._cuda_host_register = lambda *arguments, **keywords: None  # type: ignore[attr-defined]


def _allows_seeds(module: ModuleType) -> None:
    """--enable-deterministic-inference, which seeds belong to, knows GPU backends only."""
    module.add_deterministic_attention_backend_choices([ATTENTION])
    module.add_radix_supported_deterministic_attention_backend_choices([ATTENTION])


def _keeps_torchs_kernels(module: ModuleType) -> None:
    """Its batch-invariant kernels are Triton's. Torch's on a CPU may round differently with the batch."""
    module.enable_batch_invariant_mode = lambda *arguments, **keywords: None  # type: ignore[attr-defined]
