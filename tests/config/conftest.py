"""Files that a configuration may point to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """What the checks read of a Hugging Face folder: config.json, and that weights and tokenizer are there."""
    folder = tmp_path / "model"
    folder.mkdir()
    values = {
        "model_type": "qwen3",
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
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(300)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
