"""The contract of an engine kind.

Its SPEC defines how to start or attach a server, the client, and unsupported settings.

An engine is a server with SGLang's HTTP protocol; `relax_core.engines.protocol.engine_client.EngineClient` is its
client. A server that a run starts is a child process. When the server is ready, it prints one line of JSON to stdout,
``{"url": …, "pid": …, "port": …}``. It ends when its stdin closes, so it never outlives its owner. On each connection
the server proves that it knows the run's token (`relax_core.engines.protocol.server_proof`); clients send the token
only after that proof.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_core.contracts.child_process import OPENMP_WAITS
from relax_core.contracts.media import MediaKind
from relax_core.contracts.private_folder import set_compile_cache


class EngineSettings(Protocol):
    """Declares the configuration keys ``engine.*`` that an engine kind needs.

    ``context_tokens`` is the largest number of prompt and response tokens of one sample. Only the engine interprets
    ``flags``. ``prefix_cache_tokens`` is None for an engine kind without this key.
    """

    @property
    def name(self) -> str: ...
    @property
    def tp(self) -> int: ...
    @property
    def max_running_samples(self) -> int: ...
    @property
    def max_total_tokens(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def cpu_threads(self) -> int: ...
    @property
    def urls(self) -> list[str]: ...
    @property
    def python(self) -> str | None: ...
    @property
    def mem_fraction(self) -> float | None: ...
    @property
    def deterministic(self) -> bool | None: ...
    @property
    def flags(self) -> dict[str, Any]: ...
    @property
    def prefix_cache_tokens(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class EngineStart:
    """Holds the parameters to start one engine process (`relax_core.engines.engine_process.EngineLaunch`).

    ``family`` is model.family of the run: a name, a file, or None. ``dtype`` is "float32" or "bfloat16". ``token_file``
    contains the bearer token that every call needs. ``port`` 0 means any free port. ``listener`` is the descriptor of a
    socket that listens on the port already, for a kind with `EngineSpec.takes_listener`. With ``load_weights`` the
    engine immediately serves the folder's weights, as version 0; otherwise it serves requests only after the first
    weight update. With ``beyond_loopback``, ``host`` may be any address of this machine. ``return_routed_experts`` and
    ``stop_strings`` mean that requests may use these features. ``media_folder`` contains the items that requests name
    by digest; None starts a text-only engine. With ``shard_media`` each rank of the engine encodes a part of a batch's
    images, if the engine supports it. ``shared_gpus`` are the ids of GPUs that the engine shares with the trainer; the
    engine must release their memory on request (`EngineSpec.releases_weights`).
    """

    model_folder: Path
    engine: EngineSettings
    dtype: str
    token_file: Path
    port: int = 0
    listener: int | None = None
    family: str | None = None
    load_weights: bool = False
    host: str = "127.0.0.1"
    beyond_loopback: bool = False
    return_routed_experts: bool = False
    stop_strings: bool = False
    media_folder: Path | None = None
    shard_media: bool = False
    shared_gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineServer:
    """Describes a server, and how a client connects to the server.

    ``token`` is empty if the server needs no token. ``attached`` is True for an external server. ``model_folder`` is
    the folder of the served model. ``media_folder`` contains the media items of prompts. It is None in a text-only run.
    ``weights_folder`` contains the weight versions that the run publishes; processes that send weights to the same
    server coordinate there. ``request_timeout_s`` is the longest pause in seconds within a generate call, and
    ``control_timeout_s`` the longest time of any other call.
    """

    url: str
    token: str
    engine: EngineSettings
    model_folder: Path
    request_timeout_s: float
    control_timeout_s: float
    attached: bool = False
    media_folder: Path | None = None
    weights_folder: Path | None = None


def environment_of_threads(start: EngineStart) -> dict[str, str]:
    """Returns this process's environment with thread counts from ``engine.threads`` and a private compile cache."""
    threads = str(start.engine.threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    given = {**os.environ, **dict.fromkeys(names, threads), **OPENMP_WAITS, "PYTHONUNBUFFERED": "1"}
    set_compile_cache(given)
    return given


def no_problems(config: Any) -> Iterator[str]:
    """Yields no problems, because the engine supports every configuration."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Describes one kind of engine.

    ``name`` and the one-line ``summary`` appear in lists of engine kinds.

    ``command`` and ``environment`` return the command line and the environment of the engine's process. ``client``
    makes the client of a server; None means `relax_core.engines.protocol.engine_client.EngineClient`. ``attach`` waits
    until an external server is ready and then makes the server discard its weights. The arguments of ``attach`` are the
    client, a timeout in seconds and the configuration's section ``rollout``; it raises EngineError with the reason. If
    ``attach`` is None, ``engine.urls`` is not allowed, and no server can join by its address. ``attached_media`` are
    the kinds of media that prompts for external servers may contain.

    ``keys`` lists the keys that this kind reads among engine.python, urls, token_file, mem_fraction, deterministic,
    flags and prefix_cache_tokens; the remaining keys of this list must keep their defaults. ``problems``,
    ``file_problems`` and ``start_problems`` take the whole configuration and yield an error (key, value, fix) for each
    unsupported setting. ``file_problems`` may read files. ``start_problems`` is called right before a start and may run
    interpreters.

    With ``on_gpus`` one engine uses ``engine.tp`` GPUs, if GPUs exist. Otherwise an engine is one process on CPU cores,
    and engine.tp is 1. ``scratch`` means that processes, files or shared memory may remain after a kill of the engine.
    The engine then gets a scratch folder in RELAX_ENGINE_SCRATCH. At its end the owner ends the engine's session and
    removes all files and shared memory with that folder's name. ``transports`` are the supported weight transports
    (engine.weight_transport). ``memory_mib`` is the memory of the process without a model, for the memory plan.
    ``whole_cache`` means that the engine allocates memory for all engine.max_total_tokens at its start. ``media`` has
    the kinds of media that prompts for a multimodal model may contain. ``feature_mib`` is the largest size of the
    engine's cache of vision-tower outputs. ``shards_items`` means that the GPUs of one engine can share the images of a
    batch (`EngineStart.shard_media`). ``releases_weights`` means that the engine can release the GPU memory of its
    weights, which ``mode=colocate`` on GPUs needs.

    ``takes_listener`` means that the process serves from `EngineStart.listener`. The
    owner keeps this socket open during restarts, so no other process can take the port. A process that connects to
    itself before it is ready prints an empty line first, as soon as it accepts connections.
    """

    name: str
    summary: str
    command: Callable[[EngineStart], list[str]]
    environment: Callable[[EngineStart], Mapping[str, str]] = environment_of_threads
    client: Callable[[EngineServer], Any] | None = None
    attach: Callable[[Any, float, Any], None] | None = None
    keys: frozenset[str] = frozenset()
    problems: Callable[[Any], Iterable[str]] = no_problems
    file_problems: Callable[[Any], Iterable[str]] = no_problems
    start_problems: Callable[[Any], Iterable[str]] = no_problems
    on_gpus: bool = False
    scratch: bool = False
    transports: frozenset[str] = frozenset({"shared_memory"})
    memory_mib: int = 256
    whole_cache: bool = False
    media: frozenset[MediaKind] = frozenset()
    attached_media: frozenset[MediaKind] = frozenset()
    feature_mib: int = 0
    shards_items: bool = False
    releases_weights: bool = False
    takes_listener: bool = False
