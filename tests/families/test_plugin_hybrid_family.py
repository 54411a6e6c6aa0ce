"""A family with layers that keep a state, in a file outside the core: docs/plugins/hybrid_family.md shows the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.families import REACH, engine_gaps, trainer_gaps
from benchmarks.family_models import make_family_model
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.families.folder import folder_architecture
from relax_core.tools.tiny_tokenizer import write_prompt_tokenizer
from tests.families.test_plugin_family import ENGINE

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
    """A tiny random folder of the family, and the model of transformers that wrote it."""
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
    token_file = tmp_path / "token"
    token_file.write_text("token")
    launch = EngineLaunch(
        model_folder=folder,
        family=str(FILE),
        engine=ENGINE,
        dtype="float32",
        token_file=token_file,
        log_file=tmp_path / "log",
        load_weights=True,
    )
    process = EngineProcess.start(launch)
    try:
        client = build_client(ENGINE, process.url, model_folder=folder, token_file=token_file)
        assert max(engine_gaps(client, model)) <= REACH
    finally:
        process.stop(timeout_s=5.0)


def test_heads_that_do_not_fit_are_refused(hybrid: tuple[Path, Any], tmp_path: Path) -> None:
    values = json.loads((hybrid[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "linear_num_value_heads": 3}))
    with pytest.raises(ValueError, match="linear_num_value_heads=3: must be a multiple of linear_num_key_heads=2"):
        folder_architecture(tmp_path, family=str(FILE))
