"""Builds the training back end of a role's rank."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.bus.factory import connect_bus
from relax_core.bus.ray_bus import blocking
from relax_core.config.schema import OptimizerConfig, ParallelConfig, RelaxConfig
from relax_core.contracts.bus import CALL_TIMEOUT_S
from relax_core.contracts.columns import REFERENCE_LOGPROBS
from relax_core.contracts.engine import WeightManifest
from relax_core.contracts.media import MediaReader
from relax_core.contracts.media_file import FolderReader, NodeReader
from relax_core.families.folder import family_key, folder_architecture
from relax_core.roles.process_placement import LOOPBACK, actor_columns
from relax_core.roles.role_context import BUS, RunContext, worker_name
from relax_core.roles.sample_logs import open_sample_log
from relax_core.train.parallel_layout import critic_parallel, forward_parallel, one_rank, world_size

if TYPE_CHECKING:
    from relax_core.observe.sample_log import SampleLog
    from relax_core.train.critic_backend import CriticBackend
    from relax_core.train.megatron_rank import RankSetup
    from relax_core.train.policy_backend import MegatronBackend


def role_parallel(config: RelaxConfig, role: str) -> ParallelConfig:
    """Returns the layout of actor, actor_fwd or reference."""
    if role == "actor":
        return config.parallel
    return forward_parallel(config.parallel, config.parallel.forward)


def build_role_backend(context: RunContext, role: str, *, rank: int, store_address: str) -> MegatronBackend:
    """Builds one rank of actor, actor_fwd or reference; only the model of the actor is trainable."""
    parallel = role_parallel(context.config, role)
    setup = _setup(context, parallel, context.config.optimizer, rank=rank, store_address=store_address)
    if role != "actor":
        return _build(context, setup, trainable=False)
    samples = open_sample_log(context, worker_name(role, rank))
    backend = _build(context, setup, trainable=True, samples=samples)
    if REFERENCE_LOGPROBS in actor_columns(context.config):
        backend.keep_reference()
    return backend


def build_teacher(context: RunContext, folder: Path) -> MegatronBackend:
    """Builds a frozen teacher from ``folder``, unsharded in this process. The policy may have another model family."""
    parallel = one_rank(context.config.parallel)
    setup = _setup(context, parallel, context.config.optimizer, rank=0, store_address="")
    architecture = folder_architecture(folder, also=context.config.model.family)
    family = family_key(architecture.family, also=context.config.model.family)
    setup = replace(setup, model_folder=folder, family=family)
    return _build(context, setup, trainable=False)


def _build(
    context: RunContext, setup: RankSetup, *, trainable: bool, samples: SampleLog | None = None
) -> MegatronBackend:
    # Imported here, because the controller and the Serve deployments import this package without torch and Megatron.
    from relax_core.train.policy_backend import MegatronBackend

    temperature = context.config.rollout.temperature
    media = _media_reader(context)
    return MegatronBackend(setup, temperature=temperature, trainable=trainable, media=media, samples=samples)


def build_critic(context: RunContext) -> CriticBackend:
    """Builds the critic, which has one rank and may have a separate learning rate."""
    from relax_core.train.critic_backend import CriticBackend

    optimizer = context.config.optimizer
    if optimizer.critic_lr is not None:
        optimizer = replace(optimizer, lr=optimizer.critic_lr)
    parallel = critic_parallel(context.config.parallel)
    setup = _setup(context, parallel, optimizer, rank=0, store_address="")
    return CriticBackend(setup, media=_media_reader(context))


def load_published(backend: MegatronBackend, manifest: WeightManifest) -> bool:
    """Loads a published version. Returns False if newer versions replaced it. Raises the errors of `read_weights`."""
    from relax_core.weights.version_file import read_weights

    try:
        backend.load_weights(read_weights(manifest))
    except FileNotFoundError:
        return False
    return True


def _media_reader(context: RunContext) -> MediaReader | None:
    """Returns the reader of this node's media folder.

    On an external Ray cluster the reader fetches missing items through the bus. It connects to the bus when the first
    item is missing.
    """
    folder, timeout_s = context.media_folder, CALL_TIMEOUT_S
    if folder is None or context.config.launcher.ray_address is None:
        return None if folder is None else FolderReader(folder)
    bus = cache(lambda: connect_bus(BUS, context.namespace))
    return NodeReader(folder, fetch=lambda digests: blocking(bus().fetch_media(digests, timeout_s=timeout_s)))


def _setup(
    context: RunContext, parallel: ParallelConfig, optimizer: OptimizerConfig, *, rank: int, store_address: str
) -> RankSetup:
    from relax_core.train.megatron_rank import rank_setup

    return rank_setup(
        context.config,
        model_folder=context.model_folder,
        parallel=parallel,
        optimizer=optimizer,
        rank=rank,
        store_address=store_address,
        token="" if world_size(parallel) == 1 else context.token_file.read_text(encoding="utf-8").strip(),
    )


def store_address(context: RunContext, *, host: str) -> str:
    """Returns the rendezvous address of ranks: a new file on one host, or "host:port" on several hosts.

    Rank 0 must bind the port at once, because another process could bind it before.
    """
    if host == LOOPBACK:
        return str(context.token_file.parent / f"ranks-{secrets.token_hex(8)}")
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
