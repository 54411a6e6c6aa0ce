"""Computes ranks and coordinates of parallel layouts, and checks whether a layout can hold a model.

The rules and the order of ranks follow Megatron-core 0.16. The module has no heavy imports, because config validation
calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from relax_core.config.choices import Recompute
from relax_core.config.errors import either
from relax_core.config.schema import ForwardLayout, ParallelConfig

FORWARD_ROLES = ("actor_fwd", "reference")  # The layout of these roles is parallel.forward.
UPDATE_BUCKET_ELEMENTS = 1 << 26  # of an update with optimizer.states=host; their states take 768 MiB
LOGPROB_CHUNK_ROWS = 1024  # the number of token rows with logits in memory at the same time


Layout = ParallelConfig | ForwardLayout


@dataclass(frozen=True, kw_only=True)
class RankCoordinates:
    """Holds a rank's coordinates, each counted from 0; ``dp`` is its data-parallel replica."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int


@dataclass(frozen=True, kw_only=True)
class LayoutShape:
    """Holds the sizes of a model that a layout must divide.

    ``linear_heads`` are the key heads of linear attention, or 0. ``widths`` maps a name to the width of each layer that
    tensor parallelism splits. ``experts`` is 0 for a dense model, and ``expert_width`` is the width of one expert.
    ``deepstack_layers`` counts the first layers that add outputs of a vision tower. ``has_tower`` is True for a
    multimodal model.
    """

    layers: int
    heads: int
    kv_heads: int
    linear_heads: int
    experts: int
    widths: dict[str, int]
    expert_width: int = 0
    deepstack_layers: int = 0
    has_tower: bool = False


# -- Ranks ------------------------------------------------------------------------------------------------------------
def world_size(layout: Layout) -> int:
    """Returns the number of ranks.

    Experts add no ranks, because they are distributed over the ranks of a pipeline stage.
    """
    return layout.dp * layout.tp * layout.pp * layout.cp


def rank_coordinates(layout: Layout, rank: int) -> RankCoordinates:
    """Returns a rank's coordinates in Megatron's order.

    tp varies fastest, then cp, dp and pp. For experts etp varies fastest, then ep.
    """
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    in_stage = rank % (layout.tp * layout.cp * layout.dp)
    ep = in_stage // layout.etp % layout.ep
    return RankCoordinates(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, etp=in_stage % layout.etp)


def replica_ranks(layout: Layout) -> list[list[int]]:
    """Returns the ranks of each data-parallel replica in order.

    All ranks of a replica get the same groups, and the first rank replies.
    """
    replicas: list[list[int]] = [[] for _ in range(layout.dp)]
    for rank in range(world_size(layout)):
        replicas[rank_coordinates(layout, rank).dp].append(rank)
    return replicas


def equal_ranks(layout: Layout) -> list[list[int]]:
    """Returns the sets of ranks with equal coordinates in all dimensions except data parallel."""
    equals: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size(layout)):
        at = rank_coordinates(layout, rank)
        equals.setdefault((at.tp, at.pp, at.cp, at.ep, at.etp), []).append(rank)
    return list(equals.values())


# -- Layouts of other roles -------------------------------------------------------------------------------------------
def one_rank(parallel: ParallelConfig) -> ParallelConfig:
    """Returns the layout of a complete model in one process that only computes forward passes."""
    return forward_parallel(parallel, ForwardLayout(dp=1, tp=1, pp=1, ep=1))


def critic_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """Returns the critic's layout: one process has the whole model and trains it with ``parallel``'s settings."""
    return replace(one_rank(parallel), recompute=parallel.recompute)


