"""Defines a kind of engine: how its server is started or attached to, its client, and what it cannot do.

An engine is a server with SGLang's HTTP protocol; `relax_core.engines.protocol.engine_client.EngineClient` is the
client's side of it. A server that a run starts is a child process: when it answers it prints one line of JSON to
stdout, ``{"url": …, "pid": …, "port": …}``, and it ends when its stdin closes, so it never outlives its owner. On
each connection it proves that it knows the run's token (`relax_core.engines.protocol.server_proof`), because clients
send the token after that only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_core.contracts.child import OPENMP_WAITS
from relax_core.contracts.media import MediaKind
from relax_core.contracts.private_folder import set_compile_cache


class EngineSettings(Protocol):
    """Holds the keys ``engine.*`` of the configuration that a kind of engine needs.

    ``context_tokens`` is the largest number of prompt and response tokens of one sample. ``flags`` are interpreted by
    the engine alone. ``prefix_cache_tokens`` is None for an engine that has no such key.
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
    """Holds what one engine process is started with (`relax_core.engines.engine_process.EngineLaunch`).

    ``family`` is model.family of the run: a name, a file, or None. ``dtype`` is "float32" or "bfloat16". ``token_file``
    holds the bearer token that every call needs. ``port`` 0 takes a free port. ``listener`` is the descriptor of a
    socket that listens on it already, for a kind with `EngineSpec.takes_listener`. With ``load_weights`` the engine
    serves the folder's own weights at once, as version 0; without it, nothing is served until the first update. With
    ``beyond_loopback``, ``host`` may be any address of this machine. ``return_routed_experts`` and
    ``stop_strings`` say that requests may ask for these features. ``media_folder`` holds the items that
    requests name by their digests; None starts an engine that takes text only. With ``shard_media`` the ranks of an
    engine share the images of a batch, if it can, as the trainer's ranks do.
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


@dataclass(frozen=True, kw_only=True)
class EngineServer:
    """Is a server and how a client reaches it.

    ``token`` is empty if the server asks for none. ``attached`` says that somebody else started the server.
    ``model_folder`` is the folder of the served model.
    ``media_folder`` holds the items of prompts, None if there are none. ``weights_folder`` holds the versions that the
    run publishes; senders to one server find each other there.
    ``request_timeout_s`` is the longest pause in seconds within a generate call, and ``control_timeout_s`` the longest
    time of any other call.
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
    """Returns this process's environment with ``engine.threads`` for every maths library, and a private code cache."""
    threads = str(start.engine.threads)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    given = {**os.environ, **dict.fromkeys(names, threads), **OPENMP_WAITS, "PYTHONUNBUFFERED": "1"}
    set_compile_cache(given)
    return given


def no_problems(config: Any) -> Iterator[str]:
    """Yields nothing: everything that the configuration can say is computed."""
    return iter(())


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Is the record of one kind of engine.

    ``name`` and ``summary``, one line, are listed.

    ``command`` and ``environment`` are the words and the environment that its process is started with. ``client`` makes
    the client of a server; None takes `relax_core.engines.protocol.engine_client.EngineClient`. ``attach`` waits until
    a running server can serve, then makes it forget its weights; its arguments are the client, the seconds that it may
    take and the configuration's section ``rollout``. It raises EngineError with the reason. If it is None,
    ``engine.urls`` cannot be given, and no server joins by its address. ``attached_media`` are the kinds of media that
    prompts for such servers may hold.

    ``keys`` are those of engine.python, urls, token_file, mem_fraction, deterministic, flags and prefix_cache_tokens
    that it reads; the others must keep their defaults. ``problems`` and ``file_problems`` take the whole configuration
    and yield a sentence for everything that the engine cannot do (key, value, fix); the second may read files.
    ``start_problems`` does this right before a start, and may ask interpreters.

    With ``on_gpus`` one engine takes ``engine.tp`` GPUs if there are GPUs; otherwise it is one process on CPU cores and
    engine.tp is 1. ``scratch`` says that a killed process leaves processes, files or shared memory behind: it gets a
    folder that RELAX_ENGINE_SCRATCH names, and its owner removes what has that folder's name, and ends its session.
    ``transports`` are the ways in which new weights may reach it (engine.weight_transport). ``memory_mib`` is the
    memory of the process before it has a model, for the memory plan. ``whole_cache`` says that it allocates memory for
    all engine.max_total_tokens at its start. ``media`` has the kinds of media that prompts may hold if the model sees,
    and ``feature_mib`` is the most memory for what its vision tower computed, which it keeps for later requests.
    ``deals_items`` says that the GPUs of one engine can share the images of a batch (`EngineStart.shard_media`).
    ``takes_listener`` says that the process serves from `EngineStart.listener`, which its owner keeps open while the
    process is started again, so that nobody else can take the port. A process that connects to itself before it is
    ready prints an empty line first, once it accepts connections.
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
    deals_items: bool = False
    takes_listener: bool = False
