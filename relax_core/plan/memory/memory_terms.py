"""What takes memory, phase by phase: the terms that processes on a CPU and roles on a GPU have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.train.packing.tree_packing import MASKLESS_SAVES_PAIRS

MIB, GIB = 1 << 20, 1 << 30
FLOAT = 4  # bytes
FLEX_BLOCK = 128  # rows of a block of FlexAttention
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
    """What says which row sees which, of a micro-batch on one rank: on a CPU a mask in the model's dtype; on a GPU a
    plan of blocks, four int32 for each pair of blocks (FlexAttention's lists of partial and of full blocks, by query
    and by key)."""
    if config.placement.gpus_per_node:
        blocks = -(-work.micro_batch_rows // FLEX_BLOCK)
        return 4 * 4 * blocks * -(-blocks // parallel.cp)
    return _mask_pairs(parallel, work) // parallel.cp * dtype_bytes(config)


def mask_making_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """What exists beside a mask while it is made; a plan of blocks is made without a mask."""
    return 0 if config.placement.gpus_per_node else _mask_pairs(parallel, work) // parallel.cp * MASK_BOOLS


def _mask_pairs(parallel: ParallelConfig, work: Workload) -> int:
    """Pairs of rows that a mask on a CPU tells of, one square a group. With context parallelism there always is one;
    otherwise only where leaving it out saves little (relax_core/train/attention/branch_attention.py)."""
    rows, branch, prompt = work.micro_batch_rows, work.new_tokens - 1, work.prompt_tokens
    line = min(rows, work.group_rows)
    pairs, branches = rows * line, line - prompt
    needed = -(-rows // line) * (prompt * (prompt // 2 + branches) + branches * branch // 2)
    return 0 if parallel.cp == 1 and pairs - needed > MASKLESS_SAVES_PAIRS else pairs


def head_bytes(config: RelaxConfig, model: ModelDimensions, work: Workload, *, split: int = 1) -> int:
    """Logits of one chunk in float32, and the gradient of the output weight; ``split``: over tp ranks. In bfloat16 a
    CPU has a float32 copy of the weight too, a GPU a bfloat16 copy of the chunk for its products."""
    rows = min(work.micro_batch_tokens, config.parallel.logprob_chunk_tokens)
    chunk = rows * model.vocabulary * (FLOAT + int(config.rollout.truncates))  # a bool beside each logit
    weight = model.vocabulary * model.hidden * FLOAT
    copy = 0
    if dtype_bytes(config) != FLOAT:
        copy = rows * model.vocabulary * dtype_bytes(config) if config.placement.gpus_per_node else weight
    return (chunk + weight + copy) // split
