"""What takes memory, phase by phase: the terms that processes on a CPU and roles on a GPU have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.train.tree import MASKLESS_SAVES_PAIRS

MIB, GIB = 1 << 20, 1 << 30
FLOAT = 4  # bytes
MASK_BOOLS = 3  # bytes for each pair of places: the bool masks that the attention mask is made from


@dataclass(frozen=True, kw_only=True)
class Phase:
    """``terms``: what for → bytes."""

    name: str
    terms: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What holds memory: ``count`` processes of one kind, or as many GPUs. ``limit``: bytes that each may have, 0 where
    they share the machine's. ``room``: what the fix is, where it does not fit."""

    name: str
    count: int
    phases: tuple[Phase, ...]
    limit: int = 0
    room: str = ""

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.bytes)


def dtype_bytes(config: RelaxConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else FLOAT


def engine_bytes(config: RelaxConfig) -> int:
    """Of a number in an engine."""
    return 2 if (config.engine.dtype or config.model.dtype) == "bfloat16" else FLOAT


def optimizer_bytes_a_parameter(config: RelaxConfig) -> int:
    """Adam's two moments in float32; a bfloat16 model has a float32 master copy too."""
    return 12 if config.model.dtype == "bfloat16" else 8


def activation_values(model: ModelDimensions) -> int:
    """Numbers that one layer keeps of one token row for its backward pass, without recomputation.

    Counted from what autograd saves in the CPU build (docs/plan.md): two norms with input, normed input and output; the
    query, key and value projections, the norms of query and key where there are any, and their rotations; the
    feed-forward network's five widths.
    """
    hidden, query, key, heads = model.hidden, model.query, model.key, model.heads + model.kv_heads
    attention = 6 * hidden + 4 * query + 3 * key + heads
    if model.qk_norm:
        attention += query + key + 4 * model.head_dim + heads
    if model.output_gate:
        attention += 2 * query
    if model.linear is not None:
        one = model.linear
        linear = 6 * hidden + 4 * one.keys + 6 * one.values
        share = model.linear.layers / model.layers
        attention = round(share * linear + (1 - share) * attention)
    if model.experts is None:
        return attention + 5 * model.feed_forward
    experts = model.experts
    routed = experts.per_token * (5 * experts.width + 2 * hidden)
    return attention + experts.count + routed + 5 * experts.shared_width


def mask_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """The attention mask of a micro-batch, one square a group, in the model's dtype."""
    return _mask_pairs(config, parallel, work) * dtype_bytes(config)


def mask_making_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    return _mask_pairs(config, parallel, work) * MASK_BOOLS


def _mask_pairs(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """None on a CPU where large groups are attended to without a mask (relax_core/train/branch_attention.py)."""
    pairs, branch = work.micro_batch_rows * work.group_rows, work.new_tokens - 1
    needed = (
        work.prompt_tokens * (work.prompt_tokens // 2 + work.group_size * branch) + work.group_size * branch**2 // 2
    )
    saved = pairs - work.micro_batch_groups * needed
    on_cpu = config.placement.gpus_per_node == 0
    return 0 if on_cpu and parallel.cp == 1 and saved > MASKLESS_SAVES_PAIRS else pairs


def head_bytes(config: RelaxConfig, model: ModelDimensions, work: Workload, *, split: int = 1) -> int:
    """Logits of one chunk, the output weight in float32 where it is not, and its gradient; ``split``: over tp ranks."""
    rows = min(work.micro_batch_tokens, config.parallel.logprob_chunk_tokens)
    chunk = rows * model.vocabulary * (FLOAT + int(config.rollout.truncates))  # a bool beside each logit
    weight = model.vocabulary * model.hidden * FLOAT
    return (chunk + weight + (weight if dtype_bytes(config) != FLOAT else 0)) // split
