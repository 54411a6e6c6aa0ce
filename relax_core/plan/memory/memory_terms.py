"""Computes the memory terms, phase by phase, that processes on a CPU and roles on a GPU have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.train.tree_packing import MASKLESS_SAVES_PAIRS

MIB, GIB = 1 << 20, 1 << 30
FLOAT = 4  # bytes
FLEX_BLOCK = 128  # rows of a block of FlexAttention
MASK_BOOLS = 3  # bytes for each pair of rows: the bool masks from which the attention mask is made


def size_words(size: int) -> str:
    """Returns a number of bytes in MiB or GiB."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.1f} MiB" if size < 100 * MIB else f"{size / MIB:.0f} MiB"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Is one phase of a process. ``terms`` maps the purpose of the memory to its bytes."""

    name: str
    terms: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Returns the sum of all terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Holds memory: ``count`` processes of one kind, or as many GPUs.

    ``limit`` is the bytes that each may have, 0 if they share the machine's memory. ``room`` is the fix if the memory
    does not fit.
    """

    name: str
    count: int
    phases: tuple[Phase, ...]
    limit: int = 0
    room: str = ""

    @property
    def peak(self) -> Phase:
        """Returns the phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.bytes)


def dtype_bytes(config: RelaxConfig) -> int:
    """Returns the bytes of a number of `model.dtype`."""
    return 2 if config.model.dtype == "bfloat16" else FLOAT


def engine_bytes(config: RelaxConfig) -> int:
    """Returns the bytes of a number in an engine."""
    return 2 if (config.engine.dtype or config.model.dtype) == "bfloat16" else FLOAT


def optimizer_bytes_a_parameter(config: RelaxConfig) -> int:
    """Returns the bytes of Adam's two moments in float32, plus a float32 master copy for a bfloat16 model."""
    return 12 if config.model.dtype == "bfloat16" else 8


def activation_values(model: ModelDimensions) -> int:
    """Returns how many numbers of one token row one layer keeps for its backward pass, without recomputation.

    They are counted from what autograd saves in the CPU build (docs/plan.md): two norms with normed input and output;
    the query, key and value projections, the norms of query and key if there are any, and their rotations; the
    feed-forward network's five widths.
    """
    hidden, query, key, heads = model.hidden, model.query, model.key, model.heads + model.kv_heads
    attention = norm_values(model) + 4 * query + 3 * key + heads
    if model.qk_norm:
        attention += key + 4 * model.head_dim + heads + (query if model.delta_net is not None else 0)
    if model.output_gate:
        attention += 2 * query
    if model.delta_net is not None:
        one = model.delta_net
        linear = norm_values(model) + 4 * one.keys + 6 * one.values
        share = model.delta_layers / model.layers
        attention = round(share * linear + (1 - share) * attention)
    if model.experts is None:
        return attention + 5 * model.feed_forward
    experts = model.experts
    routed = experts.per_token * (5 * experts.width + 2 * hidden)
    return attention + experts.count + routed + 5 * experts.shared_width


def norm_values(model: ModelDimensions) -> int:
    """Returns what the two norms of a layer keep; those beside a gated delta net are torch's, and keep their input."""
    return (4 if model.delta_net is None else 6) * model.hidden


def mask_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """Returns the bytes that say which row sees which, for a micro-batch on one rank.

    On a CPU this is a mask in the model's dtype; on a GPU a plan of blocks with four int32 for each pair of blocks
    (FlexAttention's lists of partial and of full blocks, by query and by key).
    """
    if config.placement.gpus_per_node:
        blocks = -(-work.micro_batch_rows // FLEX_BLOCK)
        return 4 * 4 * blocks * -(-blocks // parallel.cp)
    return _mask_pairs(parallel, work) // parallel.cp * dtype_bytes(config)


def mask_making_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """Returns the bytes of a mask's construction; a plan of blocks is made without a mask."""
    return 0 if config.placement.gpus_per_node else _mask_pairs(parallel, work) // parallel.cp * MASK_BOOLS


def _mask_pairs(parallel: ParallelConfig, work: Workload) -> int:
    """Returns the pairs of rows in the masks on a CPU, one square for each group.

    With context parallelism there always is a mask; otherwise only if omitting it saves little
    (relax_core/train/model/branch_attention.py).
    """
    rows, branch, prompt = work.micro_batch_rows, work.episode_rows - work.prompt_tokens, work.prompt_tokens
    line = min(rows, work.group_rows)
    pairs, branches = rows * line, line - prompt
    needed = -(-rows // line) * (prompt * (prompt // 2 + branches) + branches * branch // 2)
    return 0 if parallel.cp == 1 and pairs - needed > MASKLESS_SAVES_PAIRS else pairs


def head_bytes(config: RelaxConfig, model: ModelDimensions, work: Workload, *, split: int = 1) -> int:
    """Returns the bytes of the logits of one chunk in float32, and of the output weight's gradient.

    ``split`` is the number of tp ranks. In bfloat16 a CPU also has a float32 copy of the weight, and a GPU a bfloat16
    copy of the chunk for its products.
    """
    rows = min(work.micro_batch_tokens, config.parallel.logprob_chunk_tokens)
    chunk = rows * model.vocabulary * (FLOAT + int(config.rollout.truncates))  # a bool for each logit
    weight = model.vocabulary * model.hidden * FLOAT
    copy = 0
    if dtype_bytes(config) != FLOAT:
        copy = rows * model.vocabulary * dtype_bytes(config) if config.placement.gpus_per_node else weight
    return (chunk + weight + copy) // split
