"""Builds the training back end of a role's rank."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from relax_core.registry import find_algorithm
from relax_core.roles.context import RunContext

if TYPE_CHECKING:
    from relax_core.train.backend import MegatronBackend


def build_backend(
    context: RunContext, *, rank: int, world_size: int, store_address: str, trainable: bool
) -> MegatronBackend:
    """The Megatron back end as the run's config says; ``trainable=False`` for actor_fwd and reference."""
    # Here, because the controller and the fronts import the roles and need neither torch nor Megatron.
    from relax_core.train.backend import MegatronBackend

    config = context.config
    return MegatronBackend(
        model_folder=context.model_folder,
        family=config.model.family,
        parallel=replace(
            config.parallel, dp=world_size
        ),  # actor_fwd and reference have one rank, whatever the actor has
        optimizer=config.optimizer,
        total_steps=config.run.steps,
        temperature=config.rollout.temperature,
        dtype=config.model.dtype,
        algorithm=find_algorithm(config.algo.name),
        knobs=config.algo,
        rank=rank,
        world_size=world_size,
        store_address=store_address,
        timeout_s=config.run.stall_timeout_s,
        seed=config.seed,
        trainable=trainable,
    )


def store_address(world_size: int) -> str:
    """The loopback "host:port" at which ``world_size`` ranks meet. A rank that is alone takes port 0: any free one."""
    if world_size == 1:
        return "127.0.0.1:0"
    # Seconds of imports: done before, since rank 0 must bind the port before another process gets it.
    import relax_core.train.backend  # noqa: F401

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
