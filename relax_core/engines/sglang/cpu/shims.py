"""Holds the flags and changes with which SGLang 0.5.23 runs on a CPU for which sgl_kernel has no build."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from relax_core.engines.sglang.server.import_hooks import after_import

ATTENTION = "torch_native"
CPU_FLAGS = (  # the user's own flags come after these and override them
    *("--device", "cpu"),
    *("--attention-backend", ATTENTION),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # without it SGLang's scheduler takes a whole core while it waits
)
_kept: list[object] = []  # torch removes the schemas of a library object once it is garbage-collected


def install() -> None:
    """Installs the changes; call it in each of the server's processes before sglang is imported."""
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(str(Path(__file__).parent))
    after_import("torchvision.extension", _define_missing_schemas)
    after_import("sglang.srt.mem_cache.pool_host.common", _pin_no_memory)
    after_import("sglang.srt.arg_groups.choices", _allow_seeds)
    after_import("sglang.srt.batch_invariant_ops", _keep_torch_kernels)


def _define_missing_schemas(module: ModuleType) -> None:
    """Defines the two operators for which torchvision registers fake kernels, if its compiled library has not.

    ``module`` is torchvision.extension, whose import loads the library. PyPI's library needs a CUDA build of torch. If
    an operator is defined twice, the library's own definition ends the process without an exception.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _pin_no_memory(module: ModuleType) -> None:
    """Removes the call into CUDA that pins host memory for return_routed_experts."""
    module._cuda_host_register = lambda *arguments, **keywords: None  # type: ignore[attr-defined]


def _allow_seeds(module: ModuleType) -> None:
    """Adds the CPU attention backend to those of --enable-deterministic-inference, which seeds need."""
    module.add_deterministic_attention_backend_choices([ATTENTION])
    module.add_radix_supported_deterministic_attention_backend_choices([ATTENTION])


def _keep_torch_kernels(module: ModuleType) -> None:
    """Keeps torch's kernels, because SGLang's batch-invariant ones need Triton.

    Torch's kernels on a CPU may round differently in different batches.
    """
    module.enable_batch_invariant_mode = lambda *arguments, **keywords: None  # type: ignore[attr-defined]
