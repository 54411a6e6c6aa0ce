"""Tests a family with recurrent layers in a plug-in file. docs/plugins/hybrid_family.md shows the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import REACH, trainer_gaps
from benchmarks.family_models import make_family_model
from relax_core.families.folder import folder_architecture
from relax_core.tools.tiny_text import write_prompt_tokenizer
from tests.families.test_plugin_family import embedded_gaps

FILE = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "qwen3_5_text.py"
SETTINGS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a tiny random folder of the family, and the transformers model that wrote it."""
    folder: Path = tmp_path_factory.mktemp("hybrid")
    model = make_family_model(folder, "qwen3_5_text", **SETTINGS)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    write_prompt_tokenizer(folder)
    return folder, model


def test_the_trainer_computes_what_transformers_does(hybrid: tuple[Path, Any]) -> None:
    folder, model = hybrid
    assert folder_architecture(folder, family=str(FILE)).delta_layers == (0, 1, 2)
    gaps = trainer_gaps(folder, model, family=str(FILE))
    assert max(gaps.values()) <= REACH, gaps


def test_the_embedded_engine_computes_what_transformers_does(hybrid: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = hybrid
    assert max(embedded_gaps(folder, model, family=FILE, scratch=tmp_path)) <= REACH
