"""Checks a model folder and `model.freeze` before the start, finds banned tokens and determines the model's dtype.

This module reads JSON files and file names, but no weights.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from relax_core.config.choices import AUDIO, LANGUAGE, MODEL_PARTS, PROJECTOR, ROUTER, TEXT, VISION, LauncherKind
from relax_core.config.errors import NotYet
from relax_core.config.hydra_overrides import is_hub_name, model_override_hint
from relax_core.config.schema import DtypeByMachine, RelaxConfig
from relax_core.contracts.family import Family, HfConfig
from relax_core.contracts.untrusted_files import read_regular
from relax_core.contracts.untrusted_values import decode_json
from relax_core.families.folder import ADAPTER_FILE, WEIGHT_INDEX, WHOLE_WEIGHTS, family_key, weight_files
from relax_core.families.hf_config import has_hf_config, language_values, read_hf_config
from relax_core.families.tiny_configs import MODEL_NAMES, tiny_config
from relax_core.registry import find_family, is_builtin, names

MAX_TOKENIZER_BYTES = 256 << 20
DTYPES = ("float32", "bfloat16")
AUTO = "auto"  # a value of model.dtype; `settle_dtype` replaces it by one of DTYPES
CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}  # flags in /proc/cpuinfo; the last flag is for ARM
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
_MEDIA_TOKEN = re.compile(r"<\|?_?(vision|image|video|audio)[a-z_]*\|?>", re.IGNORECASE)
_OMNI_KEY = "thinker_config"
_MEDIA_CONFIG_KEY = re.compile(r"(vision|image|video|audio)\w*_token_(id|index)")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct, frozen=True):
    """Holds a tokenizer's vocabulary: a mapping from texts to ids, or a list of texts in the order of their ids."""

    vocab: dict[str, int] | list[Any] = {}


class _TokenizerFile(msgspec.Struct):
    """Holds the parts of tokenizer.json that Relax reads; the whole file may have 10 MB."""

    added_tokens: list[_AddedToken] = []
    model: _Vocabulary = _Vocabulary()


def media_token_ids(folder: Path) -> list[int]:
    """Returns the sorted placeholder ids of images, audio and video, which are never sampled.

    Raises ValueError for a file with unexpected content, and OSError for a file that cannot be read.
    """
    return _media_ids(folder, _tokenizer_file(folder))


def unsampled_token_ids(folder: Path) -> list[int]:
    """Returns the sorted ids that are never sampled by default: media placeholders, and ids without a text.

    Raises as `media_token_ids` does.
    """
    tokenizer = _tokenizer_file(folder)
    return sorted({*_media_ids(folder, tokenizer), *_textless_ids(folder, tokenizer)})


def textless_token_ids(folder: Path) -> set[int]:
    """Returns the ids without a text: ids below vocab_size (config.json) that are not in the tokenizer.

    Media placeholders are excluded. Raises as `media_token_ids` does.
    """
    tokenizer = _tokenizer_file(folder)
    return _textless_ids(folder, tokenizer).difference(_media_ids(folder, tokenizer))


def _textless_ids(folder: Path, tokenizer: _TokenizerFile) -> set[int]:
    rows, vocabulary = language_values(read_hf_config(folder)).get("vocab_size"), tokenizer.model.vocab
    if not vocabulary or not isinstance(rows, int):  # another check refuses such a folder
        return set()
    known = set(range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values())
    known.update(token.id for token in tokenizer.added_tokens)
    return set(range(rows)) - known


def _tokenizer_file(folder: Path) -> _TokenizerFile:
    file = folder / "tokenizer.json"
    try:
        return decode_json(read_regular(file, max_bytes=MAX_TOKENIZER_BYTES), _TokenizerFile)
    except ValueError as error:
        raise ValueError(f"{file} is not a valid tokenizer file: {error}.") from error


def _media_ids(folder: Path, tokenizer: _TokenizerFile) -> list[int]:
    found = {token.id for token in tokenizer.added_tokens if _MEDIA_TOKEN.fullmatch(token.content)}
    return sorted(found | _media_ids_of(read_hf_config(folder)))


def _media_ids_of(hf_config: HfConfig) -> set[int]:
    """Returns the media ids in a config.json; in an Omni model they are in the thinker's section."""
    parts = [hf_config, hf_config.get(_OMNI_KEY) or {}]
    return {
        value for part in parts for key, value in part.items() if _MEDIA_CONFIG_KEY.fullmatch(key) and value is not None
    }


def family_of_run(config: RelaxConfig) -> Family | None:
    """Returns the family of the run's model, or None for an unknown family, which the model check reports.

    Without model.family, the folder's model_type determines the family.
    """
    key, path = config.model.family, config.model.path
    try:
        if key is None and path is not None:
            key = family_key(read_hf_config(Path(path)).get("model_type"))
        return None if key is None else find_family(key)
    except (ValueError, OSError):
        return None


