"""Checks the keys of engines: kind of engine, external servers, and settings that SGLang does not support."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from relax_core.config.error_messages import missing_name
from relax_core.config.modality import media_kinds
from relax_core.config.redaction import is_secret_name, redacted
from relax_core.config.schema import MEDIA_TASKS, EngineConfig, RelaxConfig
from relax_core.contracts.algorithm import Offline, Requirements
from relax_core.contracts.media import MediaKind
from relax_core.registry import PluginError, find_algorithm, find_engine, is_builtin, is_file_plugin, names

_UNSET: dict[str, object] = {
    "python": None,
    "urls": [],
    "token_file": None,
    "mem_fraction": None,
    "deterministic": None,
    "flags": {},
    "prefix_cache_tokens": None,
}


def offline_rows(config: RelaxConfig) -> Offline | None:
    """Returns the kind of data rows that the algorithm trains on without engines, or None for an algorithm of RL."""
    needed: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    return needed.offline


def engine_count(config: RelaxConfig) -> int:
    """Returns the number of engines of the run: engine.count, or 0 for an algorithm without engines."""
    return config.engine.count if offline_rows(config) is None else 0


def engine_name_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem if the kind of engine does not exist or the plug-in's file cannot be loaded."""
    name = config.engine.name
    if not is_file_plugin(name) and name not in names("engine"):
        yield missing_name("engine.name", name, names("engine"))
        return
    try:
        find_engine(name)
    except PluginError as error:
        yield str(error)


def engine_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of engine keys that can be found without reading files."""
    engine = config.engine
    spec = find_engine(engine.name)
    for key, unset in _UNSET.items():
        if key not in spec.keys and (value := getattr(engine, key)) != unset:
            kinds = " or ".join(f"engine={name}" for name in _with_key(key))
            shown = redacted(value, ("engine", key))
            yield f"engine.{key}={shown} is a key of {kinds} only. Drop it, or choose {kinds}."
    for name in filter(is_secret_name, engine.flags):
        yield (
            f"engine.flags.{name}: `ps` shows an engine's command line to every user of the machine. Drop it: engines "
            "that the run starts get a generated key, and engine.token_file is for the key of external engines."
        )
    if not spec.on_gpus and engine.tp != 1:
        yield (
            f"engine.tp={engine.tp}: engine={spec.name} is one process on CPU cores. Use engine.tp=1, engine.count=N."
        )
    yield from spec.problems(config)


def engine_file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem for each missing or invalid file that the engine needs."""
    yield from find_engine(config.engine.name).file_problems(config)


def _with_key(key: str) -> list[str]:
    """Returns the names of the built-in engines that read the key."""
    return [name for name in names("engine") if is_builtin("engine", name) and key in find_engine(name).keys]


# Maps each key that applies only to servers of the run to its default.
_OF_OUR_SERVERS: dict[str, object] = {"python": None, "mem_fraction": None, "flags": {}}


def attached_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of engine.urls and engine.token_file that can be found without reading files."""
    engine = config.engine
    if not engine.urls:
        if engine.token_file is not None and config.gateway.name == "none":
            yield (
                f"engine.token_file={engine.token_file} with gateway=none: it is the key of servers that engine.urls "
                "names, or that join through the gateway. Drop it, or use gateway=local."
            )
        return
    if len(engine.urls) != engine.count:
        yield f"engine.urls names {len(engine.urls)} servers. Use engine.count={len(engine.urls)}."
    for url in engine.urls:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.port is None or parts.path not in ("", "/"):
            yield f"engine.urls: {url} is not an address of a server. Write http://host:port."
    for key, unset in _OF_OUR_SERVERS.items():
        if (value := getattr(engine, key)) != unset:
            yield f"engine.{key}={value} with engine.urls: the run does not start these servers. Drop it."
    teacher = find_algorithm(config.algo.name).requirements(config.algo).teacher
    if teacher is not None and teacher.served_by == "engine":
        yield "engine.urls with algo.served_by=engine: teachers' engines have no addresses. Use algo.served_by=forward."


def media_not_sent(config: RelaxConfig) -> list[MediaKind]:
    """Returns the kinds of media that prompts may have but that the run does not send to external servers."""
    kinds, gets = media_kinds(config), find_engine(config.engine.name).attached_media
    if not gets:
        return list(kinds)
    task = MEDIA_TASKS.get(config.data.task or "")
    asked = {*config.data.media_keys.columns, *(task.kinds if task is not None else ())}
    return [kind for kind in kinds if kind in asked and kind not in gets]


def no_media_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem if prompts have media that the servers of engine.urls cannot read."""
    if config.engine.urls and (media_not_sent(config) or config.data.task in MEDIA_TASKS):
        yield (
            f"engine.urls with media in prompts: a server of engine={config.engine.name} that the run did not start "
            "does not get the media. Drop engine.urls, or use engine=sglang: its servers get images."
        )


def token_file_problems(engine: EngineConfig) -> Iterator[str]:
    """Yields the problems of the file with the servers' API key."""
    if engine.token_file is not None:
        file = Path(engine.token_file)
        if not file.is_file():
            yield f"engine.token_file={file}: no such file."
        elif stat.S_IMODE(file.stat().st_mode) & 0o077:
            yield f"engine.token_file={file}: other users may read it. Run chmod 600 {file}."


