"""Builds the configured optimizer, freezes parts of the model, and reads and sets Adam's state.

A frozen parameter has no gradient: Megatron's wrapper allocates no buffer for it, and the optimizer keeps no state for
it. `model.freeze` names the frozen parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, clip_grads, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor

from relax_core.config.choices import AUDIO, LANGUAGE, PROJECTOR, ROUTER, VISION
from relax_core.config.schema import OptimizerConfig, ParallelConfig
from relax_core.families.architecture import Architecture
from relax_core.train.device import training_device
from relax_core.train.hf.stored_weights import stored_weights
from relax_core.train.hf.weight_rules import AUDIO as AUDIO_PREFIX
from relax_core.train.hf.weight_rules import VISION as VISION_PREFIX
from relax_core.train.model.gpt import VALUE_HEAD, TreeGPTModel

ADAM_BETA1 = 0.9
IN_TOWER = "in_tower"  # The optimizer finds the learning rate of the towers' parameters by this attribute.


def _norm(chunk: int, overflow: Tensor, lists: Sequence[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Returns the norm of the tensors of the only list, float32 ``[1]`` on their device.

    The order of the sums is Megatron's. Megatron's own function reads the norm of each tensor on the host.
    """
    (tensors,) = lists
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))).reshape(1), None


def _scale(chunk: int, overflow: Tensor, lists: Sequence[list[Tensor]], factor: float) -> None:
    """Multiplies tensors by ``factor``; both lists are the same, so no tensor is copied."""
    sources, targets = lists
    assert sources is targets, "Megatron scales gradients in place"
    if targets:
        torch._foreach_mul_(targets, factor)


# Without Transformer Engine and Apex, Megatron has functions that call the device, and the host, once for each tensor.
if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
    clip_grads.l2_norm_impl = _norm
if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
    clip_grads.multi_tensor_scale_impl = _scale


def part_of(name: str, architecture: Architecture) -> str | None:
    """Returns the part of the model that has parameter ``name``, or None for a value head, which always trains."""
    if name.startswith(VALUE_HEAD):
        return None
    if name.startswith(VISION_PREFIX):
        assert architecture.vision is not None
        inner = name.removeprefix(VISION_PREFIX)
        return PROJECTOR if inner.startswith(architecture.vision.vision.projector) else VISION
    if name.startswith(AUDIO_PREFIX):
        assert architecture.audio is not None
        inner = name.removeprefix(AUDIO_PREFIX)
        return PROJECTOR if inner.startswith(architecture.audio.audio.projector) else AUDIO
    return ROUTER if ".mlp.router." in name else LANGUAGE


def frozen_weights(architecture: Architecture, frozen: Collection[str]) -> frozenset[str]:
    """Returns the Hugging Face names of the weights that belong to the ``frozen`` parts."""
    return frozenset(
        weight.name
        for weight in stored_weights(architecture)
        if all(part_of(rule.megatron, architecture) in frozen for rule in weight.rules)
    )


def freeze_parts(chunks: Iterable[torch.nn.Module], frozen: Collection[str], architecture: Architecture) -> None:
    """Freezes the parameters of the ``frozen`` parts, and marks the parameters of the towers.

    Call it before Megatron's wrapper and optimizer are built: they skip only parameters that are already frozen.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            part = part_of(name, architecture)
            setattr(parameter, IN_TOWER, part in (VISION, AUDIO))
            if part in frozen:
                parameter.requires_grad_(False)


def wrap_for_training(chunks: Sequence[TreeGPTModel], *, parallel: ParallelConfig, dtype: torch.dtype) -> list[Any]:
    """Wraps each chunk in Megatron's data-parallel wrapper, which stores gradients in one float32 buffer.

    With ``parallel.overlap`` the last backward pass of a step starts the reduction of gradients bucket by bucket. The
    next forward pass gathers each parameter of the distributed optimizer just before the parameter is used.
    """
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap,
        overlap_param_gather=parallel.overlap,
        grad_reduce_in_fp32=dtype != torch.float32,
    )
    return [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def build_optimizer(
    config: OptimizerConfig, chunks: list[Any], *, distributed_optimizer: bool, dtype: torch.dtype
) -> Any:
    """Returns AdamW with decoupled weight decay (except for norms) and gradient clipping by global norm.

    Frozen parameters have no state. The learning rate of a parameter group is the step's rate times ``lr_mult``.
    ``lr_mult`` differs from 1 only for the vision tower with ``config.tower_lr``.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=ADAM_BETA1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed_optimizer,
    )
    overrides = get_standard_config_overrides(settings)
    if config.tower_lr is not None:
        overrides[ParamKey(attr=IN_TOWER)] = {"lr_mult": config.tower_lr / config.lr}
    optimizer = get_megatron_optimizer(settings, chunks, overrides, use_gloo_process_groups=not training_device().meta)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]  # Megatron's scheduler does the same.
        if "fused" in group:  # torch's AdamW, if Transformer Engine's is not installed
            group["fused"] = True  # one call for all parameters, on CPUs and on GPUs
    return optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """Holds flat views ``[elements]`` of Adam's state for a parameter, or for this rank's share of the parameter.

    With the distributed optimizer a rank has only a share. ``start`` is the index of the first element within the
    parameter. ``main`` is the float32 copy of the parameter, or None if the parameter itself is float32.
    """

    start: int
    main: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state's tensors that exist, by name."""
        found = {"main": self.main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def adam_states(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter], *, at: Callable[[Tensor], Tensor] | None = None
) -> dict[torch.nn.Parameter, AdamState]:
    """Returns the state of the ``parameters`` that this rank updates; the state exists after the first update.

    ``at`` returns a state's view of host memory (`HostStates.at`).
    """
    place = at or Tensor.detach
    found = {}
    for wrapped in updating_optimizers(optimizer):
        for parameter in parameters:
            main, start = _main_weight(wrapped, parameter)
            if main is None or main not in wrapped.optimizer.state:
                continue
            state = wrapped.optimizer.state[main]
            found[parameter] = AdamState(
                start=start,
                main=None if parameter.dtype is torch.float32 else place(main.detach()).view(-1),
                exp_avg=place(state["exp_avg"]).view(-1),
                exp_avg_sq=place(state["exp_avg_sq"]).view(-1),
            )
    return found


