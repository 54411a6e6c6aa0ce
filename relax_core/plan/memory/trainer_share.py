"""Computes what one rank holds of a model under a parallel layout, on a CPU core or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.config.choices import Recompute
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.memory.memory_terms import (
    FLOAT,
    activation_values,
    dtype_bytes,
    mask_bytes,
    mask_making_bytes,
    optimizer_bytes_a_parameter,
)
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.model.patch_cost import PatchCost
from relax_core.plan.workload import Workload
from relax_core.train.parallel.layout_arithmetic import Layout


@dataclass(frozen=True, kw_only=True)
class Share:
    """Holds the parameters of one rank.

    ``dense`` parameters are divided by tp and pp, ``experts`` by ep, etp and pp; ``whole`` ones (the vision and audio
    towers) are on every rank of the first stage.
    """

    dense: int
    experts: int
    whole: int

    @property
    def parameters(self) -> int:
        """Returns the number of all parameters of the rank."""
        return self.dense + self.experts + self.whole


def share_of(layout: Layout, model: ModelDimensions) -> Share:
    """Returns the share of the rank that holds most."""
    matrices = model.embedding_matrices if layout.pp == 1 else 1  # with stages, each end holds one matrix
    embeddings = matrices * model.vocabulary * model.hidden
    return Share(
        dense=(model.layer_parameters // layout.pp + embeddings) // layout.tp,
        experts=model.expert_parameters // (layout.pp * layout.ep * layout.etp),
        whole=model.tower_parameters,
    )


def state_terms(config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions) -> dict[str, int]:
    """Returns what a training rank holds between steps."""
    share = share_of(parallel, model)
    copies = expert_copies = 1
    if parallel.distributed_optimizer:
        copies = parallel.dp * parallel.cp
        expert_copies = parallel.tp * parallel.cp * parallel.dp // (parallel.ep * parallel.etp)
    of_adam = (share.dense + share.whole) // copies + share.experts // expert_copies
    return {
        "weights": share.parameters * dtype_bytes(config),
        "gradients": share.parameters * FLOAT,
        "Adam states": of_adam * optimizer_bytes_a_parameter(config),
    }


def activation_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload
) -> dict[str, int]:
    """Returns what a rank keeps for its backward passes."""
    size, cp = dtype_bytes(config), parallel.cp
    in_flight = _in_flight(parallel, work)
    rows = work.micro_batch_rows // cp
    layers = model.layers // parallel.pp
    a_layer = rows * row_values(parallel, model) * size
    if parallel.recompute is Recompute.full:  # the input of each layer, and one layer at a time
        inputs = rows * model.hidden * size // (parallel.tp if parallel.sequence_parallel else 1)
        activations = round(in_flight * layers * inputs) + a_layer
    else:
        activations = round(in_flight * layers * a_layer)
    terms = {"activations": activations, "attention mask": round(in_flight * mask_bytes(config, parallel, work))}
    if model.patches is not None:
        kept = model.patches.values(recomputed=parallel.recompute is Recompute.full)
        terms["tower activations"] = round(in_flight * _most_patches(parallel, model.patches, work)) * kept * size
    return terms


def _most_patches(parallel: ParallelConfig, cost: PatchCost, work: Workload) -> int:
    """Returns the patches of a micro-batch on one rank, if all rows of its prompts show images or videos."""
    prompts = -(-work.micro_batch_rows // work.group_rows)
    return min(parallel.micro_batch_patches, prompts * work.prompt_tokens * cost.a_row)


def row_values(parallel: ParallelConfig, model: ModelDimensions) -> int:
    """Returns how many numbers one layer keeps of one token row on one rank.

    Tensor parallelism divides heads and widths; the norms' rows are divided only with sequence parallelism.
    """
    every, norms = activation_values(model), 6 * model.hidden
    return (every - norms) // parallel.tp + norms // (parallel.tp if parallel.sequence_parallel else 1)


def forward_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload
) -> dict[str, int]:
    """Returns what a rank that only computes forward holds of a micro-batch at a time."""
    size = dtype_bytes(config)
    terms = {
        "one layer": work.micro_batch_rows // parallel.cp * row_values(parallel, model) * size,
        "attention mask": mask_bytes(config, parallel, work) + mask_making_bytes(config, parallel, work),
    }
    if model.patches is not None:
        terms["one tower block"] = _most_patches(parallel, model.patches, work) * model.patches.block * size
    return terms


def _in_flight(parallel: ParallelConfig, work: Workload) -> float:
    """Returns the micro-batches whose activations the first stage holds, with 1F1B or the interleaved schedule."""
    if parallel.vpp == 1:
        return min(parallel.pp, work.micro_batches)
    return min(parallel.pp * (1 + (parallel.pp - 1) / (parallel.pp * parallel.vpp)), work.micro_batches)
