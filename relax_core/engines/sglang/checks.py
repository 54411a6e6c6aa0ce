"""Checks whether this machine can start SGLang's servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from relax_core.config.errors import NotYet
from relax_core.config.schema import RelaxConfig
from relax_core.engines.sglang.version import version_problem

PYTHON_S = 60.0  # An interpreter says within this which SGLang it has.


def version_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for an interpreter without SGLang, or with one that is not supported."""
    engine = config.engine
    if engine.urls or (engine.python is not None and not os.access(engine.python, os.X_OK)):
        return  # Nothing is started, or the check of files has said so.
    python = engine.python or sys.executable
    ask = "from importlib.metadata import version; print(version('sglang'))"
    found = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, timeout=PYTHON_S, check=False)
    if found.returncode != 0:
        yield NotYet(
            f"engine=sglang: {python} has no SGLang. On a machine with GPUs: pip install '.[gpu]'. On a CPU: "
            "make sglang-cpu, and engine.python=.venv-sglang/bin/python."
        )
    elif (problem := version_problem(found.stdout.strip())) is not None:
        yield f"engine.python={python}: {problem}"