MASK_TOKENS = 4096  # SGLang's --sampling-mask-max-tokens; engine.flags may set another value

# Maps each server flag that engine.flags must not set to the key of Relax that sets the flag.
OWN_FLAGS = {
    "model-path": "model.path",
    "model": "model.path",
    "host": "Relax",
    "port": "engine.port",
    "api-key": "nothing: it is the run's token",
    "admin-api-key": "nothing: it is the run's token",
    "dtype": "engine.dtype",
    "tp": "engine.tp",
    "tp-size": "engine.tp",
    "tensor-parallel-size": "engine.tp",
    "mem-fraction-static": "engine.mem_fraction",
    "max-running-requests": "engine.max_running_samples",
    "max-total-tokens": "engine.max_total_tokens",
    "context-length": "engine.context_length",
    "enable-deterministic-inference": "engine.deterministic",
    "enable-return-routed-experts": "algo.routing_replay",
    "weight-version": "nothing: the trainer sets it",
    "load-format": "nothing: weights come from the trainer",
    "custom-weight-loader": "nothing: it belongs to Relax",
    "skip-tokenizer-init": "rollout.stop: the server loads a tokenizer only for stop strings",
    "incremental-streaming-output": "nothing: it is always on",
    "config": "engine.flags itself",
    "dist-init-addr": "nothing: a server stays on one host",
    "nccl-init-addr": "nothing: a server stays on one host",
    "nnodes": "nothing: a server stays on one host",
    "node-rank": "nothing: a server stays on one host",
}


def sglang_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of engine=sglang that can be found without reading a file."""
    engine = config.engine
    if engine.mem_fraction is not None and not 0 < engine.mem_fraction < 1:
        yield f"engine.mem_fraction={engine.mem_fraction}: must be more than 0 and less than 1."
    for name in engine.flags:
        if (flag := _own_flag(name)) is not None:
            yield f"engine.flags.{name}: Relax sets --{flag} itself. Set by: {OWN_FLAGS[flag]}."
    yield from _truncation_problems(config)
    yield from attached_problems(config)
    yield from _media_problems(config)


def _flag(name: str) -> str:
    return name.replace("_", "-").lstrip("-")


def _own_flag(name: str) -> str | None:
    """Returns the flag of `OWN_FLAGS` that the server reads for ``name``; the server accepts every prefix of a flag."""
    flag = _flag(name)
    return flag if flag in OWN_FLAGS else next((own for own in OWN_FLAGS if own.startswith(flag)), None)


def _truncation_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields problems of settings that make SGLang report no kept sets or score a different distribution."""
    engine, rollout = config.engine, config.rollout
    flags = {_flag(name): (name, value) for name, value in engine.flags.items()}
    written, most = flags.get("sampling-mask-max-tokens", ("", MASK_TOKENS))
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        yield f"engine.flags.{written}={most}: must be a whole number of tokens, 1 or more."
        return
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("min_p", rollout.min_p, 0.0)):
        if value != off and rollout.top_k == -1:
            yield (
                f"rollout.{key}={value:g} with engine=sglang: SGLang reports the kept tokens only with a top_k. Add "
                f"rollout.top_k={most // 2}, or use rollout.{key}={off:g}."
            )
    if rollout.min_p > 0.0 and engine.deterministic:
        yield (
            f"rollout.min_p={rollout.min_p:g} with engine.deterministic=true: SGLang cannot draw by seed under min_p, "
            "and would exit. Use engine.deterministic=false, or rollout.min_p=0."
        )
    if rollout.top_k > most:
        yield (
            f"rollout.top_k={rollout.top_k} with engine=sglang: at most {most}. Lower it, or add "
            f"+engine.flags.sampling-mask-max-tokens={rollout.top_k}."
        )
    teacher = find_algorithm(config.algo.name).requirements(config.algo).teacher
    if teacher is None or teacher.served_by != "engine":
        return
    if rollout.truncates or rollout.banned_token_ids:
        yield (
            "rollout.top_p, top_k, min_p or banned_token_ids with algo.served_by=engine and engine=sglang: SGLang "
            "scores over the whole vocabulary only. Use algo.served_by=forward."
        )
    if rollout.temperature != 1.0:
        yield (
            f"rollout.temperature={rollout.temperature:g} with algo.served_by=engine and engine=sglang: SGLang "
            "can score only at temperature 1. Use rollout.temperature=1, or algo.served_by=forward."
        )


def _media_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem for media that external servers do not get."""
    kinds = media_kinds(config)
    for kind, column in config.data.media_keys.columns.items():
        if config.engine.urls and kind != "image" and kind in kinds:
            yield (
                f"data.media_keys.{kind}={column} with engine.urls: a server that the run did not start takes images "
                "only. Drop engine.urls, or drop the key."
            )
    if config.engine.urls and config.data.task in MEDIA_TASKS:
        yield (
            f"data.task={config.data.task} with engine.urls: it has more than images, and a server that the run did "
            "not start takes images only. Drop engine.urls."
        )


def sglang_file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of SGLang's interpreter and of the token file."""
    engine = config.engine
    if engine.python is not None and not os.access(engine.python, os.X_OK):
        yield (
            f"engine.python={engine.python}: no such interpreter. On a CPU run make sglang-cpu, and use "
            "engine.python=.venv-sglang/bin/python."
        )
    yield from token_file_problems(engine)
