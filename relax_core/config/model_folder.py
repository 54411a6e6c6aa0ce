"""What a model folder must hold before anything is started. Reads config.json and names of files, no weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_core.config.errors import NotYet
from relax_core.config.schema import RelaxConfig
from relax_core.families.table import FAMILIES

DTYPES = ("float32", "bfloat16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ValueError for one that is not a JSON object."""
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if isinstance(values, dict):
        return values
    raise ValueError(f"{file} is not a JSON object.")


def model_problems(config: RelaxConfig) -> Iterator[str]:
    """One sentence for everything about the model that cannot work."""
    model = config.model
    if model.dtype not in DTYPES:
        yield f"model.dtype={model.dtype}: expected one of {', '.join(DTYPES)}."
    if config.engine.dtype not in (None, *DTYPES):
        yield f"engine.dtype={config.engine.dtype}: expected null (model.dtype), or one of {', '.join(DTYPES)}."
    if model.path is not None and model.builtin is not None:
        yield f"model.path={model.path} with model={model.name}, which is built in. Choose {_option(Path(model.path))}."
    elif model.path is not None:
        yield from folder_problems(config, Path(model.path), key="model.path")
    elif model.builtin is None:
        yield NotYet(f"model.path is not set: model={model.name} needs model.path=<a Hugging Face folder>.")
    elif model.task is None:
        yield f"model.task is not set: model={model.name} needs to know its warm start, e.g. model.task=arithmetic."


def _option(folder: Path) -> str:
    """The option of the group ``model`` that fits a folder, or all that take one."""
    try:
        family = read_model_config(folder).get("model_type")
    except (OSError, ValueError):
        family = None
    return f"model={family}" if family in FAMILIES else ", ".join(f"model={name}" for name in FAMILIES)


def folder_problems(config: RelaxConfig, folder: Path, *, key: str) -> Iterator[str]:
    """What a Hugging Face folder lacks; ``key``: where the configuration names it."""
    key = f"{key}={folder}"
    if not folder.exists():
        yield f"{key}: no such folder."
        return
    if not (folder / "config.json").is_file():
        what = "the folder has no config.json" if folder.is_dir() else "not a folder"
        yield f"{key}: {what}. Give a Hugging Face model folder."
        return
    try:
        values = read_model_config(folder)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if not any(folder.glob("*.safetensors")):
        yield f"{key}: no *.safetensors in it. Weights are read from safetensors only."
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{key}: no tokenizer in it ({_TOKENIZER_FILES[0]})."
    longest = values.get("max_position_embeddings")
    context = config.engine.context_length
    if isinstance(longest, int) and context is not None and context > longest:
        yield (
            f"engine.context_length={context} is more than the model's {longest} positions. "
            f"Use engine.context_length={longest} or less ({key})."
        )
