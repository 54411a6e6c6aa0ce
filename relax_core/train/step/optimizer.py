"""Builds the configured optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer, get_standard_config_overrides

from relax_core.config.schema import OptimizerConfig, ParallelConfig
from relax_core.train.model.frozen_parts import IN_TOWER
from relax_core.train.model.gpt import TreeGPTModel


def wrap_for_training(chunks: Sequence[TreeGPTModel], *, parallel: ParallelConfig, dtype: torch.dtype) -> list[Any]:
    """Wraps each chunk in Megatron's data-parallel wrapper, which keeps gradients in one float32 buffer.

    With ``parallel.overlap`` the last backward pass of a step starts the reduction of gradients bucket by bucket, and
    the first forward pass after it gathers each parameter of the distributed optimizer just before it is used.
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
    """Returns AdamW with decoupled weight decay (none on norms) and gradient clipping by global norm.

    Parameters that need no gradient have no state. The learning rate of a group of parameters is that of the step times
    ``lr_mult``, which differs from 1 only for the vision tower with ``config.tower_lr``.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
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
    optimizer = get_megatron_optimizer(settings, chunks, overrides)
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]  # Megatron's scheduler does the same.
        if "fused" in group:  # torch's AdamW, where Transformer Engine's is not installed
            group["fused"] = True  # one call for all parameters, on CPUs as on GPUs
    return optimizer
