"""Describes the embedded engine as a kind of engine: its command line, environment and checks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.engine_checks import attached_problems, no_media_problems, token_file_problems
from relax_core.contracts.child_process import module_command
from relax_core.contracts.engine_kind import EngineSpec, EngineStart, environment_of_threads
from relax_core.engines.embedded.model_config import FEATURE_MIB

if TYPE_CHECKING:
    from relax_core.engines.protocol.engine_client import EngineClient

ROOT = Path(__file__).resolve().parents[3]


def command(launch: EngineStart) -> list[str]:
    """Returns the command line of an engine process."""
    engine = launch.engine
    options = {
        "--model-path": launch.model_folder,
        "--host": launch.host,
        "--port": launch.port,
        "--token-file": launch.token_file,
        "--max-running-samples": engine.max_running_samples,
        "--max-total-tokens": engine.max_total_tokens,
        "--context-length": engine.context_tokens,
        "--prefix-cache-tokens": engine.prefix_cache_tokens or 0,
        "--threads": engine.cpu_threads,
        "--dtype": launch.dtype,
    }
    words = [word for option, value in options.items() for word in (option, str(value))]
    if launch.family is not None:
        words += ["--family", launch.family]
    if launch.media_folder is not None:
        words += ["--media-folder", str(launch.media_folder)]
    if launch.load_weights:
        words.append("--load-weights")
    if launch.listener is not None:
        words += ["--listener", str(launch.listener)]
    if launch.beyond_loopback:
        words.append("--beyond-loopback")
    return module_command("relax_core.engines.embedded", *words)


def environment(launch: EngineStart) -> dict[str, str]:
    """Returns the environment of an engine process.

    The variables set the number of threads before a maths library loads, and make waiting threads sleep, not spin.
    """
    path = os.environ.get("PYTHONPATH")
    return {
        **environment_of_threads(launch),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
    }


def _attach(client: EngineClient, timeout_s: float, rollout: Any) -> None:
    from relax_core.engines.protocol.engine_client import wait_ready

    wait_ready(client, timeout_s=timeout_s)
    client.forget_weights()


def _problems(config: Any) -> Iterator[str]:
    yield from attached_problems(config)
    yield from no_media_problems(config)


SPEC = EngineSpec(
    name="embedded",
    summary="Relax's own CPU engine, one process each.",
    command=command,
    environment=environment,
    attach=_attach,
    problems=_problems,
    file_problems=lambda config: token_file_problems(config.engine),
    transports=frozenset({"shared_memory", "gloo", "disk"}),
    media=frozenset({"image", "video", "audio"}),
    feature_mib=FEATURE_MIB,
    keys=frozenset({"urls", "token_file", "prefix_cache_tokens"}),
    takes_listener=True,
)