def set_main_weights(
    optimizer: Any, weights: Mapping[torch.nn.Parameter, Tensor], *, at: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Sets the optimizer's float32 copies to ``weights``, which are float32 tensors with the parameters' shapes.

    Float32 parameters and frozen parameters have no copy and stay unchanged. ``at`` is as in `adam_states`.
    """
    place = at or Tensor.detach
    for wrapped in updating_optimizers(optimizer):
        for main, (parameter, start) in main_weights(wrapped, list(weights)).items():
            place(main.detach()).view(-1).copy_(weights[parameter].view(-1)[start : start + main.numel()])


def main_weights(
    wrapped: Any, parameters: Sequence[torch.nn.Parameter]
) -> dict[Tensor, tuple[torch.nn.Parameter, int]]:
    """Returns each float32 copy that ``wrapped`` updates, its parameter, and its first element in the parameter."""
    updated = {main for group in wrapped.optimizer.param_groups for main in group["params"]}
    found: dict[Tensor, tuple[torch.nn.Parameter, int]] = {}
    for parameter in parameters:
        main, start = _main_weight(wrapped, parameter)
        if main is not None and main in updated and parameter.dtype is not torch.float32:
            found[main] = (parameter, start)
    return found


def _main_weight(wrapped: Any, parameter: torch.nn.Parameter) -> tuple[Tensor | None, int]:
    """Returns the tensor that an optimizer updates for a parameter, and the tensor's start in the parameter.

    The tensor is the parameter itself if the parameter is float32. The result is None if the distributed optimizer does
    not update the parameter on this rank.
    """
    if not isinstance(wrapped, DistributedOptimizer):
        return getattr(parameter, "main_param", parameter), 0
    if parameter not in wrapped.model_param_group_index_map:
        return None, 0
    group, order = wrapped.model_param_group_index_map[parameter]
    main = wrapped.optimizer.param_groups[group]["params"][order]
    return main, wrapped._get_model_param_range_map(parameter)["param"].start


def updates_done(optimizer: Any) -> int:
    """Returns Adam's step counter, which is equal for all parameters and 0 before the first update."""
    for wrapped in updating_optimizers(optimizer):
        for group in wrapped.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in wrapped.optimizer.state.values():
            return int(state["step"])
    return 0


def set_updates_done(optimizer: Any, updates: int) -> None:
    """Sets Adam's step counter, which torch keeps in each parameter's state and fused optimizers in their groups."""
    for wrapped in updating_optimizers(optimizer):
        if not isinstance(wrapped.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in wrapped.optimizer.param_groups:
                group["step"] = updates
        for state in wrapped.optimizer.state.values():
            state["step"].fill_(updates)


def create_optimizer_state(optimizer: Any, *, keep: Callable[[Iterable[Tensor]], None] | None = None) -> None:
    """Gives every parameter without Adam state a zeroed state, like its first step.

    ``keep`` gets the state of each parameter before the next state is allocated (`HostStates.keep`).
    """
    for wrapped in updating_optimizers(optimizer):
        for group in wrapped.optimizer.param_groups:
            for parameter in group["params"]:
                state = wrapped.optimizer.state[parameter]
                if not state:
                    state.update(
                        step=torch.zeros((), device=parameter.device),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
                    if keep is not None:
                        keep(state.values())


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """Yields the tensors that the optimizer updates, which may be copies of the parameters, and Adam's states."""
    for wrapped in updating_optimizers(optimizer):
        for group in wrapped.optimizer.param_groups:
            yield from (parameter.detach() for parameter in group["params"])
        for state in wrapped.optimizer.state.values():
            yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))


def updating_optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers that Megatron chains, one for each kind of parameters, without stubs."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [wrapped for wrapped in chained if not getattr(wrapped, "is_stub_optimizer", False)]
