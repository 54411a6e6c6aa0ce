"""Builds the command line and the environment that start an embedded engine."""

from __future__ import annotations

import os
from pathlib import Path

from relax_core.contracts.engine_kind import EngineStart, environment_of_threads
from relax_core.contracts.host.python_child import module_command

ROOT = Path(__file__).resolve().parents[3]
FEATURE_MIB = 256  # what the engine keeps at most of what its towers computed


def command(launch: EngineStart) -> list[str]:
    """Returns the command line of an engine process."""
    engine = launch.engine
    options = {
        "--model-path": launch.model_folder,
        "--host": engine.host,
        "--port": launch.port,
        "--token-file": launch.token_file,
        "--max-running-samples": engine.max_running_samples,
        "--max-total-tokens": engine.max_total_tokens,
        "--context-length": engine.context_tokens,
        "--prefix-cache-tokens": engine.prefix_cache_tokens or 0,
        "--threads": engine.threads,
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

    It sets the number of threads before any maths library loads, and lets waiting threads sleep instead of spin.
    """
    path = os.environ.get("PYTHONPATH")
    return {
        **environment_of_threads(launch),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
    }
