"""Computes the memory of a trainer's rank on a GPU: tensors that layers keep for the backward pass, and temporaries.

The terms follow the tensors that a rehearsal (plan=rehearse) finds alive at the peak, and a test compares both. Numbers
of a layer are counted per token row of the micro-batch, in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.config.choices import LANGUAGE, PROJECTOR, VISION, Recompute
from relax_core.config.model_checks import untrained_parts
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.plan.memory_terms import (
    FLOAT,
    adam_bytes,
    adapted_matrices,
    adapted_parameters,
    dtype_bytes,
    in_flight,
    mask_bytes,
    optimizer_bytes_a_parameter,
    patches_of_micro_batch,
    patches_of_rank,
    stage_layers,
    state_terms,
    states_leave_gpu,
)
from relax_core.plan.model_dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_algorithm
from relax_core.train.parallel_layout import LOGPROB_CHUNK_ROWS, UPDATE_BUCKET_ELEMENTS

_LONG = 8  # bytes of an int64
_ROTARY_TABLES = 4  # cosines and sines, for queries and for keys
_MERGER = 3  # a tower's merger keeps its input or the normed input, and both widths, in widths of a patch
_FEATURE_GRADIENTS = 3  # of all features, with those that a rank uses
_SUMMANDS = 3  # float32 tensors of a weight with LoRA factors while they are added
_RULE = 32  # float32 numbers that torch's gated delta rule keeps for each number of its values, in chunks of 64 rows


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Holds the bytes of one token row in one layer of a rank.

    ``kept`` are saved for the backward pass, and ``again`` are those that a recomputed pass saves for a short time.
    ``temporary`` are additional bytes, in one layer at a time.
    """

    kept: float
    again: float
    temporary: float


def layer_bytes(config: RelaxConfig, model: ModelDimensions, *, delta: bool) -> LayerBytes:
    """Returns the bytes of a row in a layer with attention, or with ``delta`` in a layer with a gated delta net."""
    parallel, size = config.parallel, dtype_bytes(config)
    rows = parallel.tp if parallel.sequence_parallel else 1
    inner = _delta_bytes(config, model) if delta else _attention_bytes(config, model)
    # Two norms keep input and output; in float32 the input is a copy.
    norms = 2 * (size + (FLOAT if model.zero_centered else size)) * model.hidden + 2 * FLOAT
    feed, temporary = _feed_forward_bytes(config, model)
    kept = inner.kept + norms / rows + feed
    if parallel.recompute is Recompute.full:
        again = kept + inner.again
        return LayerBytes(kept=model.hidden * size / rows, again=again, temporary=temporary)
    return LayerBytes(kept=kept, again=inner.again, temporary=max(temporary, inner.temporary))


def _attention_bytes(config: RelaxConfig, model: ModelDimensions) -> LayerBytes:
    """Returns the bytes of self-attention.

    It keeps the projected queries, keys and values, rotated queries and keys, the output with its log-sum-exps, and the
    cosines and sines, which are not divided by tp.
    """
    parallel, size = config.parallel, dtype_bytes(config)
    query, key = model.query, model.key
    values = 3 * query + 3 * key
    floats = model.heads + (model.heads + model.kv_heads if model.qk_norm else 0)
    if model.output_gate:  # the projected gate and the gated output; the gate's sigmoid is float32
        values += 2 * query
        floats += query
    if model.zero_centered:
        floats += query + key
    elif model.qk_norm and model.kv_heads > parallel.tp:
        values += query  # The norm's input is a copy, because the projection mixes queries with keys.
    kept = (values * size + floats * FLOAT) / parallel.tp + _ROTARY_TABLES * model.rotary * size
    return LayerBytes(kept=kept, again=0, temporary=0)


def _delta_bytes(config: RelaxConfig, model: ModelDimensions) -> LayerBytes:
    """Returns the bytes of a gated delta net in plain torch (`relax_core.families.delta_rule`).

    Its projections and its output are kept. The rule keeps `_RULE` float32 numbers for each number of its values;
    parallel.recompute=selective computes them again, one layer at a time.
    """
    net, tp = model.delta_net, config.parallel.tp
    assert net is not None
    kept = (net.channels + 2 * net.values + 2 * net.value_heads) * dtype_bytes(config) / tp
    rule = _RULE * net.values * FLOAT / tp
    if config.parallel.recompute is Recompute.none:
        return LayerBytes(kept=kept + rule, again=0, temporary=0)
    return LayerBytes(kept=kept, again=rule, temporary=0)


