from __future__ import annotations

from pathlib import Path

from relax_core.config.compose import load_config
from relax_core.config.memory import _TINY_CACHE_VALUES, _cache_values_a_token, available_bytes, estimate_bytes
from relax_core.config.model_folder import read_model_config
from relax_core.tools.make_tiny import MAX_POSITIONS, tiny_model_folder


def test_estimate_by_hand(model_folder: Path) -> None:
    """1,000 bytes of bfloat16 weights are 500 parameters; the cache holds 2 (k, v) x 2 layers x 2 heads x 16 values."""
    config = load_config(["model=qwen3", f"model.path={model_folder}", "parallel.dp=2", "engine.max_total_tokens=1000"])
    parts = estimate_bytes(config)
    assert parts["trainer (2 ranks)"] == 2 * 500 * (16 + 2)
    assert parts["engine weights (1)"] == 500 * 2
    assert parts["KV cache (1000 tokens)"] == 1000 * 128 * 2
    assert parts["launcher.object_store_mb"] == 200 * 2**20


def test_available_is_within_the_machine() -> None:
    import psutil

    assert 0 < available_bytes() <= psutil.virtual_memory().total


def test_the_cache_is_no_larger_than_its_rectangle(model_folder: Path) -> None:
    """Running samples by context; a budget beyond that is never used."""
    sizes = ["engine.max_total_tokens=1000000000000", "engine.max_running_samples=32", "engine.context_length=100"]
    config = load_config(["model=qwen3", f"model.path={model_folder}", *sizes])
    assert estimate_bytes(config)["KV cache (3200 tokens)"] == 3200 * 128 * 2


def test_the_built_in_model_counts_as_it_is_made() -> None:
    config = load_config(["engine.max_total_tokens=1000"])
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    values = _cache_values_a_token(folder)
    assert values == _TINY_CACHE_VALUES
    assert estimate_bytes(config)["KV cache (1000 tokens)"] == 1000 * values * 4
    assert read_model_config(folder)["max_position_embeddings"] == MAX_POSITIONS
