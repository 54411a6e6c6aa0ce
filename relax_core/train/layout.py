"""Which parallel layouts the Megatron back end can run. Imports nothing heavy: config validation calls it."""

from __future__ import annotations

from relax_core.config.schema import ParallelConfig


def check_layout(parallel: ParallelConfig, world_size: int) -> None:
    """Raises ValueError (key, value, fix) for a layout that is not built or does not fill ``world_size`` ranks."""
    for key in ("tp", "pp", "cp", "ep"):
        value = getattr(parallel, key)
        if value != 1:
            raise ValueError(f"parallel.{key}={value}: not built yet; what exists: dp. Set parallel.{key}=1.")
    if parallel.dp < 1:
        raise ValueError(f"parallel.dp={parallel.dp}: must be 1 or more.")
    if parallel.dp != world_size:
        raise ValueError(
            f"parallel.dp={parallel.dp}: the trainer has {world_size} rank(s). Set parallel.dp={world_size}."
        )
