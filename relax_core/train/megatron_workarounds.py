"""What megatron-core 0.16.1 gets wrong without CUDA or TransformerEngine, mended as each module is imported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def _disable_jit_fuser(jit: Any) -> None:
    """torch.compile takes tens of seconds to warm up on a CPU; it must be off before any module decorates with it."""
    jit.disable_jit_fuser()


def _cpu_rng_state(tensor_parallel_random: Any) -> None:
    """The RNG tracker addresses CUDA generators by index; the CPU has one."""
    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(tensor_parallel_random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU" not in record.getMessage()
    )


def _name_te_general_gemm(moe_utils: Any) -> None:
    """0.16.1 leaves the name undefined without TransformerEngine, and reads it."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _keep_adam_step(distrib_optimizer: Any) -> None:
    """torch's Adam keeps ``step`` in a parameter's state; 0.16.1 copies every state key from a source without it."""
    optimizer_class = distrib_optimizer.DistributedOptimizer
    original = optimizer_class._set_main_param_and_optimizer_states

    def set_main_param_and_optimizer_states(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {"step": state["step"]} if "step" in state else {}
        return original(self, model_param, {**kept, **tensors})

    optimizer_class._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _disable_jit_fuser,
    "megatron.core.tensor_parallel.random": _cpu_rng_state,
    "megatron.core.transformer.moe.moe_utils": _name_te_general_gemm,
    "megatron.core.optimizer.distrib_optimizer": _keep_adam_step,
}


def apply(module: ModuleType) -> None:
    """Mends a freshly executed Megatron module, if it is one of those that need it."""
    mend = _AFTER_IMPORT.get(module.__name__)
    if mend is not None:
        mend(module)


def create_optimizer_state(optimizer: Any) -> None:
    """Gives every parameter zeroed Adam state, in place.

    0.16.1 can describe the state that it is about to load only where that state exists already.
    ``optimizer``: what get_megatron_optimizer returned.
    """
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = chained.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
