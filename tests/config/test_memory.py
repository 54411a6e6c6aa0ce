from __future__ import annotations

from pathlib import Path

from relax_core.config.compose import load_config
from relax_core.config.memory import available_bytes, estimate_bytes


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