def _feed_forward_bytes(config: RelaxConfig, model: ModelDimensions) -> tuple[float, float]:
    """Returns the bytes that the feed-forward network keeps of a row, and its temporaries.

    A dense network keeps four widths: two projections, the activation and the product. An expert keeps its input, the
    four widths and the product with its weight. While it computes, its input and output exist in the order of the
    ranks, too.
    """
    size, tp = dtype_bytes(config), config.parallel.tp
    if model.experts is None:
        return 4 * model.feed_forward * size / tp, 0
    experts = model.experts
    routed = experts.per_token * ((model.hidden + 5 * experts.width) * size + 2 * _LONG + size)
    router = experts.count * (FLOAT + size + 1)  # probabilities, and their map
    shared = (4 * experts.shared_width + (model.hidden if experts.shared_width else 0)) * size  # and its output
    return (routed + router + shared) / tp, 4 * experts.per_token * model.hidden * size / tp


def fullest_stages(parallel: ParallelConfig) -> list[int]:
    """Returns the stages that can have the peak: both ends, and the second if it has more layers than the first."""
    return sorted({0, parallel.pp - 1, *(() if parallel.first_stage_layers is None else (1,))})


def trainer_phases(
    config: RelaxConfig, model: ModelDimensions, work: Workload, *, stage: int
) -> dict[str, dict[str, int]]:
    """Returns the terms of each phase of a trainer's rank in a pipeline stage, in bytes, without the process."""
    parallel, last = config.parallel, stage == config.parallel.pp - 1
    rows, size = -(-work.micro_batch_rows // parallel.cp), dtype_bytes(config)
    state = state_terms(config, parallel, model, later=stage > 0)
    kept, again, temporary = _layers_bytes(config, model, stage=stage)
    flight = in_flight(parallel, work, stage=stage)
    buffer = rows * model.hidden * size if parallel.sequence_parallel else 0  # gathered rows, made once
    adapted, layers = adapted_parameters(config, parallel, model) * size, stage_layers(parallel, model, later=stage > 0)
    merging = _merging_bytes(config, model)
    held = {
        "activations": round(flight * rows * kept) + buffer,
        "attention mask": round(flight * mask_bytes(config, parallel, work)),
        **(_tower_terms(config, model, work, flight=flight) if stage == 0 else {}),
    }
    if adapted:  # summed again in a recomputed layer
        held["adapted weights"] = 0 if parallel.recompute is Recompute.full else round(flight * layers * adapted)
    matrix = model.vocabulary * model.hidden // parallel.tp
    phases = {"forward": {**state, **held, "temporaries": round(rows * temporary) + merging}}
    if stage == 0 and not held.get("tower activations") and model.patches is not None and work.media is not None:
        of_block = patches_of_rank(parallel, work) * model.patches.block * size
        phases["towers"] = {**state, "features": held["features"], "one tower block": of_block}
    if last:
        phases["head"] = {**state, **held, "logits chunk": head_bytes(config, model, work)}
    waits = last and stage == 0 and model.tied_embeddings and LANGUAGE not in untrained_parts(config)
    waiting = matrix * size if waits else 0
    phases["backward"] = {
        **state,
        **held,
        "one layer again": round(rows * again) + (adapted if parallel.recompute is Recompute.full else 0),
        "temporaries": round(rows * temporary) + max(waiting, merging),
    }
    if stage == 0 and parallel.recompute is Recompute.full and (block := _tower_block(config, model, work)):
        phases["towers backward"] = {**state, **held, **block}
    phases["optimizer"] = {**state, "Adam states of a bucket": _bucket_bytes(config, model, stage=stage)}
    return phases


def _merging_bytes(config: RelaxConfig, model: ModelDimensions) -> int:
    """Returns the temporary memory of the sum of the largest weight and its LoRA factors.

    Weight, product and sum are float32 at the same time (relax_core/weights/lora_merge.py).
    """
    sizes = [matrix.out * matrix.into for matrix in adapted_matrices(config, model)]
    return _SUMMANDS * FLOAT * max(sizes, default=0) // config.parallel.tp


def _bucket_bytes(config: RelaxConfig, model: ModelDimensions, *, stage: int) -> int:
    """Returns the Adam states on the GPU while an update with optimizer.states=host runs over the largest bucket.

    A bucket is one parameter, or several parameters with `UPDATE_BUCKET_ELEMENTS` elements (`HostStates`). Parts of a
    parameter with the distributed optimizer are counted as the whole parameter.
    """
    if not states_leave_gpu(config):
        return 0
    parallel = config.parallel
    feed = 2 * model.feed_forward * model.hidden // parallel.tp
    if model.experts is not None:
        feed = 2 * model.experts.width * model.hidden // parallel.etp
    ends = stage in (0, parallel.pp - 1)
    largest = max(UPDATE_BUCKET_ELEMENTS, feed, model.vocabulary * model.hidden // parallel.tp if ends else 0)
    whole = adam_bytes(config, parallel, model, later=stage > 0)
    return min(whole, largest * optimizer_bytes_a_parameter(config))


def _layers_bytes(config: RelaxConfig, model: ModelDimensions, *, stage: int) -> tuple[float, float, float]:
    """Returns the bytes of a row that all layers of a stage keep, and the largest additional bytes of one layer."""
    layers = stage_layers(config.parallel, model, later=stage > 0)
    delta = layers * model.delta_layers // model.layers
    kinds = [
        (count, layer_bytes(config, model, delta=linear))
        for linear, count in ((False, layers - delta), (True, delta))
        if count
    ]
    fullest = max((layer for _, layer in kinds), key=lambda layer: layer.again + layer.temporary)
    return sum(count * layer.kept for count, layer in kinds), fullest.again, fullest.temporary


def head_bytes(config: RelaxConfig, model: ModelDimensions, work: Workload) -> int:
    """Returns the memory of the backward pass of the output layer (relax_core/train/model/logprobs.py).

    The logits of a chunk are float32, and a copy of them has the model's dtype. The gradient of a trained output weight
    is float32; after the last chunk it is copied to the model's dtype. With tp the gradient of the hidden states is
    float32.
    """
    size, tp = dtype_bytes(config), config.parallel.tp
    tokens = -(-work.micro_batch_tokens // config.parallel.cp)
    chunk, narrow = min(tokens, LOGPROB_CHUNK_ROWS), size != FLOAT
    needs = find_algorithm(config.algo.name).requirements(config.algo)
    logits = model.vocabulary * (FLOAT + (size if narrow else 0) + int(config.rollout.truncates))
    if needs.entropy:  # half of the rows, and a second buffer
        chunk = -(-chunk // 2)
        logits += model.vocabulary * FLOAT
    weight = 0 if LANGUAGE in untrained_parts(config) else model.vocabulary * model.hidden
    largest = weight * FLOAT + max(chunk * logits, weight * size if narrow else 0)
    hidden = tokens * model.hidden * (size + (FLOAT if tp > 1 else size))
    return largest // tp + hidden + chunk * model.hidden * (2 * FLOAT + size)


def _tower_terms(config: RelaxConfig, model: ModelDimensions, work: Workload, *, flight: float) -> dict[str, int]:
    """Returns the memory of a micro-batch's tower activations, and of its features and deepstack rows.

    With full recomputation the blocks keep their inputs; the parts of a block are in `_tower_block`.
    """
    if model.patches is None or work.media is None:
        return {}
    parallel, cost, size = config.parallel, model.patches, dtype_bytes(config)
    frozen, patches = untrained_parts(config), patches_of_rank(parallel, work)
    mergers = 0 if PROJECTOR in frozen else _MERGER * cost.hidden * cost.features // model.hidden
    blocks = 0
    if VISION not in frozen:
        a_block = cost.hidden if parallel.recompute is Recompute.full else cost.block + cost.hidden
        blocks = cost.depth * a_block + cost.inputs + cost.hidden
    kept = blocks + mergers
    features = patches_of_micro_batch(parallel, work) // cost.a_row * cost.features
    return {
        "tower activations": round(flight * patches) * kept * size,
        "features": round(flight * features) * size,
    }


def _tower_block(config: RelaxConfig, model: ModelDimensions, work: Workload) -> dict[str, int]:
    """Returns the memory of the backward pass of one recomputed tower block, and of the gradients of the features.

    The gradients of a block are as wide as its MLP and twice its patches.
    """
    if model.patches is None or work.media is None or VISION in untrained_parts(config):
        return {}
    cost, size, patches = model.patches, dtype_bytes(config), patches_of_rank(config.parallel, work)
    features = patches_of_micro_batch(config.parallel, work) // cost.a_row * cost.features
    return {
        "one tower block again": patches * (cost.block + cost.hidden) * size,
        "temporaries": (patches * (cost.wide + 2 * cost.hidden) + _FEATURE_GRADIENTS * features) * size,
    }
