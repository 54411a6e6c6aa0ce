"""Builds the command line and the environment that start an embedded engine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.engines.engine_process import EngineLaunch

ROOT = Path(__file__).resolve().parents[3]


def command(launch: EngineLaunch) -> list[str]:
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
        "--threads": engine.threads,
        "--dtype": launch.dtype,
    }
    words = [word for option, value in options.items() for word in (option, str(value))]
    if launch.load_weights:
        words.append("--load-weights")
    if launch.beyond_loopback:
        words.append("--beyond-loopback")
    return [sys.executable, "-m", "relax_core.engines.embedded", *words]


def environment(launch: EngineLaunch) -> dict[str, str]:
    """Returns the environment of an engine process.

    It sets the number of threads before any maths library loads, and lets waiting threads sleep instead of spin.
    """
    threads = str(launch.engine.threads)
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
    }
