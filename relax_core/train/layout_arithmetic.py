"""Whether a parallel layout can hold a model at all, whatever is built: divisibility, each error with its fix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relax_core.config.schema import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class LayoutShape:
    """What a layout has to divide. ``linear_heads``: key heads of linear attention, 0 where there is none. ``widths``:
    name → width of each layer that tensor parallelism cuts. ``experts``: 0 for a dense model."""

    layers: int
    heads: int
    kv_heads: int
    linear_heads: int
    experts: int
    widths: dict[str, int]


def layout_faults(parallel: ParallelConfig, shape: LayoutShape, *, ranks: int, ranks_key: str) -> Iterator[str]:
    """One sentence (key, value, fix) for each thing that does not divide. ``ranks``: GPUs that the trainer has, set by
    ``ranks_key``. The rules are Megatron-core 0.16's."""
    tp, pp, cp, dp, ep = parallel.tp, parallel.pp, parallel.cp, parallel.dp, parallel.ep
    product = tp * pp * cp * dp
    if product != ranks:
        fixes = [f"{ranks_key}={product}"]
        if ranks % (tp * pp * cp) == 0:
            fixes.insert(0, f"parallel.dp={ranks // (tp * pp * cp)}")
        yield (
            f"parallel.tp={tp} x pp={pp} x cp={cp} x dp={dp} = {product} ranks, but the trainer has {ranks}. "
            f"Set {' or '.join(fixes)}."
        )
    if tp * cp * dp % ep:
        yield (
            f"parallel.ep={ep} does not divide the tp x cp x dp = {tp * cp * dp} ranks of a pipeline stage. "
            f"Use parallel.ep={_largest_divisor(tp * cp * dp, at_most=ep)}."
        )
    if ep > 1 and not shape.experts:
        yield f"parallel.ep={ep}: the model has no experts. Set parallel.ep=1."
    elif shape.experts % ep:
        yield (
            f"parallel.ep={ep} does not divide the model's {shape.experts} experts. "
            f"Use parallel.ep={_largest_divisor(shape.experts, at_most=ep)}."
        )
    if shape.layers % pp:
        yield (
            f"parallel.pp={pp} does not divide the model's {shape.layers} layers. "
            f"Use parallel.pp={_largest_divisor(shape.layers, at_most=pp)}."
        )
    heads = {"attention heads": shape.heads, "linear-attention heads": shape.linear_heads, **shape.widths}
    for what, count in heads.items():
        if count % tp:
            yield (
                f"parallel.tp={tp} does not divide the model's {count} {what}. "
                f"Use parallel.tp={_largest_divisor(count, at_most=tp)}."
            )
    if shape.kv_heads % tp and tp % shape.kv_heads:
        yield (
            f"parallel.tp={tp} is neither a divisor nor a multiple of the model's {shape.kv_heads} key-value heads. "
            f"Use parallel.tp={_largest_divisor(shape.kv_heads, at_most=tp)}."
        )


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(one for one in range(min(at_most, number), 0, -1) if number % one == 0)
