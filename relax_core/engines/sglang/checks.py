"""Checks whether SGLang can serve the model, and whether this machine can start its servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from relax_core.config.engine_checks import sglang_file_problems
from relax_core.config.errors import NotYet
from relax_core.config.model_checks import family_of_run
from relax_core.config.schema import RelaxConfig
from relax_core.engines.sglang.version import version_problem

PYTHON_S = 60.0  # An interpreter says within this which SGLang it has.


VISION_FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe")  # those for which Relax has a processor inside SGLang


def file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields files that cannot be used, and a model that SGLang cannot serve, wherever the run starts."""
    yield from sglang_file_problems(config)
    yield from vision_problems(config)


def vision_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for a model with a vision tower that Relax cannot serve with SGLang, whatever it trains on.

    A family that cannot be found yields none, because the checks of the model report it.
    """
    family = family_of_run(config)
    if family is not None and family.delta_net is not None:
        yield NotYet(
            f"model.family={family.name} with engine=sglang: SGLang's model of this family needs operators that its "
            "CPU build lacks, and Relax has no processor for it. Use engine=embedded."
        )
    elif family is not None and family.vision is not None and family.name not in VISION_FAMILIES:
        yield (
            f"model.family={family.name} with engine=sglang: of the models that see it serves "
            f"{', '.join(VISION_FAMILIES)} only. Use engine=embedded."
        )


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
