"""Fixtures that make files for configurations."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.engine import TensorSpec
from relax_core.families.folder import folder_architecture
from relax_core.families.tiny_configs import VISION_NAMES, processor_files, tiny_config
from relax_core.tools.tiny_text import write_prompt_tokenizer
from relax_core.train.hf.stored_weights import stored_weights
from relax_core.weights.safetensors_stream import header_bytes

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Makes a Hugging Face folder with the files that Relax checks: config.json, the weights' header, a tokenizer."""
    return write_folder(tmp_path / "model", SHAPE | {"model_type": "qwen3"})


@pytest.fixture
def other_families(tmp_path: Path) -> dict[str, Path]:
    """Makes a folder like `model_folder` for every family except Qwen3 and Qwen3-MoE, by family name."""
    dense = [SHAPE | {"model_type": family} for family in ("llama", "mistral", "qwen2")]
    every = [*dense, *map(tiny_config, VISION_NAMES)]
    return {values["model_type"]: write_folder(tmp_path / values["model_type"], values) for values in every}


@pytest.fixture
def mixture_folder(tmp_path: Path) -> Path:
    """Makes a folder like `model_folder` for a mixture of experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return write_folder(tmp_path / "mixture", SHAPE | experts | {"model_type": "qwen3_moe"})


def write_folder(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    sees = "vision_config" in values
    if sees:
        for name, settings in processor_files().items():
            (folder / name).write_text(json.dumps(settings))
    write_header(folder / "model.safetensors", values)
    write_prompt_tokenizer(folder, vision=sees)
    return folder


def write_header(path: Path, values: dict[str, Any]) -> None:
    """Writes a sparse weight file of zeros."""
    specs: list[TensorSpec] = []
    end = 0
    for weight in stored_weights(folder_architecture(path.parent, family=values["model_type"])):
        size = 4 * math.prod(weight.shape)
        specs.append(TensorSpec(name=weight.name, dtype="float32", shape=list(weight.shape), offset=end, nbytes=size))
        end += size
    header = header_bytes(specs)
    path.write_bytes(header)
    os.truncate(path, len(header) + end)


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(300)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
