"""Makes a single trainer rank with the default configuration, for benchmarks without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.compose import compose, typed_config
from relax_core.config.schema import ParallelConfig
from relax_core.registry import find_algorithm

if TYPE_CHECKING:
    from relax_core.train.megatron_rank import RankSetup


def one_rank_parallel(**changes: Any) -> ParallelConfig:
    """Returns the parallel layout of one rank. ``changes`` replace fields."""
    return replace(typed_config(compose([])).parallel, **changes)


def one_rank_setup(folder: Path, *, overrides: Sequence[str] = (), **changes: Any) -> RankSetup:
    """Returns a rank's setup for the model in ``folder``, like a run with ``overrides``. ``changes`` replace fields."""
    from relax_core.train.megatron_rank import RankSetup

    config = typed_config(compose(list(overrides)))
    fields: dict[str, Any] = {
        "model_folder": folder,
        "family": config.model.family,
        "parallel": config.parallel,
        "optimizer": config.optimizer,
        "total_steps": 1,
        "dtype": "float32",
        "algorithm": find_algorithm(config.algo.name),
        "config": config.algo,
        "rank": 0,
        "world_size": 1,
        "store_address": "127.0.0.1:0",
        "timeout_s": 600.0,
        "seed": 0,
    }
    return RankSetup(**fields | changes)
