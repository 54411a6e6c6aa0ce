"""Makes the builtin tiny models and stores them in the user's cache. With them a laptop can run the whole system.

A text model is a Qwen3 of a few layers with a character-level tokenizer, after a short supervised warm start
(`relax_core.tools.tiny_text`). Each model has at most a few hundred thousand parameters, and learns a generated task
with GRPO in half a minute. The teacher model for distillation has taken more supervised steps than the student. The
mixture of experts is a Qwen3-MoE with twice the parameters; each token uses a third of them. The vision models are
Qwen3-VL and Qwen3.5, and the model with vision and audio is Qwen3-Omni (`relax_core.tools.tiny_media`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import subprocess
from dataclasses import asdict
from functools import partial
from pathlib import Path

from relax_core.contracts.child_process import cause_in, import_path, module_command
from relax_core.contracts.output_path import check_output_folder
from relax_core.contracts.private_folder import folder_made_once, user_cache
from relax_core.families.tiny_configs import MODEL_NAMES, OMNI, STUDENT, VISION_NAMES
from relax_core.tools.tiny_text import WARM_STARTS, write_text_model

RECIPE_VERSION = 2  # raise this number when a change of a recipe changes the models
_LIBRARIES = ("torch", "transformers", "tokenizers")
_MAKE_DEADLINE_S = 600.0


def make_tiny_model(folder: Path, *, task: str, name: str = STUDENT) -> None:
    """Writes model and tokenizer as a Hugging Face folder. With one torch thread, the result is reproducible."""
    check_tiny_model(name, task=task)
    import torch

    torch.set_num_threads(1)
    if name in VISION_NAMES:
        from relax_core.tools.tiny_media import write_vision_model

        write_vision_model(folder, name=name, task=task)
    elif name == OMNI:
        from relax_core.tools.tiny_media import write_omni_model

        write_omni_model(folder, task=task)
    else:
        write_text_model(folder, name=name, task=task)


def check_tiny_model(name: str, *, task: str) -> None:
    """Raises ValueError if the model is unknown or has no warm start for the task."""
    if name not in MODEL_NAMES:
        raise ValueError(f"model.builtin={name!r}: no such builtin model. Use one of: {', '.join(MODEL_NAMES)}.")
    tasks = [warm_start for model, warm_start in WARM_STARTS if model == name]
    if task not in tasks:
        raise ValueError(f"model.task={task}: {name} has no warm start for it. What exists: {', '.join(tasks)}.")


def default_cache_root() -> Path:
    """Returns ``$XDG_CACHE_HOME/relax/models``, by default below ``~/.cache``."""
    return user_cache("models")


def tiny_model_folder(name: str, *, task: str, cache_root: Path | None = None) -> Path:
    """Returns the folder of a builtin model. On first use, a separate process makes the model in about ten seconds.

    Concurrent calls from other processes wait for the first call. Raises ValueError for an unknown name or task.
    """
    check_tiny_model(name, task=task)
    root = cache_root or default_cache_root()
    folder = root / f"{name}-{task}-{_cache_key(name, task)}"
    make = partial(_make_in_subprocess, name=name, task=task)
    return folder_made_once(folder, make, deadline_s=_MAKE_DEADLINE_S, makes="the tiny model")


def _cache_key(name: str, task: str) -> str:
    parts = [str(RECIPE_VERSION), str(asdict(WARM_STARTS[name, task]))]
    parts += [f"{library}={importlib.metadata.version(library)}" for library in _LIBRARIES]
    return hashlib.blake2b("/".join(parts).encode(), digest_size=6).hexdigest()


def _make_in_subprocess(folder: Path, *, name: str, task: str) -> None:
    done = subprocess.run(
        module_command("relax_core.tools.make_tiny", f"--name={name}", f"--task={task}", f"--into={folder}"),
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONPATH": import_path(),
        },
        capture_output=True,
        text=True,
        timeout=_MAKE_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        why = f"{cause_in(done.stderr)}\n{done.stderr[-2000:]}"
        raise RuntimeError(f"making the tiny model failed with exit code {done.returncode}: {why}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the builtin tiny model and print its folder.")
    parser.add_argument("--name", default=STUDENT, choices=MODEL_NAMES, help="which of them")
    tasks = sorted({task for _, task in WARM_STARTS})
    parser.add_argument("--task", required=True, choices=tasks, help="generated task of the warm start")
    parser.add_argument("--cache-root", type=Path, default=None, help="default: the user's cache folder")
    parser.add_argument("--into", type=Path, default=None, help="write into this new or empty folder, not the cache")
    arguments = parser.parse_args()
    if arguments.into is not None:
        try:
            check_output_folder(arguments.into, option="--into")
        except ValueError as error:
            parser.error(str(error))
        make_tiny_model(arguments.into, task=arguments.task, name=arguments.name)
        print(arguments.into)
    else:
        print(tiny_model_folder(arguments.name, task=arguments.task, cache_root=arguments.cache_root))


if __name__ == "__main__":
    main()
