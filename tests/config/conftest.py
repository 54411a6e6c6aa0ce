"""Files that a configuration may point to."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.engine import TensorSpec
from relax_core.families.table import read_architecture
from relax_core.registry import find_family
from relax_core.tools.tiny_tokenizer import write_prompt_tokenizer
from relax_core.train.hf.weight_rules import tensor_shape, weight_rules
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
    """What the checks read of a Hugging Face folder: config.json, the header of its weights, a tokenizer."""
    return write_folder(tmp_path / "model", SHAPE | {"model_type": "qwen3"})


@pytest.fixture
def other_families(tmp_path: Path) -> dict[str, Path]:
    """The same of every dense family beside Qwen3, by its name."""
    families = ("llama", "mistral", "qwen2")
    return {family: write_folder(tmp_path / family, SHAPE | {"model_type": family}) for family in families}


@pytest.fixture
def mixture_folder(tmp_path: Path) -> Path:
    """The same of a mixture of experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return write_folder(tmp_path / "mixture", SHAPE | experts | {"model_type": "qwen3_moe"})


def write_folder(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    write_header(folder / "model.safetensors", values)
    write_prompt_tokenizer(folder)
    return folder


def write_header(path: Path, values: dict[str, Any]) -> None:
    """All weights, which are zeros that take no room."""
    specs: list[TensorSpec] = []
    end = 0
    architecture = read_architecture(find_family(values["model_type"]), values)
    for rule in weight_rules(architecture):
        shape = tensor_shape(rule, architecture)
        size = 4 * math.prod(shape)
        specs.append(TensorSpec(name=rule.hf, dtype="float32", shape=list(shape), offset=end, nbytes=size))
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
