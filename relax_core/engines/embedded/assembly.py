"""Builds the engine from its command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from relax_core.contracts.media_file import FolderReader
from relax_core.engines.embedded.http.application import ControlRoutes, EngineApp
from relax_core.engines.embedded.http.generate_body import RequestLimits, RequestMedia
from relax_core.engines.embedded.http.generate_route import GenerateRoute
from relax_core.engines.embedded.model.decoder_model import LanguageModel
from relax_core.engines.embedded.model.fused_weights import FusedWeights
from relax_core.engines.embedded.model.model_config import ModelConfig, read_model_config
from relax_core.engines.embedded.model.tower_features import MediaFeatures
from relax_core.engines.embedded.model.weight_updates import WeightUpdates
from relax_core.engines.embedded.scheduler.decoder import Decoder
from relax_core.engines.embedded.scheduler.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.scheduler.slots import Prefix
from relax_core.engines.embedded.scheduler.token_sampler import SamplingSettings, sample_keys
from relax_core.engines.protocol.stop_strings import StopTable
from relax_core.families.towers import Towers
from relax_core.weights.folder_stream import read_safetensors


def build_app(arguments: argparse.Namespace, *, token: str) -> tuple[EngineApp, Scheduler]:
    """Builds the application and starts its decode thread.

    Raises ValueError, or OSError for a file that cannot be read, with a text for the user.
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
    """Returns the bearer token in the file. Raises ValueError if it is empty, and OSError."""
    token = file.read_text().strip()
    if not token:
        raise ValueError(f"--token-file {file}: empty; write the run's bearer token into it")
    return token


def _features(config: ModelConfig, weights: FusedWeights, reader: FolderReader | None) -> MediaFeatures | None:
    """Returns the features of a model with towers, None for another."""
    towers = Towers.of(config)
    return None if towers is None else MediaFeatures(towers, reader, vision=weights.vision, audio=weights.audio)


def _check(arguments: argparse.Namespace, max_positions: int) -> None:
    for name in ("max_running_samples", "max_total_tokens", "context_length", "threads"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: give 1 or more")
    if arguments.prefix_cache_tokens < 0:
        raise ValueError(f"--prefix-cache-tokens {arguments.prefix_cache_tokens}: give 0, which keeps none, or more")
    if arguments.context_length > max_positions:
        raise ValueError(
            f"--context-length {arguments.context_length}: the model has {max_positions} positions; give at most "
            f"{max_positions}"
        )
    if arguments.load_weights and arguments.weight_version < 0:
        raise ValueError(f"--weight-version {arguments.weight_version}: versions start at 0")


def _warm_up(decoder: Decoder) -> None:
    """Decodes two tokens, because a maths library's first product of each kind takes milliseconds to set up."""
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
