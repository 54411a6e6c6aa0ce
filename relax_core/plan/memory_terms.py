"""Computes the terms of the memory plan: bytes of weights, gradients, activations, media and transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from relax_core.config.choices import AUDIO, LANGUAGE, PROJECTOR, ROUTER, VISION, Recompute, StatesPlace
from relax_core.config.engine_checks import engine_count
from relax_core.config.model_checks import family_of_run, frozen_parts, untrained_parts
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.kept_tokens import set_bytes
from relax_core.data.generated import MEDIA_FILES
from relax_core.plan.model_dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine
from relax_core.roles.process_placement import actor_columns, sends_factors
from relax_core.rollout.item_cache import CACHE_BYTES
from relax_core.train.hf.stored_weights import passed_bytes
from relax_core.train.micro_batches import MASKLESS_SAVES_PAIRS
from relax_core.train.parallel_layout import LOGPROB_CHUNK_ROWS, Layout, one_rank
from relax_core.weights.transport_choice import choose_transport

MIB, GIB = 1 << 20, 1 << 30
FLOAT = 4  # bytes
FLEX_BLOCK = 128  # rows of a block of FlexAttention
MASK_BOOLS = 3  # bytes for each pair of rows in the bool masks that the attention mask is made from


def size_text(size: int) -> str:
    """Returns a number of bytes in MiB or GiB."""
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.1f} MiB" if size < 100 * MIB else f"{size / MIB:.0f} MiB"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Holds the memory of one phase of a process. ``terms`` maps a purpose of memory to its bytes."""

    name: str
    terms: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Returns the sum of all terms."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class MemoryHolder:
    """Holds the memory phases of ``count`` equal processes or GPUs.

    ``limit`` is the number of bytes that each process or GPU may use, or 0 if they share the machine's memory. ``room``
    is the fix if the memory does not fit.
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
    """Returns the bytes of one number in `model.dtype`."""
    return 2 if config.model.dtype == "bfloat16" else FLOAT


def engine_bytes(config: RelaxConfig) -> int:
    """Returns the bytes of one number in an engine.

    On a CPU an engine of a bfloat16 model may compute in float32; its weights are stored twice in 16 bits.
    """
    half = (config.engine.dtype or config.model.dtype) == "bfloat16" and config.placement.gpus_per_node
    return 2 if half else FLOAT


def optimizer_bytes_a_parameter(config: RelaxConfig) -> int:
    """Returns the bytes of Adam's two moments in float32, plus a float32 master copy for a bfloat16 model."""
    return 12 if config.model.dtype == "bfloat16" else 8


def widens(config: RelaxConfig) -> bool:
    """Returns whether the trainer computes norms and attention in float32 although the model is bfloat16."""
    return dtype_bytes(config) != FLOAT and not config.placement.gpus_per_node


def activation_values(model: ModelDimensions, *, widened: bool = False) -> int:
    """Returns how many numbers per token row a layer saves for the backward pass, without recomputation.

    The count is taken from the tensors that autograd saves in the CPU build (docs/plan.md): two norms with normalized
    input and output; the query, key and value projections, their rotations, and the norms of query and key, if any;
    four tensors of the feed-forward network's width. With ``widened`` (see `widens`) a float32 number counts as two
    numbers.
    """
    hidden, query, key, heads = model.hidden, model.query, model.key, model.heads + model.kv_heads
    attention = norm_values(model, widened=widened) + 4 * query + 3 * key + heads
    if model.qk_norm:
        attention += key + 4 * model.head_dim + heads + (query if model.delta_net is not None else 0)
    if model.output_gate:
        attention += 2 * query
    if widened:  # float32 query, key, value and output next to the bfloat16 output, and the norms of query and key
        attention += 2 * query + key + (3 * (query + key) if model.qk_norm else 0)
    if model.delta_net is not None:
        delta_net = model.delta_net
        linear = norm_values(model, widened=widened) + 4 * delta_net.keys + 6 * delta_net.values
        share = model.delta_layers / model.layers
        attention = round(share * linear + (1 - share) * attention)
    if model.experts is None:
        return attention + 4 * model.feed_forward
    experts = model.experts
    routed = experts.per_token * (4 * experts.width + 2 * hidden)
    return attention + experts.count + routed + 4 * experts.shared_width


