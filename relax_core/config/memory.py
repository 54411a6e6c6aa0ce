"""A plain estimate of the memory that a run needs, against what this machine has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_core.config.model_folder import read_model_config
from relax_core.config.schema import RelaxConfig

GIB = 1 << 30
_SERVICES_BYTES = int(1.6 * GIB)  # Ray, Serve, the imports of all services; measured on the demo
_RANK_BYTES = GIB // 2  # one more trainer rank's or engine's imports
_TRAIN_BYTES_A_PARAMETER = 16  # float32 weight, gradient and Adam's two moments
_TINY_CACHE_VALUES = 2 * 2 * 2 * 16  # keys and values, layers, heads, head size of the built-in tiny models
_CGROUP = Path("/sys/fs/cgroup")


def estimate_bytes(config: RelaxConfig) -> dict[str, int]:
    """Bytes by what they are for. An upper estimate for the weights, none for the activations."""
    dtype_bytes = 2 if config.model.dtype == "bfloat16" else 4
    weight_file_bytes, cache_bytes_a_token = 0, _TINY_CACHE_VALUES * dtype_bytes
    if config.model.path is not None:
        folder = Path(config.model.path)
        weight_file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        cache_bytes_a_token = _cache_values_a_token(folder) * dtype_bytes
    parameters = weight_file_bytes // 2  # bfloat16 on disk, as models are published
    ranks, engines = config.parallel.dp, config.engine.count
    # The cache is a rectangle of running samples by context, and grows to no more than its budget.
    cache_tokens = min(config.engine.max_total_tokens, config.engine.max_running_samples * config.engine.context_length)
    return {
        "services": _SERVICES_BYTES + (ranks - 1 + engines - 1) * _RANK_BYTES,
        f"trainer ({ranks} ranks)": ranks * parameters * (_TRAIN_BYTES_A_PARAMETER + dtype_bytes),
        f"engine weights ({engines})": engines * parameters * dtype_bytes,
        "weight sync": parameters * dtype_bytes,
        f"KV cache ({cache_tokens} tokens)": engines * cache_tokens * cache_bytes_a_token,
        "launcher.object_store_mb": config.launcher.object_store_mb << 20,
    }


def available_bytes() -> int:
    """What can still be used: of the machine, or of the container's limit where that is less."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
        free = min(free, int(text) - used)
    return free


def memory_problems(config: RelaxConfig) -> Iterator[str]:
    """One sentence with the sum when the run does not fit."""
    parts = estimate_bytes(config)
    need, free = sum(parts.values()), available_bytes()
    if need > free:
        sums = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
        yield (
            f"too little memory: the run needs about {need / GIB:.1f} GiB ({sums}), {free / GIB:.1f} GiB are free. "
            "Close other programs, or lower engine.max_total_tokens, engine.max_running_samples, engine.count, "
            "parallel.dp, or the model's size."
        )


def _cache_values_a_token(folder: Path) -> int:
    """Keys and values of one token over all layers."""
    values = read_model_config(folder)
    heads = int(values["num_attention_heads"])
    head_dim = int(values.get("head_dim") or int(values["hidden_size"]) // heads)
    return 2 * int(values["num_hidden_layers"]) * int(values.get("num_key_value_heads") or heads) * head_dim
