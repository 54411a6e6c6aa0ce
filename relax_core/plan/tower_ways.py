"""Compares the ways in which the trainer's ranks can pass the towers: memory and time of each, and the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.batch import tower_share
from relax_core.plan.memory.memory_terms import GIB
from relax_core.plan.memory.trainer_share import patches_of_micro_batch, patches_of_rank, stage_layers
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.model.model_source import layout_shape
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine
from relax_core.train.parallel_layout import first_stage_sizes

UNBALANCED = 1.1  # a way is proposed if the slowest stage takes so many times as long as with it
AS_GOOD = 1.02  # ways whose times are that near to each other are equally good, and the first one is proposed


@dataclass(frozen=True, kw_only=True)
class TowerWay:
    """Is a way to pass the towers: the settings of `parallel` that it changes, and what it costs.

    ``time`` is that of the slowest stage, over the time that each rank would take if all had equal work. ``size`` is
    the peak of the trainer's fullest rank, in bytes.
    """

    parallel: ParallelConfig
    time: float
    size: int

    @property
    def settings(self) -> str:
        """Returns the way as settings, such as "parallel.shard_media=true parallel.first_stage_layers=null"."""
        layers = "null" if self.parallel.first_stage_layers is None else self.parallel.first_stage_layers
        words = [f"parallel.shard_media={str(self.parallel.shard_media).lower()}"]
        return " ".join([*words, *([f"parallel.first_stage_layers={layers}"] if self.parallel.pp > 1 else [])])


def way_words(
    config: RelaxConfig, work: Workload, model: ModelDimensions, *, peak: Callable[[RelaxConfig], int]
) -> Iterator[str]:
    """Yields the ways of a model with towers on several tensor-, context- or pipeline-parallel ranks.

    ``peak`` returns the bytes of the trainer's fullest rank for a configuration. A way that is clearly faster than the
    configured one is proposed.
    """
    one = config.parallel
    if work.media is None or model.patches is None or one.tp * one.cp * one.pp == 1:
        return
    towers = tower_share(config, work, model)
    ways = [_way(config, change, work, model, towers=towers, peak=peak) for change in _changes(config, work, model)]
    yield "Ways to pass the towers: peak of a rank; time of the slowest stage over an equal share of the work."
    for way in ways:
        configured = " (configured)" if way.parallel == one else ""
        yield f"  {way.settings}: {way.size / GIB:.2f} GiB; {way.time:.2f}{configured}"
    now = _way(config, {}, work, model, towers=towers, peak=peak)
    best = next(way for way in ways if way.time <= AS_GOOD * min(way.time for way in ways))
    if now.time > UNBALANCED * best.time:
        yield f"The towers unbalance the ranks. Set {best.settings}."
    if one.shard_media and find_engine(config.engine.name).deals_items and config.engine.tp > 1:
        audio = "audio" in model.towers
        splits = "splits the towers of a model that hears over its GPUs" if audio else "deals images to its GPUs, too"
        yield f"engine={config.engine.name} {splits}{'' if audio else ' (--mm-enable-dp-encoder)'}."


def _changes(config: RelaxConfig, work: Workload, model: ModelDimensions) -> Iterator[dict[str, Any]]:
    """Yields the settings of each way: whole or dealt, as many layers as the other stages or the best number of fewer.

    The configured number of layers is among them.
    """
    one = config.parallel
    sizes = [
        first for first in first_stage_sizes(one, layout_shape(model), vpp=one.vpp) if first * one.pp < model.layers
    ]
    for layers in (False, True) if one.pp > 1 and sizes else (False,):
        for dealt in (False, True) if one.tp * one.cp > 1 else (False,):
            first = None
            if layers:
                towers = tower_share(config, work, model)
                tried = {size: replace(one, shard_media=dealt, first_stage_layers=size) for size in sizes}
                first = min(sizes, key=lambda size: slowest_stage(tried[size], work, model, towers=towers))
                if one.first_stage_layers is not None and one.shard_media == dealt:
                    first = one.first_stage_layers
            yield {"shard_media": dealt, "first_stage_layers": first}


def _way(
    config: RelaxConfig,
    change: dict[str, Any],
    work: Workload,
    model: ModelDimensions,
    *,
    towers: float,
    peak: Callable[[RelaxConfig], int],
) -> TowerWay:
    parallel = replace(config.parallel, **change)
    time = slowest_stage(parallel, work, model, towers=towers)
    return TowerWay(parallel=parallel, time=time, size=peak(replace(config, parallel=parallel)))


def slowest_stage(parallel: ParallelConfig, work: Workload, model: ModelDimensions, *, towers: float) -> float:
    """Returns the time of the slowest stage over that of a rank with an equal share of a micro-batch's products.

    ``towers`` is the towers' share of the products. The embedding and the output layer do not count.
    """
    ranks = parallel.tp * parallel.cp
    passed = patches_of_rank(parallel, work) / max(1, patches_of_micro_batch(parallel, work))
    layers = {later: stage_layers(parallel, model, later=later) / model.layers for later in (False, True)}
    first = (1 - towers) * layers[False] / ranks + towers * passed
    later = (1 - towers) * layers[True] / ranks if parallel.pp > 1 else 0.0
    return max(first, later) * parallel.pp * ranks
