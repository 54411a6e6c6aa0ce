"""Builds the engine from its command line, and serves until a stop signal or a failure of the decode thread."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import cast

import torch
import uvicorn

from relax_core.contracts.media_file import FolderReader
from relax_core.engines.asgi_server import Connection, OpenConnections, connection_limit
from relax_core.engines.embedded.application import ControlRoutes, EngineApp
from relax_core.engines.embedded.decoder import Decoder, Prefix
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.generate_body import RequestLimits, RequestMedia
from relax_core.engines.embedded.generate_route import GenerateRoute
from relax_core.engines.embedded.model_config import ModelConfig, read_model_config
from relax_core.engines.embedded.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
from relax_core.engines.embedded.tower_features import MediaFeatures
from relax_core.engines.embedded.weight_updates import WeightUpdates
from relax_core.engines.held_port import BACKLOG
from relax_core.engines.protocol.server_proof import ServerProof
from relax_core.engines.protocol.stop_strings import StopTable
from relax_core.families.towers import Towers
from relax_core.weights.folder_stream import read_safetensors


def build_app(arguments: argparse.Namespace, *, token: str) -> tuple[EngineApp, Scheduler]:
    """Builds the application and starts its decode thread.

    Raises ValueError, or OSError for an unreadable file; the text is for the user.
    """
    torch.set_num_threads(arguments.threads)
    config = read_model_config(arguments.model_path, family=arguments.family)
    _check(arguments, config.max_positions)
    dtype = getattr(torch, arguments.dtype)
    weights = FusedWeights(config, dtype)
    reader = None if arguments.media_folder is None else FolderReader(arguments.media_folder)
    decoder = Decoder(
        LanguageModel(config, weights, context_length=arguments.context_length),
        dtype=dtype,
        max_samples=arguments.max_running_samples,
        max_tokens=arguments.max_total_tokens,
        context_length=arguments.context_length,
        features=_features(config, weights, reader),
        prefix_cache_tokens=arguments.prefix_cache_tokens,
    )
    version = NOTHING_ATTESTED
    if arguments.load_weights:
        weights.apply(weights.checked(read_safetensors(arguments.model_path)))
        version = arguments.weight_version
    with torch.inference_mode():
        _warm_up(decoder)
    scheduler = Scheduler(decoder, version=version)
    info = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    limits = RequestLimits(
        context_length=arguments.context_length,
        max_running_samples=arguments.max_running_samples,
        max_total_tokens=arguments.max_total_tokens,
        state_tokens=decoder.state_columns,
    )
    app = EngineApp(
        GenerateRoute(scheduler, config, limits, StopTable(arguments.model_path), RequestMedia(reader, config)),
        ControlRoutes(scheduler, WeightUpdates(weights, scheduler), info),
        token=token,
    )
    scheduler.start()
    return app, scheduler


def read_token(file: Path) -> str:
    """Returns the bearer token in the file. Raises ValueError for an empty file, OSError for an unreadable file."""
    token = file.read_text().strip()
    if not token:
        raise ValueError(f"--token-file {file}: empty; write the run's bearer token into it")
    return token


def _features(config: ModelConfig, weights: FusedWeights, reader: FolderReader | None) -> MediaFeatures | None:
    """Returns the tower features of a model with towers; None for other models."""
    towers = Towers.of(config)
    return None if towers is None else MediaFeatures(towers, reader, vision=weights.vision, audio=weights.audio)


def _check(arguments: argparse.Namespace, max_positions: int) -> None:
    for name in ("max_running_samples", "max_total_tokens", "context_length", "threads"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: give 1 or more")
    if arguments.prefix_cache_tokens < 0:
        raise ValueError(f"--prefix-cache-tokens {arguments.prefix_cache_tokens}: give 0 or more; 0 keeps no prefixes")
    if arguments.context_length > max_positions:
        raise ValueError(
            f"--context-length {arguments.context_length}: the model has {max_positions} positions; give at most "
            f"{max_positions}"
        )
    if arguments.load_weights and arguments.weight_version < 0:
        raise ValueError(f"--weight-version {arguments.weight_version}: versions start at 0")


def _warm_up(decoder: Decoder) -> None:
    """Decodes two tokens to warm up: the first product of each kind takes milliseconds longer in maths libraries."""
    samples = min(16, decoder.max_samples)
    settings = SamplingSettings(
        max_new_tokens=2, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=()
    )
    if decoder.fits(samples=samples, columns=3):
        decoder.admit([Prefix(token_ids=[0], settings=settings, keys=sample_keys([0], samples)[0])])
        decoder.step()
        decoder.remove(range(samples))
    decoder.free_cache()
    if decoder.features is not None:
        decoder.features.warm_up()


KEEP_ALIVE_S = 7 * 24 * 3600  # practically no limit: a client with the token may be silent for a train step
GRACE_S = 1  # seconds that open requests have to end when the server stops
POLL_S = 0.2


class _Server(uvicorn.Server):
    """Prints the ready line to stdout once the server listens."""

    def __init__(self, config: uvicorn.Config, *, ready: str) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(self._ready, flush=True)


async def serve(app: EngineApp, scheduler: Scheduler, listener: socket.socket, *, token: str, ready: str) -> None:
    """Serves ``app`` on the socket ``listener``; prints ``ready`` once it listens.

    `ServerProof` also answers requests for a proof that this server knows ``token``.
    """
    connections = OpenConnections(connection_limit())
    config = uvicorn.Config(
        ServerProof(app, token=token),
        http=cast("type[asyncio.Protocol]", partial(Connection, connections)),
        ws="none",
        lifespan="off",
        log_level="error",  # client errors are only sent to the client
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, ready=ready)
    tasks = [asyncio.create_task(_end_with_decode_thread(scheduler)), asyncio.create_task(connections.sweep())]
    await server.serve(sockets=[listener])
    for task in tasks:
        task.cancel()


async def _end_with_decode_thread(scheduler: Scheduler) -> None:
    """Ends the process after a failure of the decode thread, because only a new process can decode again."""
    while scheduler.is_alive():
        await asyncio.sleep(POLL_S)
    print(f"embedded engine: the decode thread failed: {scheduler.failure!r}", file=sys.stderr, flush=True)
    os._exit(1)