def norm_values(model: ModelDimensions, *, widened: bool = False) -> int:
    """Returns how many numbers the two norms of a layer save.

    A model with a gated delta net uses torch's norms, which save their input.

    With ``widened`` the inputs and normalized inputs are float32; the bfloat16 output is saved, too.
    """
    return (4 if model.delta_net is None else 6) * model.hidden * (5 if widened else 2) // 2


def mask_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """Returns the bytes of the attention mask of a micro-batch on one rank.

    A CPU uses a float32 mask. A GPU uses a block mask with four int32 for each pair of blocks: FlexAttention's lists of
    partial and full blocks, by query and by key.
    """
    if config.placement.gpus_per_node:
        blocks = -(-work.micro_batch_rows // FLEX_BLOCK)
        return 4 * 4 * blocks * -(-blocks // parallel.cp)
    return _mask_pairs(parallel, work) // parallel.cp * FLOAT


def mask_making_bytes(config: RelaxConfig, parallel: ParallelConfig, work: Workload) -> int:
    """Returns the temporary bytes to construct a mask; 0 for a block mask."""
    return 0 if config.placement.gpus_per_node else _mask_pairs(parallel, work) // parallel.cp * MASK_BOOLS


def _mask_pairs(parallel: ParallelConfig, work: Workload) -> int:
    """Returns the number of row pairs in the masks on a CPU, one square mask for each group.

    With context parallelism a mask is assumed. Otherwise a mask is used only if attention without it saves little
    (relax_core/train/model/branch_attention.py).
    """
    rows, branch, prompt = work.micro_batch_rows, work.episode_rows - work.prompt_tokens, work.prompt_tokens
    line = min(rows, work.group_rows)
    pairs, branches = rows * line, line - prompt
    needed = -(-rows // line) * (prompt * (prompt // 2 + branches) + branches * branch // 2)
    return 0 if parallel.cp == 1 and pairs - needed > MASKLESS_SAVES_PAIRS else pairs


def head_bytes(config: RelaxConfig, model: ModelDimensions, work: Workload, *, split: int = 1) -> int:
    """Returns the bytes of the logits of one chunk in float32, and of the output weight's gradient.

    ``split`` is the number of tp ranks. In bfloat16 a CPU also needs a float32 copy of the weight, and a GPU needs a
    bfloat16 copy of the chunk for matrix products.
    """
    rows = min(work.micro_batch_tokens, LOGPROB_CHUNK_ROWS)
    chunk = rows * model.vocabulary * (FLOAT + int(config.rollout.truncates))  # a bool for each logit
    weight = model.vocabulary * model.hidden * FLOAT
    copy = 0
    if dtype_bytes(config) != FLOAT:
        copy = rows * model.vocabulary * dtype_bytes(config) if config.placement.gpus_per_node else weight
    return (chunk + weight + copy) // split


# names of media terms; glibc reuses their memory
OF_MEDIA = ("tower activations", "one tower block", "features", "frames")
FEATURE_COPIES = 2  # the towers' outputs of all items, and the output rows that this rank uses


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Holds the parameter counts of one rank.

    ``dense`` parameters are divided by tp (routers are not) and pp, ``experts`` by ep, etp and pp; ``whole`` parameters
    (the vision and audio towers) are on every rank of the first stage.
    """

    dense: int
    experts: int
    whole: int

    @property
    def parameters(self) -> int:
        """Returns the number of all parameters of the rank."""
        return self.dense + self.experts + self.whole


def trained_share(
    config: RelaxConfig, layout: Layout, model: ModelDimensions, *, later: bool = False
) -> RankParameters:
    """Returns the parameters of a rank with gradients: LoRA factors, or those of `share_of` that are not frozen."""
    if config.model.lora.rank:
        return RankParameters(dense=factor_parameters(config, layout, model, later=later), experts=0, whole=0)
    frozen = frozen_parts(config)
    share = share_of(layout, model, later=later)
    towers: Mapping[str, int] = {} if later else model.towers
    projectors = {"vision": model.projector, "audio": model.audio_projector}
    routers = model.router_parameters * stage_layers(layout, model, later=later) // model.layers
    language = 0 if LANGUAGE in frozen else share.dense - routers
    whole = share.whole - (PROJECTOR in frozen) * sum(projectors[part] for part in towers)
    whole -= sum(towers[part] - projectors[part] for part in (VISION, AUDIO) if part in frozen and part in towers)
    return RankParameters(
        dense=language + (0 if ROUTER in frozen else routers),
        experts=0 if LANGUAGE in frozen else share.experts,
        whole=whole,
    )


@dataclass(frozen=True, kw_only=True)
class AdaptedMatrix:
    """Holds the size of a linear layer with LoRA factors, and the number of layers of the model that have it.

    Tensor parallelism divides ``out`` if ``columns`` is True, else ``into``.
    """

    layers: int
    out: int
    into: int
    columns: bool


def adapted_matrices(config: RelaxConfig, model: ModelDimensions) -> list[AdaptedMatrix]:
    """Returns the linear layers with LoRA factors; empty without LoRA."""
    if not config.model.lora.rank:
        return []
    wide = model.feed_forward if model.experts is None else model.experts.shared_width
    queries = model.query * (2 if model.output_gate else 1)
    attention, every, hidden = model.full_attention_layers, model.layers, model.hidden
    sizes = {
        "q_proj": AdaptedMatrix(layers=attention, out=queries, into=hidden, columns=True),
        "k_proj": AdaptedMatrix(layers=attention, out=model.key, into=hidden, columns=True),
        "v_proj": AdaptedMatrix(layers=attention, out=model.key, into=hidden, columns=True),
        "o_proj": AdaptedMatrix(layers=attention, out=hidden, into=model.query, columns=False),
        "gate_proj": AdaptedMatrix(layers=every, out=wide, into=hidden, columns=True),
        "up_proj": AdaptedMatrix(layers=every, out=wide, into=hidden, columns=True),
        "down_proj": AdaptedMatrix(layers=every, out=hidden, into=wide, columns=False),
    }
    return [size for name, size in sizes.items() if name in config.model.lora.targets and size.out and size.into]


def factor_parameters(config: RelaxConfig, layout: Layout, model: ModelDimensions, *, later: bool = False) -> int:
    """Returns the number of a rank's LoRA factors; tensor parallelism divides one factor of each layer."""
    numbers = 0
    for matrix in adapted_matrices(config, model):
        out, into = (layout.tp, 1) if matrix.columns else (1, layout.tp)
        numbers += matrix.layers * (matrix.out // out + matrix.into // into)
    return numbers * config.model.lora.rank * stage_layers(layout, model, later=later) // model.layers


def adapted_parameters(config: RelaxConfig, layout: Layout, model: ModelDimensions) -> int:
    """Returns the numbers of a rank's adapted weights in a layer with attention.

    An adapted weight is the sum of a weight and its factors. The backward pass needs it.
    """
    return sum(matrix.out * matrix.into for matrix in adapted_matrices(config, model)) // layout.tp


def stage_layers(layout: Layout, model: ModelDimensions, *, later: bool = False) -> int:
    """Returns the number of layers of the first pipeline stage, or with ``later`` of any other stage."""
    first = layout.first_stage_layers if isinstance(layout, ParallelConfig) else None
    if first is None:
        return model.layers // layout.pp
    return (model.layers - first) // (layout.pp - 1) if later else first


def stages_of(parallel: ParallelConfig) -> tuple[bool, ...]:
    """Returns the values of ``later`` for the stages that may have the peak.

    These are the first stage, and a later stage with more layers.
    """
    return (False,) if parallel.first_stage_layers is None else (False, True)


def share_of(layout: Layout, model: ModelDimensions, *, later: bool = False) -> RankParameters:
    """Returns the share of a rank of the first stage.

    It is the largest share if all stages have equally many layers.

    With ``later`` returns the share of a rank of the last stage, which has no towers.
    """
    # with several stages, the first and the last stage have one matrix each
    matrices = model.embedding_matrices if layout.pp == 1 else 1
    embeddings = matrices * model.vocabulary * model.hidden
    layers = stage_layers(layout, model, later=later)
    routers = model.router_parameters * layers // model.layers  # every tp rank has them
    return RankParameters(
        dense=(model.layer_parameters * layers // model.layers - routers + embeddings) // layout.tp + routers,
        experts=model.expert_parameters * layers // (model.layers * layout.ep * layout.etp),
        whole=0 if later else model.tower_parameters,
    )


def state_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, *, later: bool = False
) -> dict[str, int]:
    """Returns the memory of a training rank of the first stage, or with ``later`` of the last stage, between steps.

    On a GPU it is the GPU's memory, which has no Adam states with optimizer.states=host.
    """
    trained = trained_share(config, parallel, model, later=later)
    factors = factor_parameters(config, parallel, model, later=later)
    return {
        "weights": (share_of(parallel, model, later=later).parameters + factors) * dtype_bytes(config),
        "gradients": trained.parameters * FLOAT,
        "Adam states": 0 if states_leave_gpu(config) else adam_bytes(config, parallel, model, later=later),
    }


def exchanges_reference(config: RelaxConfig) -> bool:
    """Returns whether the actor's ranks keep the reference's weights, to compute its log-probs."""
    return c.REFERENCE_LOGPROBS in actor_columns(config) and not config.model.lora.rank


def states_leave_gpu(config: RelaxConfig) -> bool:
    """Returns whether master weights and moments are in host memory, and the trainer on a GPU."""
    return config.optimizer.states is StatesPlace.host and config.placement.gpus_per_node > 0


def adam_bytes(config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, *, later: bool = False) -> int:
    """Returns the bytes of master weights and moments of the rank of `state_terms`, on the GPU or on the host."""
    trained = trained_share(config, parallel, model, later=later)
    copies = expert_copies = 1
    if parallel.distributed_optimizer:
        copies = parallel.dp * parallel.cp
        expert_copies = parallel.tp * parallel.cp * parallel.dp // (parallel.ep * parallel.etp)
    of_adam = (trained.dense + trained.whole) // copies + trained.experts // expert_copies
    return of_adam * optimizer_bytes_a_parameter(config)


def activation_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload, *, later: bool = False
) -> dict[str, int]:
    """Returns the memory of the backward passes of a rank of the first stage, or with ``later`` of the second stage."""
    size, cp = dtype_bytes(config), parallel.cp
    flight = in_flight(parallel, work, stage=int(later))
    rows = work.micro_batch_rows // cp
    layers = stage_layers(parallel, model, later=later)
    a_layer = rows * row_values(config, parallel, model) * size
    if parallel.recompute is Recompute.full:  # saved: the input of each layer, and the activations of one layer
        inputs = rows * model.hidden * size // (parallel.tp if parallel.sequence_parallel else 1)
        activations = round(flight * layers * inputs) + a_layer
    else:
        activations = round(flight * layers * a_layer)
    terms = {"activations": activations, "attention mask": round(flight * mask_bytes(config, parallel, work))}
    if adapted := adapted_parameters(config, parallel, model) * size:
        terms["adapted weights"] = adapted if parallel.recompute is Recompute.full else round(flight * layers * adapted)
    return terms if later else terms | _tower_terms(config, parallel, model, work, flight=flight)


def _tower_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload, *, flight: float
) -> dict[str, int]:
    """Returns the memory of a micro-batch's tower activations, features, deepstack rows and mapped frames."""
    if model.patches is None or work.media is None:
        return {}
    cost, size, patches = model.patches, dtype_bytes(config), patches_of_rank(parallel, work)
    kept = cost.values(recomputed=parallel.recompute is Recompute.full, frozen=untrained_parts(config))
    features = patches_of_micro_batch(parallel, work) // cost.a_row * cost.features
    return {
        "tower activations": round(flight * patches) * kept * size + (0 if kept else patches * cost.block * size),
        "features": round(flight * FEATURE_COPIES * features) * size,
        "frames": round(work.media_prompts * work.media.nbytes),
    }


def patches_of_micro_batch(parallel: ParallelConfig, work: Workload) -> int:
    """Returns the largest number of patches that pass a rank's tower together.

    They are the patches of several prompts, or of one larger prompt: a prompt is never split, so
    `parallel.micro_batch_patches` does not bound a single prompt.
    """
    if work.media is None:
        return 0
    of_prompts = min(parallel.micro_batch_patches, round(work.media_prompts * work.media.patches))
    return max(of_prompts, work.media.most_patches)


def patches_of_rank(parallel: ParallelConfig, work: Workload) -> int:
    """Returns the largest number of a micro-batch's patches on one rank's tower; an item is never split."""
    patches = patches_of_micro_batch(parallel, work)
    if work.media is None or not parallel.shard_media:
        return patches
    return max(-(-patches // (parallel.tp * parallel.cp)), work.media.item_patches)


def row_values(config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions) -> int:
    """Returns how many numbers of the model's dtype a layer saves per token row on one rank.

    Tensor parallelism divides heads and widths. Only sequence parallelism divides the norms' rows.
    """
    widened = widens(config)
    every, norms = activation_values(model, widened=widened), norm_values(model, widened=widened)
    return (every - norms) // parallel.tp + norms // (parallel.tp if parallel.sequence_parallel else 1)


def forward_terms(
    config: RelaxConfig, parallel: ParallelConfig, model: ModelDimensions, work: Workload
) -> dict[str, int]:
    """Returns the memory of a micro-batch on a forward-only rank."""
    size = dtype_bytes(config)
    terms = {
        "one layer": work.micro_batch_rows // parallel.cp * row_values(config, parallel, model) * size,
        "attention mask": mask_bytes(config, parallel, work) + mask_making_bytes(config, parallel, work),
    }
    if model.patches is not None and work.media is not None:
        cost, patches = model.patches, patches_of_micro_batch(parallel, work)
        terms["one tower block"] = patches_of_rank(parallel, work) * (cost.block + cost.inputs) * size
        terms["features"] = FEATURE_COPIES * patches // cost.a_row * cost.features * size
        terms["frames"] = round(work.media_prompts * work.media.nbytes)
    return terms


def in_flight(parallel: ParallelConfig, work: Workload, *, stage: int = 0) -> float:
    """Returns the number of micro-batches with activations on a stage, in 1F1B or the interleaved schedule.

    The interleaved schedule counts chunks: those of the warm-up, and one more.
    """
    behind = parallel.pp - 1 - stage
    if parallel.vpp == 1:
        return min(behind + 1, work.micro_batches)
    chunks = 2 * behind + (parallel.vpp - 1) * parallel.pp + 1
    return min(chunks / parallel.vpp, work.micro_batches)


ENCODE_WORKER = 51  # MiB of an encode worker process after its imports
STAMP_TOKENIZER = 17  # additional MiB for the tokenizer, which tokenizes the time stamps of videos
SOUNDS = 40  # additional MiB at most to decode a sound of 30 s and compute its features
ENCODE_BYTES_A_PIXEL = 14  # for a source that is decoded and resized (docs/media.md)


def engine_media_terms(config: RelaxConfig, model: ModelDimensions, work: Workload) -> dict[str, int]:
    """Returns the memory of the tower features that an engine keeps, and of the largest item's pass through the tower.

    An engine keeps features for one weight version, so only prompts that are sampled with this version have features.
    """
    if model.patches is None or work.media is None:
        return {}
    cost, media, size = model.patches, work.media, engine_bytes(config)
    prompts = config.mode.versions_in_flight * work.groups + (config.eval.rows if config.eval.every else 0)
    features = round(prompts * media.patches) // cost.a_row * cost.features * size
    return {
        "tower features": min(features, find_engine(config.engine.name).feature_mib * MIB),
        "one tower block": media.item_patches * (cost.block + cost.inputs) * size,
    }


def shared_item_bytes(config: RelaxConfig, work: Workload, *, rollout_workers: int, data_rows: int | None) -> int:
    """Returns the bytes of encoded items in shared memory.

    This is the limit of the caches, or the size of all items if it is smaller.

    Items of prompts in flight are kept even beyond `CACHE_BYTES`. An item is one file, named by its digest, which all
    workers and prompts share.
    """
    media = work.media
    if media is None:
        return 0
    versions, rollout = config.mode.versions_in_flight, config.rollout
    in_flight = round(versions * (work.groups + rollout.spare_prompts) * media.nbytes)
    kept = max(rollout_workers * CACHE_BYTES, in_flight)
    if data_rows is None or media.prompts == 0 or not media.items:
        return kept
    trained = (config.run.steps + versions - 1) * (work.groups + rollout.spare_prompts)
    asked = {"train": min(data_rows, trained), "eval": config.eval.rows if config.eval.every else 0}
    drawn = {split: prompts * media.items for split, prompts in asked.items()}
    files = MEDIA_FILES.get(config.data.task or "", {})
    items = sum(_distinct(count, files.get(split)) for split, count in drawn.items())
    return min(kept, round(items * media.nbytes / media.items))


def _distinct(drawn: float, files: int | None) -> float:
    """Returns the expected number of different items if ``drawn`` items are drawn from ``files`` files.

    If ``files`` is None, all items are different.
    """
    return drawn if files is None else files * (1 - (1 - 1 / files) ** drawn)


def encode_worker_bytes(work: Workload) -> int:
    """Returns the memory of one encode worker process."""
    assert work.media is not None, "only a run with images or videos has such processes"
    own = ENCODE_WORKER + (STAMP_TOKENIZER if work.media.videos else 0) + (SOUNDS if work.media.sounds else 0)
    return own * MIB + ENCODE_BYTES_A_PIXEL * work.media.source_pixels


VERSIONS_KEPT = 2  # number of published weight versions that are kept (weights/publisher.py)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Holds the bytes that a run sends and stores.

    ``sync_bytes`` is the size of one published weight version, which every receiver reads. ``published_bytes`` is the
    size of all kept versions. ``checkpoint_bytes`` is the size of one checkpoint, and ``checkpoints_kept`` the number
    of kept checkpoints. ``transport`` is the name of the transport to the engines, and ``transport_reason`` the reason
    for it. ``kept_set_bytes`` is the largest size of one sampled token's kept set, and ``kept_step_bytes`` the largest
    size of all kept sets of a train step; both are 0 if sampling does not truncate. ``passed_bytes`` is the size of the
    unused tensors that each export copies from the model's folder.
    """

    transport: str
    transport_reason: str
    sync_bytes: int
    receivers: int
    published_bytes: int
    checkpoint_bytes: int
    checkpoints_kept: int
    kept_set_bytes: int
    kept_step_bytes: int
    passed_bytes: int


def find_transfers(
    config: RelaxConfig, requirements: Requirements, *, model: ModelDimensions, work: Workload
) -> Transfers:
    """Returns the bytes that a run sends and stores.

    A checkpoint has the model's weights, with LoRA only the factors, and the Adam states of the trained weights. The
    weights and states of a critic are also in it.
    """
    base = model.parameters * dtype_bytes(config)
    sync = factor_parameters(config, one_rank(config.parallel), model) * dtype_bytes(config)
    sync, once = (sync, base) if sends_factors(config) else (base, 0)
    checkpoint = _checkpoint_bytes(config, model)
    if requirements.critic:
        checkpoint += _checkpoint_bytes(without_lora(config), model)
    choice = choose_transport(config)
    rollout, kept = config.rollout, 0
    if rollout.truncates:
        most = min(rollout.top_k, model.vocabulary) if rollout.top_k > 0 else model.vocabulary
        kept = set_bytes(most, vocab_size=model.vocabulary)
    return Transfers(
        transport=choice.name.value,
        transport_reason=choice.reason,
        sync_bytes=sync,
        receivers=engine_count(config) + (requirements.old_logprobs == "actor_fwd"),
        published_bytes=once + (VERSIONS_KEPT + 1) * sync,  # the next version is written before the oldest is removed
        checkpoint_bytes=checkpoint,
        checkpoints_kept=config.run.keep_last,
        kept_set_bytes=kept,
        kept_step_bytes=kept * work.groups * work.group_size * work.new_tokens,
        passed_bytes=_copied_bytes(config),
    )


def _checkpoint_bytes(config: RelaxConfig, model: ModelDimensions) -> int:
    learnt = trained_share(config, one_rank(config.parallel), model).parameters
    saved = learnt if config.model.lora.rank else model.parameters
    return saved * dtype_bytes(config) + learnt * optimizer_bytes_a_parameter(config)


def without_lora(config: RelaxConfig) -> RelaxConfig:
    """Returns the configuration of a critic, which trains all its weights."""
    return replace(config, model=replace(config.model, lora=replace(config.model.lora, rank=0)))


def _copied_bytes(config: RelaxConfig) -> int:
    family = family_of_run(config)
    if family is None or config.model.path is None:
        return 0
    try:
        return passed_bytes(Path(config.model.path), family.copied_prefixes)
    except (ValueError, OSError):
        return 0  # the folder's check reports it