def set_banned_tokens(config: RelaxConfig) -> None:
    """Sets rollout.banned_token_ids to `unsampled_token_ids` of the model's folder, unless the user set the key.

    The value stays null if the folder cannot be read on this machine.
    """
    model, rollout = config.model, config.rollout
    if rollout.banned_token_ids is not None:
        rollout.banned_token_ids = sorted(set(rollout.banned_token_ids))
    elif model.path is None:
        known = model.builtin in MODEL_NAMES
        rollout.banned_token_ids = sorted(_media_ids_of(tiny_config(str(model.builtin)))) if known else []
    else:
        with suppress(ValueError, OSError):  # the folder's check reports problems
            rollout.banned_token_ids = unsampled_token_ids(Path(model.path))


def settle_dtype(config: RelaxConfig) -> RelaxConfig:
    """Replaces ``model.dtype=auto`` in the configuration by the dtype for the run's machines.

    A job on the CPUs of another cluster determines the dtype on that cluster.
    """
    gpus = config.placement.gpus_per_node > 0
    if config.model.dtype != AUTO or (config.launcher.name is LauncherKind.ray_job and not gpus):
        return config
    dtype = fast_dtype(gpus=gpus, cpuinfo=CPUINFO.read_text(encoding="utf-8", errors="replace"))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=DtypeByMachine(dtype)))


def fast_dtype(*, gpus: bool, cpuinfo: str) -> str:
    """Returns "bfloat16" for GPUs and for CPUs with bfloat16 instructions, otherwise "float32".

    ``cpuinfo`` is the text of /proc/cpuinfo. On a CPU without these instructions bfloat16 is slower than float32.
    """
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = {flag for name, _, rest in lines if name.strip() in ("flags", "Features") for flag in rest.split()}
    return "bfloat16" if gpus or flags & _BFLOAT16_FLAGS else "float32"


def model_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of the model settings."""
    model = config.model
    if model.dtype not in (*DTYPES, AUTO):
        yield f"model.dtype={model.dtype}: expected one of {', '.join((*DTYPES, AUTO))}."
    if config.engine.dtype not in (None, *DTYPES):
        yield f"engine.dtype={config.engine.dtype}: expected null (model.dtype), or one of {', '.join(DTYPES)}."
    if model.path is not None and model.builtin is not None:
        yield f"model.path={model.path} with model={model.name}, which is built in. Choose {_option(Path(model.path))}."
    elif model.path is not None:
        yield from folder_problems(config, Path(model.path), key="model.path")
    elif model.builtin is None:
        yield NotYet(f"model.path is not set: model={model.name} needs model.path=<a Hugging Face folder>.")
    elif model.task is None:
        data = config.data
        rows = " data=file also needs data.path=FILE." if data.name == "file" and not (data.path or data.paths) else ""
        yield (
            f"model.task is not set: model={model.name} needs the task of its warm start, e.g. model.task=arithmetic. "
            f"For your own model: model=qwen3 model.path=FOLDER.{rows}"
        )


def _option(folder: Path) -> str:
    """Returns the option of the group ``model`` for a folder's family, or all options for folders."""
    try:
        family = read_hf_config(folder).get("model_type")
    except ValueError:
        family = None
    families = {name: find_family(name).model_option for name in names("family") if is_builtin("family", name)}
    return (
        f"model={families[family]}"
        if family in families
        else ", ".join(f"model={known_family}" for known_family in families.values())
    )


def folder_problems(config: RelaxConfig, folder: Path, *, key: str) -> Iterator[str]:
    """Yields the problems of a Hugging Face folder for a run; ``key`` is the configuration key with the path."""
    problems = list(file_problems(folder, key=key))
    yield from problems
    longest = None if problems else language_values(read_hf_config(folder)).get("max_position_embeddings")
    context = config.engine.context_length
    if isinstance(longest, int) and context is not None and context > longest:
        yield (
            f"engine.context_length={context} is more than the model's {longest} positions. "
            f"Use engine.context_length={longest} or less ({key}={folder})."
        )


