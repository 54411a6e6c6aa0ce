"""Builds the training back end of a role's rank."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.config.schema import OptimizerConfig
from relax_core.registry import find_algorithm
from relax_core.roles.context import RunContext
from relax_core.roles.placement import LOOPBACK

if TYPE_CHECKING:
    from relax_core.train.backend import MegatronBackend
    from relax_core.train.critic_backend import CriticBackend
    from relax_core.train.rank import RankSetup


def build_backend(
    context: RunContext, *, rank: int, world_size: int, store_address: str, trainable: bool
) -> MegatronBackend:
    """The Megatron back end as the run's config says; ``trainable=False`` for actor_fwd and reference."""
    # Here, because the controller and the fronts import the roles and need neither torch nor Megatron.
    from relax_core.train.backend import MegatronBackend

    setup = _setup(context, context.config.optimizer, rank=rank, world_size=world_size, store_address=store_address)
    return MegatronBackend(setup, temperature=context.config.rollout.temperature, trainable=trainable)


def build_critic(context: RunContext) -> CriticBackend:
    """The critic, which has one rank and, where it is set, a learning rate of its own."""
    from relax_core.train.critic_backend import CriticBackend

    optimizer = context.config.optimizer
    if optimizer.critic_lr is not None:
        optimizer = replace(optimizer, lr=optimizer.critic_lr)
    return CriticBackend(_setup(context, optimizer, rank=0, world_size=1, store_address=store_address(1)))


def _setup(
    context: RunContext, optimizer: OptimizerConfig, *, rank: int, world_size: int, store_address: str
) -> RankSetup:
    from relax_core.train.rank import RankSetup

    config = context.config
    return RankSetup(
        model_folder=context.model_folder,
        family=config.model.family,
        parallel=replace(config.parallel, dp=world_size),  # all but the actor have one rank, whatever the actor has
        optimizer=optimizer,
        total_steps=config.run.steps,
        dtype=config.model.dtype,
        algorithm=find_algorithm(config.algo.name),
        knobs=config.algo,
        rank=rank,
        world_size=world_size,
        store_address=store_address,
        timeout_s=config.run.stall_timeout_s,
        seed=config.seed,
    )


def store_address(world_size: int, *, host: str = LOOPBACK) -> str:
    """The "host:port" at which ``world_size`` ranks meet. One that is alone takes port 0 on loopback: any free one."""
    if world_size == 1:
        return f"{LOOPBACK}:0"
    # Seconds of imports: done before, since rank 0 must bind the port before another process gets it.
    import relax_core.train.backend  # noqa: F401

    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