def forward_parallel(parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    """Returns ``parallel`` with the sizes of a role that only computes forward passes.

    The layout uses sequence parallelism with tensor parallelism, to save memory and to match the training of experts.
    """
    return replace(
        parallel,
        dp=layout.dp,
        tp=layout.tp,
        pp=layout.pp,
        vpp=1,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp,
        first_stage_layers=None,
        sequence_parallel=layout.tp > 1,
        shard_media=parallel.shard_media and layout.tp * layout.cp > 1,
        recompute=Recompute.none,
        distributed_optimizer=False,
        overlap=False,
    )


# -- Faults -----------------------------------------------------------------------------------------------------------
def combination_faults(layout: Layout, *, key: str = "parallel") -> Iterator[str]:
    """Yields one sentence (key, value, fix) for each size that conflicts with another size in any model.

    ``key`` is the layout's key in the configuration.
    """
    in_stage, experts = layout.tp * layout.cp * layout.dp, layout.ep * layout.etp
    if in_stage % experts:
        yield (
            f"{key}.ep={layout.ep} x etp={layout.etp} does not divide the tp x cp x dp = {in_stage} ranks of a "
            f"pipeline stage. Use {key}.etp=1 {key}.ep={_sizes(in_stage, asked=layout.ep, most=None)}."
        )


def switch_faults(parallel: ParallelConfig) -> Iterator[str]:
    """Yields one sentence (key, value, fix) for each conflict between settings that only the trainer's layout has."""
    if parallel.vpp > 1 and parallel.pp == 1:
        yield f"parallel.vpp={parallel.vpp} with parallel.pp=1: there are no stages to interleave. Set parallel.vpp=1."
    if parallel.sequence_parallel and parallel.tp == 1:
        yield (
            "parallel.sequence_parallel=true with parallel.tp=1: there is no other rank to share rows with. "
            "Set parallel.sequence_parallel=false."
        )
    if parallel.first_stage_layers is not None and parallel.pp == 1:
        yield (
            f"parallel.first_stage_layers={parallel.first_stage_layers} with parallel.pp=1: the only stage has all "
            "layers. Set parallel.first_stage_layers=null."
        )
    if parallel.shard_media and parallel.tp * parallel.cp == 1:
        yield (
            "parallel.shard_media=true with parallel.tp=1 x cp=1: there is no other rank to share images, videos "
            "and sounds with. Set parallel.shard_media=false."
        )
    if parallel.overlap and not parallel.distributed_optimizer:
        yield (
            "parallel.overlap=true with parallel.distributed_optimizer=false: only the distributed optimizer can "
            "overlap its communication. Set parallel.distributed_optimizer=true."
        )


def model_faults(
    layout: Layout, shape: LayoutShape, *, key: str = "parallel", most: int | None = None
) -> Iterator[str]:
    """Yields one sentence (key, value, fix) for each size that does not divide the model's sizes.

    A fix names the sizes that divide the model's, up to the first size above the layout's size, at most ``most``.
    ``most`` is the number of GPUs.
    """
    if layout.ep * layout.etp > 1 and not shape.experts:
        yield (f"{key}.ep={layout.ep}, {key}.etp={layout.etp}: the model has no experts. Set {key}.ep=1 {key}.etp=1.")
    else:
        yield from _indivisible(f"{key}.ep", layout.ep, {"experts": shape.experts}, most=most)
        yield from _indivisible(f"{key}.etp", layout.etp, {"hidden units of an expert": shape.expert_width}, most=most)
    if not isinstance(layout, ParallelConfig) or layout.first_stage_layers is None:
        yield from _indivisible(
            f"{key}.pp", layout.pp, {"layers": shape.layers}, most=most, fits=lambda pp: _holds_deepstack(shape, pp)
        )
        yield from _deepstack_faults(shape, layout.pp, vpp=1, key=key)
    # Megatron could replicate key-value heads
    heads = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    counts = {**heads, "linear-attention heads": shape.linear_heads, **shape.widths}
    yield from _indivisible(f"{key}.tp", layout.tp, counts, most=most)


def trainer_faults(parallel: ParallelConfig, shape: LayoutShape) -> Iterator[str]:
    """Yields one sentence for each further fault (beyond `model_faults`) that only the trainer's layout can have."""
    chunks = parallel.pp * parallel.vpp
    if parallel.first_stage_layers is not None:
        yield from _first_stage_faults(parallel, shape)
    elif shape.layers % parallel.pp == 0 and shape.layers % chunks:
        fix = _sizes(
            shape.layers // parallel.pp,
            asked=parallel.vpp,
            most=None,
            fits=lambda vpp: _holds_deepstack(shape, parallel.pp * vpp),
        )
        yield (
            f"parallel.pp={parallel.pp} x vpp={parallel.vpp} = {chunks} does not divide the model's {shape.layers} "
            f"layers. Use parallel.vpp={fix}."
        )
    elif parallel.vpp > 1:
        yield from _deepstack_faults(shape, parallel.pp, vpp=parallel.vpp, key="parallel")
    if parallel.shard_media and not shape.has_tower:
        yield "parallel.shard_media=true without a tower: the model reads text only. Set parallel.shard_media=false."
    if shape.experts and parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence_parallel=false with parallel.tp={parallel.tp} and experts: Megatron does not train "
            "this combination. Set parallel.sequence_parallel=true."
        )


def check_layout(parallel: ParallelConfig, ranks: int) -> None:
    """Raises ValueError (key, value, fix) if a layout contradicts itself or does not have ``ranks`` ranks."""
    faults = [*combination_faults(parallel), *switch_faults(parallel)]
    if world_size(parallel) != ranks:
        faults.append(
            f"parallel.dp={parallel.dp} x tp={parallel.tp} x pp={parallel.pp} x cp={parallel.cp} = "
            f"{world_size(parallel)} ranks, but there are {ranks}."
        )
    if faults:
        raise ValueError(" ".join(faults))


