"""Shared parts of the trainer's tests: a tiny backend, random groups, a PPO algorithm and a critic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from relax_core.config.choices import Recompute, Schedule
from relax_core.config.schema import OptimizerConfig, ParallelConfig
from relax_core.contracts.algorithm import (
    AlgorithmConfig,
    AlgorithmSpec,
    LossInputs,
    LossOutputs,
    Requirements,
    StepTotals,
)
from relax_core.contracts.tree import TokenTree
from tests.train.tiny_models import VOCABULARY
from tests.trees import answers_tree


@dataclass(frozen=True)
class ClipConfig(AlgorithmConfig):
    clip: float = 0.2


def clip_loss(inputs: LossInputs, config: ClipConfig) -> LossOutputs:
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    loss = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages) * inputs.loss_mask
    metrics = {"ratio": ((ratio.detach() * inputs.loss_mask).sum(), inputs.loss_mask.sum())}
    return LossOutputs(loss_sum=loss.sum(), metric_sums=metrics)


def _tokens(totals: StepTotals, config: ClipConfig) -> float:
    return float(totals.tokens)


PPO_CLIP = AlgorithmSpec(
    name="ppo_clip",
    summary="PPO-clip over all tokens, for tests",
    config=ClipConfig,
    requirements=lambda config: Requirements(old_logprobs="rollout"),
    check=lambda config: None,
    advantages=lambda inputs, config: inputs.rewards,
    loss=clip_loss,
    denominator=_tokens,
)
CONFIG = ClipConfig("ppo_clip", 16)
RANKS = 4  # ranks of a worker group that keeps its processes and changes its layout


def make_groups(
    lengths: list[list[int]], *, prompt_lengths: list[int], seed: int = 0, masked: float = 0.0
) -> list[TokenTree]:
    """Makes random groups. ``lengths``: response lengths, a list per group. ``masked``: share of masked tokens."""
    random = np.random.default_rng(seed)
    groups = []
    for index, (group_lengths, prompt) in enumerate(zip(lengths, prompt_lengths, strict=True)):
        tokens = sum(group_lengths)
        logprobs = -random.random(tokens, dtype=np.float32) * 4
        groups.append(
            answers_tree(
                f"g{index}",
                random.integers(0, VOCABULARY, prompt, dtype=np.int32),
                group_lengths,
                random.integers(0, VOCABULARY, tokens, dtype=np.int32),
                loss_mask=random.random(tokens) >= masked,
                logprobs=logprobs,
                on_policy=np.ones(tokens, dtype=bool),
                advantages=random.standard_normal(tokens).astype(np.float32),
                values=random.standard_normal(tokens).astype(np.float32),
                returns=random.standard_normal(tokens).astype(np.float32),
            )
        )
    return groups


def parallel_config(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(
        **{
            **dict.fromkeys(("dp", "tp", "pp", "vpp", "cp", "ep", "etp"), 1),
            "sequence_parallel": sizes.get("tp", 1) > 1,
            "recompute": Recompute.none,
            "distributed_optimizer": False,
            "overlap": False,
            "micro_batch_tokens": 8192,
            "micro_batch_patches": 8192,
            **sizes,
        }
    )


def make_backend(folder: Path, **overrides: Any) -> Any:
    """Makes a backend, by default on one rank. ``optimizer`` are optimizer settings."""
    from relax_core.train.policy_backend import MegatronBackend

    own = {"temperature": overrides.pop("temperature", 1.0), "trainable": overrides.pop("trainable", True)}
    own["media"] = overrides.pop("media", None)
    return MegatronBackend(_setup(folder, overrides), **own)


def make_critic(folder: Path, **overrides: Any) -> Any:
    """Makes PPO's critic. The arguments are the same as for `make_backend`."""
    from algorithms.ppo import SPEC, PpoConfig
    from relax_core.train.critic_backend import CriticBackend

    return CriticBackend(_setup(folder, {"algorithm": SPEC, "config": PpoConfig(), **overrides}))


def _setup(folder: Path, overrides: dict[str, Any]) -> Any:
    from relax_core.train.megatron_rank import RankSetup

    parallel = parallel_config(
        dp=overrides.get("world_size", 1), distributed_optimizer=overrides.pop("distributed_optimizer", False)
    )
    optimizer = OptimizerConfig(
        **{
            "lr": 1e-3,
            "min_lr_ratio": 0.0,
            "schedule": Schedule.constant,
            "warmup_steps": 0,
            "beta2": 0.99,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "clip_grad": 1.0,
            **overrides.pop("optimizer", {}),
        }
    )
    arguments: dict[str, Any] = {
        "model_folder": folder,
        "family": "qwen3",
        "parallel": parallel,
        "optimizer": optimizer,
        "total_steps": 10,
        "dtype": "float32",
        "algorithm": PPO_CLIP,
        "config": CONFIG,
        "rank": 0,
        "world_size": 1,
        "store_address": "127.0.0.1:0",
        "timeout_s": 300.0,
        "seed": 0,
    }
    return RankSetup(**(arguments | overrides))


def train_step(backend: Any, micro_batches: list[list[TokenTree]], *, step: int = 0) -> Any:
    backend.begin_step(step)
    for groups in micro_batches:
        backend.accumulate(groups)
    return backend.finish_step()


def dp_groups() -> list[list[TokenTree]]:
    """Makes three micro-batches of uneven groups. The last has a single group, so a second rank gets no group."""
    groups = make_groups([[5, 1, 8], [7, 2], [3, 3, 3, 3], [9]], prompt_lengths=[9, 4, 12, 6], masked=0.3)
    return [groups[:2], groups[2:3], groups[3:]]


def export_folder(backend: Any, source: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Exports a backend's weights like a run, and returns the tensors. ``options`` override arguments."""
    from relax_core.train.hf.hf_export import export_hf_folder

    arguments = {"tensors": backend.export(), "shapes": backend.weight_shapes, "own_dtype": backend._setup.dtype}
    arguments |= {"copied_prefixes": backend.architecture.copied_prefixes, **options}
    export_hf_folder(**arguments, source_folder=source, target=target)
    return {name: tensor for file in sorted(target.glob("*.safetensors")) for name, tensor in load_file(file).items()}
