"""Takes the settings from which one rank of a model is built from a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.config.checks.freeze_keys import frozen_parts
from relax_core.config.schema import OptimizerConfig, ParallelConfig, RelaxConfig
from relax_core.contracts.algorithm import AlgorithmSpec
from relax_core.registry import find_algorithm
from relax_core.train.parallel.layout_arithmetic import world_size


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Holds the settings of one rank.

    ``store_address`` and ``token`` are those of `open_rank_store`. ``timeout_s`` bounds every wait for other
    ranks, in seconds. ``moe_aux_loss_coef`` weights the load-balancing loss of a mixture of experts.
    ``banned_token_ids`` are tokens that are never sampled, so they have no probability. ``frozen`` are the parts
    of the model that do not train (`relax_core.config.choices.MODEL_PARTS`).
    """

    model_folder: Path
    family: str | None
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    total_steps: int
    dtype: str
    algorithm: AlgorithmSpec
    config: Any
    rank: int
    world_size: int
    store_address: str
    timeout_s: float
    seed: int
    moe_aux_loss_coef: float = 0.0
    banned_token_ids: Sequence[int] = ()
    frozen: Sequence[str] = ()
    token: str = field(default="", repr=False)


def rank_setup(
    config: RelaxConfig,
    *,
    model_folder: Path,
    rank: int,
    store_address: str,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    token: str = "",
) -> RankSetup:
    """Returns the setup of rank ``rank`` of a model of the run.

    ``parallel`` and ``optimizer`` default to the policy's. `RankSetup` describes the other arguments.
    """
    parallel = parallel or config.parallel
    return RankSetup(
        model_folder=model_folder,
        family=config.model.family,
        parallel=parallel,
        optimizer=optimizer or config.optimizer,
        total_steps=config.run.steps,
        dtype=config.model.dtype,
        algorithm=find_algorithm(config.algo.name),
        config=config.algo,
        rank=rank,
        world_size=world_size(parallel),
        store_address=store_address,
        timeout_s=config.run.stall_timeout_s,
        seed=config.seed,
        moe_aux_loss_coef=config.model.moe_aux_loss_coef,
        banned_token_ids=config.rollout.banned(),
        frozen=frozen_parts(config),
        token=token,
    )
