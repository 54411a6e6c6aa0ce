"""Derives `engine.threads` if it is 0: the number of CPU threads of each engine, and of each trainer rank on CPU cores.

In colocate mode on one machine without GPUs, engines and trainer ranks alternate, and waiting threads sleep. The cores
are therefore divided among the engines or among the ranks, whichever are more. In all other runs each engine and rank
gets one thread. So does a small model, because more threads make it slower: each operator waits for all threads.
"""

from __future__ import annotations

import dataclasses

from relax_core.config.choices import ModeName
from relax_core.config.schema import RelaxConfig
from relax_core.plan.model_dimensions import find_dimensions
from relax_core.plan.placement import cores_of_a_node
from relax_core.train.parallel_layout import world_size

LARGE = 50_000_000  # number of parameters from which a second thread makes a model faster


def with_threads(config: RelaxConfig) -> RelaxConfig:
    """Returns the configuration with the derived number of threads."""
    if config.engine.threads:
        return config
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, threads=_threads(config)))


def _threads(config: RelaxConfig) -> int:
    takes_turns = config.mode.name is ModeName.colocate and config.placement.nodes == 1
    cores = cores_of_a_node(config)
    if not takes_turns or config.placement.gpus_per_node or cores is None:
        return 1
    processes = max(1, config.engine.count, world_size(config.parallel))
    return max(1, cores // processes) if is_large(config) else 1


def is_large(config: RelaxConfig) -> bool:
    """Returns whether a second thread makes the model faster; False for a model that another check refuses."""
    if config.model.builtin is not None:  # tiny
        return False
    try:
        return find_dimensions(config).parameters >= LARGE
    except (ValueError, OSError):
        return False
