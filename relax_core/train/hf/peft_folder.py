"""Writes, reads and merges LoRA factors in a PEFT folder: adapter_config.json and adapter_model.safetensors.

PEFT names the factors of a module ``base_model.model.MODULE.lora_A.weight`` and ``….lora_B.weight``. Source: PEFT
0.21, `peft/utils/save_and_load.py` and `peft/tuners/lora/config.py` (https://github.com/huggingface/peft).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax_core.families.folder import ADAPTER_FILE, family_key, folder_architecture
from relax_core.train.checkpoints.checkpoint_shards import WEIGHTS, StoredFolder, read_errors_as_valueerror
from relax_core.train.checkpoints.checkpoint_store import atomic_folder
from relax_core.train.checkpoints.provenance import check_same_numbers, model_numbers, read_provenance
from relax_core.train.hf.hf_export import READ_BYTES, SHARD_BYTES, export_hf_folder
from relax_core.weights.folder_stream import open_safetensors, read_safetensors
from relax_core.weights.lora_merge import LoraFactors, factor_names, lora_scale, merged
from relax_core.weights.safetensors_stream import library_layout, write_safetensors

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX, WEIGHT = "base_model.model.", ".weight"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_SCALE_TOLERANCE = 1e-6  # relative; a scale may have been rounded to float32


class AdapterConfig(msgspec.Struct, kw_only=True):
    """Holds the fields of adapter_config.json that Relax reads.

    Unknown fields are ignored: they are for training or for other kinds of adapters.
    """

    peft_type: str
    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    @property
    def scale(self) -> float:
        """Returns the factor of B @ A."""
        return lora_scale(rank=self.r, alpha=self.lora_alpha, rslora=self.use_rslora)


def write_peft(
    target: Path,
    factors: Iterable[LoraFactors],
    *,
    alpha: float,
    rslora: bool,
    base_model: str,
    names: Collection[str],
) -> None:
    """Writes a PEFT folder ``target``, which must be missing or empty; the write is atomic.

    ``factors`` have one rank and the scale of ``alpha``. ``base_model`` is the folder or the hub name of the base
    model, and ``names`` are the names of its weights. Raises ValueError if there are no factors.
    """
    found = list(factors)
    if not found:
        raise ValueError("the model has no LoRA factors. Export it as a whole model, without --adapter.")
    rank = found[0].a.shape[0]
    scale = lora_scale(rank=rank, alpha=alpha, rslora=rslora)
    for factor in found:
        assert factor.a.shape[0] == rank, f"{factor.name} has rank {factor.a.shape[0]}, others have {rank}"
        assert math.isclose(factor.scale, scale, rel_tol=_SCALE_TOLERANCE), f"{factor.name}: scale {factor.scale}"
    tensors = dict(_named(found))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "use_rslora": rslora,
        "target_modules": target_modules([factor.name for factor in found], names=names),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with atomic_folder(target, replace=False) as folder:
        kinds = [(name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in tensors.items()]
        write_safetensors(folder / ADAPTER_WEIGHTS, library_layout(kinds), tensors.items())
        (folder / ADAPTER_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _named(factors: Iterable[LoraFactors]) -> Iterable[tuple[str, Tensor]]:
    for name, a, b, _ in factors:
        yield from zip(factor_names(PREFIX + name), (a, b), strict=True)


def target_modules(adapted: Sequence[str], *, names: Collection[str]) -> list[str]:
    """Returns PEFT's names of the modules with the ``adapted`` weights, sorted.

    PEFT adapts each module whose name ends with an entry. An entry is the last part of the name if all weights in
    ``names`` with this ending are adapted, and the module's whole name otherwise.
    """
    chosen = set(adapted)
    others = {_ending(name) for name in names if name not in chosen}
    return sorted({name.removesuffix(WEIGHT) if _ending(name) in others else _ending(name) for name in adapted})


def _ending(name: str) -> str:
    return name.removesuffix(WEIGHT).rsplit(".", 1)[-1]


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads adapter_config.json; raises ValueError with the field if Relax does not compute such an adapter."""
    path = folder / ADAPTER_FILE
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict)
        config = msgspec.convert({key: value for key, value in fields.items() if value is not None}, AdapterConfig)
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: no {ADAPTER_FILE} there. Give a PEFT folder.") from error
    except msgspec.DecodeError as error:  # A ValidationError is a DecodeError.
        raise ValueError(f"{path}: {error}. Write the folder again with PEFT's save_pretrained.") from error
    if config.peft_type != "LORA":
        raise ValueError(f"{path}: peft_type={config.peft_type}: Relax reads LORA only. Merge the adapter instead.")
    if config.r < 1:
        raise ValueError(f"{path}: r={config.r} must be at least 1.")
    plain = AdapterConfig(peft_type="LORA", r=config.r, lora_alpha=config.lora_alpha)
    for field in (
        "use_dora",
        "fan_in_fan_out",
        "bias",
        "lora_bias",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
    ):
        if (value := getattr(config, field)) != getattr(plain, field) and value != []:
            raise ValueError(f"{path}: {field}={value}: Relax computes plain LoRA only. Merge the adapter instead.")
    return config