def file_problems(folder: Path, *, key: str) -> Iterator[str]:
    """Yields a problem for each missing or unsuitable file of a Hugging Face folder.

    ``key`` is the configuration key with the path.
    """
    key = f"{key}={folder}"
    if not folder.exists():
        typed = os.path.relpath(folder)
        yield f"{key}: no such folder." + (
            f" To use a model of the hub: {model_override_hint(typed)}." if is_hub_name(typed) else ""
        )
        return
    if not has_hf_config(folder):
        what = "the folder has no config.json" if folder.is_dir() else "not a folder"
        adapter = (
            f" It has {ADAPTER_FILE}: merge the adapter into its model first: relax export {folder} OUT."
            if (folder / ADAPTER_FILE).exists()
            else ""
        )
        yield f"{key}: {what}. Give a Hugging Face model folder.{adapter}"
        return
    try:
        read_hf_config(folder)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if not any(folder.glob("*.safetensors")):
        yield f"{key}: it has no *.safetensors file. Relax reads weights only from safetensors."
    if (folder / ADAPTER_FILE).exists():
        yield (
            f"{key}: it has {ADAPTER_FILE}. transformers adds this adapter to the weights, but Relax does not. Merge "
            f"it into the weights (relax export {folder} OUT), or remove its files."
        )
    with suppress(ValueError):  # the weight check reports an index that cannot be read
        if (whole := folder / WHOLE_WEIGHTS).exists() and whole not in (named := weight_files(folder)):
            yield (
                f"{key}: it has two sets of weights, {whole.name}, which transformers reads, and {len(named)} files "
                f"that {WEIGHT_INDEX} names. Remove the set that does not belong to the model. The index belongs to "
                "the second set."
            )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{key}: it has no tokenizer ({_TOKENIZER_FILES[0]})."


def frozen_parts(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the frozen parts of the model, in the order of `MODEL_PARTS`.

    A run on text also freezes the towers and the projector, because no prompt uses them.
    """
    parts = _model_parts(config)
    frozen = set(config.model.freeze)
    if config.modality.name == TEXT:
        frozen |= {VISION, AUDIO, PROJECTOR} & set(parts)
    return tuple(part for part in MODEL_PARTS if part in frozen)


def untrained_parts(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the parts of the model that have no gradients: `frozen_parts`, or all parts with LoRA."""
    return MODEL_PARTS if config.model.lora.rank else frozen_parts(config)


def freeze_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of model.freeze and optimizer.tower_lr."""
    asked, parts, name = config.model.freeze, _model_parts(config), config.model.name
    written = f"model.freeze=[{','.join(asked)}]"
    for part in dict.fromkeys(asked):
        if part not in MODEL_PARTS:
            yield f"{written}: {part} is not a part of a model. What exists: {', '.join(MODEL_PARTS)}."
        elif parts and part not in parts:
            left = ",".join(other_part for other_part in asked if other_part != part)
            yield f"{written}: model={name} has no {part}; it has {', '.join(parts)}. Use model.freeze=[{left}]."
    frozen = frozen_parts(config)
    if parts and set(parts) <= set(frozen):
        also = f" with modality={TEXT}" if set(frozen) - set(asked) else ""
        yield f"{written}{also}: nothing of model={name} would train. Take one of {', '.join(asked)} out of the list."
    rate = config.optimizer.tower_lr
    towers = {VISION, AUDIO} & set(parts)
    if rate is not None and parts and towers <= set(frozen):
        message = "the vision tower" if AUDIO not in towers else "the towers"
        why = f"modality={TEXT} does not train {message}"
        if not towers:
            why = f"model={name} has no vision tower"
        elif towers <= set(asked):
            why = f"{written} freezes {message}"
        yield f"optimizer.tower_lr={rate:g}: {why}. Use optimizer.tower_lr=null."


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of model.lora."""
    lora, model = config.model.lora, config.model
    if lora.rank <= 0:
        return
    if not lora.targets:
        yield f"model.lora.targets=[]: nothing would train. Use some of {', '.join(LORA_TARGETS)}."
    for target in lora.targets:
        if target not in LORA_TARGETS:
            yield f"model.lora.targets: {target} is not a layer with factors. Use some of {', '.join(LORA_TARGETS)}."
    if model.freeze:
        written = f"model.freeze=[{','.join(model.freeze)}]"
        yield f"{written} with model.lora.rank={lora.rank}: LoRA freezes the whole model. Drop model.freeze."
    if model.moe_aux_loss_coef:
        yield (
            f"model.moe_aux_loss_coef={model.moe_aux_loss_coef:g} with model.lora.rank={lora.rank}: the routers are "
            "frozen, so the loss would train nothing. Use 0."
        )


def _model_parts(config: RelaxConfig) -> tuple[str, ...]:
    """Returns the parts of the family's models; empty for an unknown family, which the model check reports."""
    family = family_of_run(config)
    if family is None:
        return ()
    has = {
        VISION: family.vision,
        AUDIO: family.audio,
        PROJECTOR: family.vision or family.audio,
        LANGUAGE: True,
        ROUTER: family.experts,
    }
    return tuple(part for part in MODEL_PARTS if has[part])