def rank_faults(layout: Layout, *, ranks: int, ranks_key: str, key: str = "parallel") -> Iterator[str]:
    """Yields one sentence if a layout does not use exactly ``ranks`` GPUs, the value of the setting ``ranks_key``."""
    product, without_dp = world_size(layout), layout.tp * layout.pp * layout.cp
    if product != ranks:
        fixes = [f"{ranks_key}={product}"]
        if ranks % without_dp == 0:
            fixes.insert(0, f"{key}.dp={ranks // without_dp}")
        yield (
            f"{key}.tp={layout.tp} x pp={layout.pp} x cp={layout.cp} x dp={layout.dp} = {product} ranks, but there are "
            f"GPUs for {ranks}. Set {' or '.join(fixes)}."
        )


def _deepstack_faults(shape: LayoutShape, pp: int, *, vpp: int, key: str) -> Iterator[str]:
    """Yields one sentence if the first chunk has too few layers.

    Only this chunk has the vision tower, so it must have all layers that add the tower's outputs.
    """
    needed, layers = shape.deepstack_layers, shape.layers
    if layers % (pp * vpp) or _holds_deepstack(shape, pp * vpp):
        return
    fitting_vpp = [
        factor for factor in range(1, vpp) if layers % (pp * factor) == 0 and _holds_deepstack(shape, pp * factor)
    ]
    fitting_pp = [divisor for divisor in range(1, pp) if layers % divisor == 0 and _holds_deepstack(shape, divisor)]
    fix = f"{key}.vpp={either(fitting_vpp)}" if fitting_vpp else f"{key}.pp={either(fitting_pp)}"
    value = f"{key}.pp={pp}" + (f" x vpp={vpp}" if vpp > 1 else "")
    yield (
        f"{value}: the first chunk of layers has {layers // (pp * vpp)} of the model's {layers}, but the vision "
        f"tower's outputs are added in the first {needed}, which one chunk must hold. Use {fix}."
    )


def _holds_deepstack(shape: LayoutShape, chunks: int) -> bool:
    """Returns whether the first of equal chunks of layers has all layers that add the vision tower's outputs."""
    return shape.layers // chunks >= shape.deepstack_layers


def first_stage_sizes(parallel: Layout, shape: LayoutShape, *, vpp: int) -> list[int]:
    """Returns the possible numbers of layers of the first of several pipeline stages, ascending.

    The other stages share the remaining layers equally. All chunks of a stage have the same number of layers. The first
    chunk has all layers that add the vision tower's outputs.
    """
    later_stages = parallel.pp - 1
    return [
        first
        for first in range(max(1, shape.deepstack_layers) * vpp, shape.layers, vpp)
        if later_stages and (shape.layers - first) % (later_stages * vpp) == 0
    ]


def _first_stage_faults(parallel: ParallelConfig, shape: LayoutShape) -> Iterator[str]:
    """Yields one sentence if the first stage cannot have parallel.first_stage_layers layers."""
    first, pp, vpp = parallel.first_stage_layers, parallel.pp, parallel.vpp
    fitting = first_stage_sizes(parallel, shape, vpp=vpp)
    if first is None or pp == 1 or first in fitting:
        return
    nearest = min(fitting, key=lambda size: abs(size - first), default="null")
    layers, chunks = shape.layers, f" x vpp={vpp}" if vpp > 1 else ""
    if first % vpp == 0 and first // vpp < shape.deepstack_layers:
        why = (
            f"the first chunk of layers has {first // vpp} of the model's {layers}, but the vision tower's outputs are "
            f"added in the first {shape.deepstack_layers}, which one chunk must hold"
        )
    elif first % vpp:
        why = f"the first stage cannot cut {first} layers into {vpp} equal chunks"
    else:
        why = f"the other stages cannot share the {layers - first} left of the model's {layers} layers equally"
    yield (
        f"parallel.first_stage_layers={first} with parallel.pp={pp}{chunks}: {why}. "
        f"Use parallel.first_stage_layers={nearest}."
    )


def _indivisible(
    key: str,
    size: int,
    counts: Mapping[str, int],
    *,
    most: int | None,
    fits: Callable[[int], bool] = lambda size: True,
) -> Iterator[str]:
    """Yields one sentence if a size does not divide all of ``counts``, the model's sizes by name."""
    wrong = [f"{count} {what}" for what, count in counts.items() if count % size]
    if wrong:
        fix = _sizes(math.gcd(*counts.values()), asked=size, most=most, fits=fits)
        yield f"{key}={size} does not divide the model's {', '.join(wrong)}. Use {key}={fix}."


def _sizes(count: int, *, asked: int, most: int | None, fits: Callable[[int], bool] = lambda size: True) -> str:
    """Returns the fitting divisors of ``count`` as text.

    These are all divisors below ``asked``, and the first divisor above ``asked`` if it is at most ``most``.

    The divisor 1 always fits.
    """
    divisors = [divisor for divisor in range(1, count + 1) if count % divisor == 0 and fits(divisor)]
    above = [divisor for divisor in divisors if divisor > asked and (most is None or divisor <= most)]
    return either([*(divisor for divisor in divisors if divisor < asked), *above[:1]])