def read_peft(folder: Path, *, shapes: Mapping[str, Sequence[int]]) -> list[LoraFactors]:
    """Reads the factors of a PEFT folder, in the order of ``shapes``, the weights' shapes of the base model by name.

    Raises ValueError with the file, the field or the tensor if the folder is incomplete, is not plain LoRA, or is the
    adapter of another base model.
    """
    config = read_adapter_config(folder)
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise ValueError(f"{folder}: no {ADAPTER_WEIGHTS} there. Save the adapter with safe_serialization=True.")
    factors: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                match = _FACTOR.fullmatch(stored.removeprefix(PREFIX))
                if match is None:
                    raise ValueError(f"{path}: {stored} is not a LoRA factor of a linear layer. Merge the adapter.")
                factors.setdefault(match["module"] + WEIGHT, {})[match["side"]] = file.get_tensor(stored)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Write it again.") from error
    base = f"base_model_name_or_path={config.base_model_name_or_path}"
    for name, sides in factors.items():
        fix = f"The adapter's base is {base}: give the folder of this model"
        if name not in shapes:
            raise ValueError(f"{path}: {name} is not a weight of the model. {fix}.")
        if sides.keys() != {"A", "B"}:
            raise ValueError(f"{path}: {name} has only lora_{min(sides)}. Write the adapter again.")
        found = [tuple(sides[side].shape) for side in "AB"]
        expected = [(config.r, shapes[name][-1]), (shapes[name][0], config.r)]
        if len(shapes[name]) != 2 or found != expected:
            raise ValueError(
                f"{path}: {name} has factors of the shapes {found[0]} and {found[1]}; r={config.r} and the model's "
                f"shape {tuple(shapes[name])} require {expected[0]} and {expected[1]}. {fix}."
            )
    if not factors:
        raise ValueError(f"{path}: it has no factors. Write the adapter again.")
    return [
        LoraFactors(name, factors[name]["A"], factors[name]["B"], config.scale) for name in shapes if name in factors
    ]


def merge_peft(
    folder: Path, target: Path, *, base: Path | None = None, dtype: str | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a Hugging Face folder ``target`` with the base model's weights and the adapter of a PEFT folder merged.

    ``base`` is the folder of the base model, by default the folder that adapter_config.json names. ``dtype`` is as in
    `export_hf_folder`; the sums are computed in float32 and rounded once. One tensor is in memory at a
    time, besides the factors. Raises ValueError as `read_peft` does, and if the base model's folder does not exist.
    """
    named = read_adapter_config(folder).base_model_name_or_path
    source = base if base is not None else Path(named or "")
    if base is None and (named is None or not source.is_dir()):
        raise ValueError(
            f"{folder / ADAPTER_FILE}: base_model_name_or_path={named} is not a folder. Give the base model's folder: "
            "--model FOLDER."
        )
    shapes = {name: tensor.shape for name, tensor in open_safetensors(source)}
    _write_merged(source, read_peft(folder, shapes=shapes), target, dtype=dtype, shard_bytes=shard_bytes)


def export_lora_checkpoint(
    checkpoint: Path,
    target: Path,
    *,
    base: Path,
    adapter: bool,
    family: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a LoRA checkpoint as a PEFT folder if ``adapter`` is True, otherwise like `merge_peft`.

    ``checkpoint`` is the folder of one model in a checkpoint; its provenance has ``lora``. ``base`` is the folder of
    the base model, ``family`` as in `export_checkpoint`. Raises ValueError if the checkpoint is corrupt or of another
    model than ``base``.
    """
    provenance = read_provenance(checkpoint)
    assert provenance.lora is not None, f"{checkpoint} has no adapters"
    named = family_key(provenance.family, also=family) or provenance.family
    check_same_numbers(provenance.model, model_numbers(folder_architecture(base, family=named)), folder=checkpoint)
    lora = provenance.lora
    factors = _checkpoint_factors(checkpoint, scale=lora.scale)
    if not adapter:
        _write_merged(base, factors, target, dtype=dtype, shard_bytes=shard_bytes)
        return
    if dtype is not None:
        kind = getattr(torch, dtype)
        factors = [factor._replace(a=factor.a.to(kind), b=factor.b.to(kind)) for factor in factors]
    names = [name for name, _ in open_safetensors(base)]
    write_peft(target, factors, alpha=lora.alpha, rslora=lora.rslora, base_model=str(base.absolute()), names=names)


def _checkpoint_factors(checkpoint: Path, *, scale: float) -> list[LoraFactors]:
    sides: dict[str, dict[str, Tensor]] = {}
    with read_errors_as_valueerror(checkpoint):
        stored = StoredFolder(checkpoint)
        names = [name for name in stored.tensors() if name.startswith(WEIGHTS)]
        for name, tensor in stored.read(names, bucket_bytes=READ_BYTES):
            match = _FACTOR.fullmatch(name.removeprefix(WEIGHTS))
            assert match is not None, f"{checkpoint}: {name} is not a factor"
            sides.setdefault(match["module"] + WEIGHT, {})[match["side"]] = tensor
    return [LoraFactors(name, found["A"], found["B"], scale) for name, found in sorted(sides.items())]


def _write_merged(
    source: Path, adapted: Iterable[LoraFactors], target: Path, *, dtype: str | None, shard_bytes: int
) -> None:
    shapes = {name: tensor.shape for name, tensor in open_safetensors(source)}
    factors = {factor.name: factor for factor in adapted}
    if unknown := sorted(factors.keys() - shapes.keys()):
        raise ValueError(f"{source} has no weight {unknown[0]}, which has LoRA factors. Give the base model's folder.")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_safetensors(source):
            if name in factors:
                _, a, b, scale = factors[name]
                tensor = merged(tensor.float(), a, b, scale)  # the export rounds the sum
            yield name, tensor
            del tensor  # This frees the tensor before the next tensor is read.

    export_hf_folder(
        tensors(),
        shapes=shapes,
        own_dtype="float32",
        dtype=dtype,
        source_folder=source,
        target=target,
        shard_bytes=shard_bytes,
        replace=False,
    )
