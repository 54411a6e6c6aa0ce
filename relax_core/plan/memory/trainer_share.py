"""Computes what one rank holds of a model under a parallel layout, on a CPU core or on a GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from relax_core.config.checks.freeze_keys import frozen_parts
from relax_core.config.choices import AUDIO, LANGUAGE, PROJECTOR, ROUTER, VISION, Recompute
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.memory.memory_terms import (
    FLOAT,
    activation_values,
    dtype_bytes,
    mask_bytes,
    mask_making_bytes,
    norm_values,
    optimizer_bytes_a_parameter,
)
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.train.parallel_layout import Layout

OF_MEDIA = ("tower activations", "one tower block", "features", "frames")  # names of terms; glibc reuses their pieces
FEATURE_COPIES = 2  # the tower's output of all items, and the rows of it that a rank uses


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


def trained_share(layout: Layout, model: ModelDimensions, *, frozen: Collection[str], later: bool = False) -> Share:
    """Returns the parameters of `share_of` that are not in a frozen part of the model, and so have a gradient."""
    share = share_of(layout, model, later=later)
    towers: Mapping[str, int] = {} if later else model.towers
    projectors = {"vision": model.projector, "audio": model.audio_projector}
    routers = model.router_parameters * stage_layers(layout, model, later=later) // (model.layers * layout.tp)
    language = 0 if LANGUAGE in frozen else share.dense - routers
    whole = share.whole - (PROJECTOR in frozen) * sum(projectors[part] for part in towers)
    whole -= sum(towers[part] - projectors[part] for part in (VISION, AUDIO) if part in frozen and part in towers)
    return Share(
        dense=language + (0 if ROUTER in frozen else routers),
        experts=0 if LANGUAGE in frozen else share.experts,
        whole=whole,
    )


def stage_layers(layout: Layout, model: ModelDimensions, *, later: bool = False) -> int:
    """Returns the layers of the first pipeline stage, or of one that comes ``later``."""
    first = layout.first_stage_layers if isinstance(layout, ParallelConfig) else None
    if first is None:
        return model.layers // layout.pp
    return (model.layers - first) // (layout.pp - 1) if later else first


def stages_of(parallel: ParallelConfig) -> tuple[bool, ...]:
    """Returns ``later`` of the stages of which one can be the fullest: the first one, and another with more layers."""
    return (False,) if parallel.first_stage_layers is None else (False, True)


def share_of(layout: Layout, model: ModelDimensions, *, later: bool = False) -> Share:
    """Returns the share of a rank of the first stage, which holds most if all have as many layers.

    With ``later`` it is that of the last stage, which has no towers.
    """
    matrices = model.embedding_matrices if layout.pp == 1 else 1  # with stages, each end holds one matrix
    embeddings = matrices * model.vocabulary * model.hidden
    layers = stage_layers(layout, model, later=later)
    return Share(
        dense=(model.layer_parameters * layers // model.layers + embeddings) // layout.tp,
        experts=model.expert_parameters * layers // (model.layers * layout.ep * layout.etp),
        whole=0 if later else model.tower_parameters,
    )


def state_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, *, later: bool = False
) -> dict[str, int]:
    """Returns what a training rank of the first stage, or with ``later`` of the last one, holds between steps."""
    share = share_of(parallel, model, later=later)
    trained = trained_share(parallel, model, frozen=frozen_parts(config), later=later)
    copies = expert_copies = 1
    if parallel.distributed_optimizer:
        copies = parallel.dp * parallel.cp
        expert_copies = parallel.tp * parallel.cp * parallel.dp // (parallel.ep * parallel.etp)
    of_adam = (trained.dense + trained.whole) // copies + trained.experts // expert_copies
    return {
        "weights": share.parameters * dtype_bytes(config),
        "gradients": trained.parameters * FLOAT,
        "Adam states": of_adam * optimizer_bytes_a_parameter(config),
    }


def activation_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload, *, later: bool = False
) -> dict[str, int]:
    """Returns what a rank of the first stage, or with ``later`` of the second one, keeps for its backward passes."""
    size, cp = dtype_bytes(config), parallel.cp
    in_flight = _in_flight(parallel, work, later=later)
    rows = work.micro_batch_rows // cp
    layers = stage_layers(parallel, model, later=later)
    a_layer = rows * row_values(parallel, model) * size
    if parallel.recompute is Recompute.full:  # the input of each layer, and one layer at a time
        inputs = rows * model.hidden * size // (parallel.tp if parallel.sequence_parallel else 1)
        activations = round(in_flight * layers * inputs) + a_layer
    else:
        activations = round(in_flight * layers * a_layer)
    terms = {"activations": activations, "attention mask": round(in_flight * mask_bytes(config, parallel, work))}
    return terms if later else terms | _tower_terms(config, parallel, model, work, in_flight=in_flight)


def _tower_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload, *, in_flight: float
) -> dict[str, int]:
    """Returns what the tower keeps of a micro-batch, its features and deepstack rows, and the mapped frames."""
    if model.patches is None or work.media is None:
        return {}
    cost, size, patches = model.patches, dtype_bytes(config), patches_of_rank(parallel, work)
    kept = cost.values(recomputed=parallel.recompute is Recompute.full, frozen=frozen_parts(config))
    features = patches_of_micro_batch(parallel, work) // cost.a_row * cost.features
    return {
        "tower activations": round(in_flight * patches) * kept * size + (0 if kept else patches * cost.block * size),
        "features": round(in_flight * FEATURE_COPIES * features) * size,
        "frames": round(work.media_prompts * work.media.nbytes),
    }


def patches_of_micro_batch(parallel: ParallelConfig, work: Workload) -> int:
    """Returns the most patches that pass a rank's tower together: those of its prompts, or of one larger prompt.

    A prompt is never cut, so `parallel.micro_batch_patches` does not bound those of a single one.
    """
    if work.media is None:
        return 0
    of_prompts = min(parallel.micro_batch_patches, round(work.media_prompts * work.media.patches))
    return max(of_prompts, work.media.most_patches)


def patches_of_rank(parallel: ParallelConfig, work: Workload) -> int:
    """Returns the most patches of a micro-batch that pass the tower of one rank; an item is never cut."""
    patches = patches_of_micro_batch(parallel, work)
    if work.media is None or not parallel.shard_media:
        return patches
    return max(-(-patches // (parallel.tp * parallel.cp)), work.media.item_patches)


def row_values(parallel: ParallelConfig, model: ModelDimensions) -> int:
    """Returns how many numbers one layer keeps of one token row on one rank.

    Tensor parallelism divides heads and widths; the norms' rows are divided only with sequence parallelism.
    """
    every, norms = activation_values(model), norm_values(model)
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
    if model.patches is not None and work.media is not None:
        cost, patches = model.patches, patches_of_micro_batch(parallel, work)
        terms["one tower block"] = patches_of_rank(parallel, work) * (cost.block + cost.inputs) * size
        terms["features"] = FEATURE_COPIES * patches // cost.a_row * cost.features * size
        terms["frames"] = round(work.media_prompts * work.media.nbytes)
    return terms


def _in_flight(parallel: ParallelConfig, work: Workload, *, later: bool) -> float:
    """Returns the micro-batches whose activations the first stage holds, with 1F1B or the interleaved schedule.

    With ``later`` it is the second stage, which holds one less with 1F1B.
    """
    if parallel.vpp == 1:
        return min(parallel.pp - later, work.micro_batches)
    return min(parallel.pp * (1 + (parallel.pp - 1) / (parallel.pp * parallel.vpp)), work.micro_batches)
