"""Estimates the seconds of a train step on GPUs, from operations, bytes and messages, and the data sheet of the GPU.

A pass of the trainer takes its operations at a share of the GPU's rate, and its messages at a share of the link's rate.
Nothing overlaps. A decode step takes the longer of its bytes at a share of the memory's rate and its operations at a
share of the GPU's rate, and also a fixed time for each layer, for each message and for the step.

The shares and fixed times are efficiencies of measured systems, not limits of the hardware: `benchmarks.step_time`
fitted them to published step times, and reports the error of each row. Not estimated: rewards, environments,
evaluations, checkpoints, messages between pipeline stages and of context parallelism, critics and teachers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_core.config.choices import ModeName, Recompute
from relax_core.config.engine_checks import engine_count
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.tree import TokenTree
from relax_core.plan.gpu_models import GPU_MODELS, GpuModel
from relax_core.plan.memory_terms import (
    GIB,
    adam_bytes,
    dtype_bytes,
    engine_bytes,
    exchanges_reference,
    state_terms,
    states_leave_gpu,
)
from relax_core.plan.model_dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.roles.process_placement import engines_take_gpus, forward_columns, worker_group_layouts
from relax_core.train.parallel_layout import Layout, world_size

_MULTIPLY_ADD = 2
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # of an attention kernel, in query x key products
_GRADIENTS, _WEIGHTS = 4, 2  # bytes of a number
_UPDATE_BYTES = (
    3 * 8 + 4 + 2
)  # a parameter: read and write master copy and moments, read the gradient, write the weight
_HEAD_PRODUCTS = 4  # of the output layer in a train step: logits, logits again in the backward pass, two gradients
_GATHERED_AGAIN = 1.5  # backward / forward messages: sequence parallelism gathers the inputs again
_INTERVALS = 48  # points in a rollout's length, for the integral over its decode steps


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Holds the shares of a data sheet's rates that measured systems reach, and fixed times in seconds.

    ``dense`` and ``experts`` are shares of ``flops`` in a trainer's passes, ``decode`` in a decode step. ``memory`` is
    the share of the memory's rate in a decode step, and ``link`` that of all links. A decode step takes ``layer_s`` for
    each layer, ``message_s`` for each message within a machine, and ``step_s``.
    """

    dense: float = 0.40
    experts: float = 0.25
    decode: float = 0.40
    memory: float = 0.35
    link: float = 0.70
    layer_s: float = 25e-6
    message_s: float = 12e-6
    step_s: float = 1e-3


EFFICIENCY = Efficiency()
_NETWORK_MESSAGES = 3  # a message to another machine takes as long as this many


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Holds the token rows of a train step on all data-parallel ranks.

    A row attends to ``keys`` rows on average. ``head`` rows have logits. The towers' work counts as ``towers`` rows of
    the language model. ``micro_batches`` are those of one data-parallel rank in the step, in ``updates`` updates.
    """

    total: float
    keys: float
    head: float
    micro_batches: float
    updates: int = 1
    towers: float = 0.0


def rows_of_trees(trees: Sequence[TokenTree], *, micro_batches: int = 1) -> Rows:
    """Returns the rows of a step of ``micro_batches`` equal micro-batches with these groups."""
    total = keys = head = 0.0
    for tree in trees:
        prompt = int((~tree.loss_mask).sum())
        lengths = [turn.end - turn.start - 1 for episode in tree.episodes for turn in episode.turns]
        total += prompt + sum(lengths)
        keys += prompt * prompt / 2 + sum(length * (prompt + length / 2) for length in lengths)
        head += sum(length + 1 for length in lengths)
    return Rows(total=micro_batches * total, keys=keys / total, head=micro_batches * head, micro_batches=micro_batches)


@dataclass(frozen=True, kw_only=True)
class PassSeconds:
    """Holds the seconds of a role's passes over a train step.

    ``compute`` are those of operations, ``messages`` of tensor and expert parallelism, ``idle`` of the pipeline's start
    and end, and ``update`` of gradients, optimizer, gathered weights and states on the host.
    """

    compute: float
    messages: float
    idle: float
    update: float

    @property
    def total(self) -> float:
        """Returns the sum."""
        return self.compute + self.messages + self.idle + self.update


def pass_flops(model: ModelDimensions, rows: Rows, *, trained: bool, recompute: bool = False) -> float:
    """Returns the floating-point operations of all ranks for a forward pass, or for forward and backward passes."""
    layers = (rows.total + rows.towers) * model.row_products
    scores = rows.total * model.full_attention_layers * model.query * rows.keys
    head = rows.head * model.vocabulary * model.hidden
    forward = layers + _FORWARD_PRODUCTS * scores
    if not trained:
        return _MULTIPLY_ADD * (forward + head)
    backward = 2 * layers + _BACKWARD_PRODUCTS * scores
    return _MULTIPLY_ADD * (forward + backward + _HEAD_PRODUCTS * head + (forward if recompute else 0))


@dataclass(frozen=True, kw_only=True)
class MessageBytes:
    """Holds the bytes that one rank sends in its layers for ``tensor`` and ``expert`` parallelism."""

    tensor: float
    expert: float


def message_bytes(
    model: ModelDimensions, layout: Layout, rows: Rows, *, trained: bool, recompute: bool = False
) -> MessageBytes:
    """Returns the bytes of a step's messages, with even routing of rows to experts.

    An all-reduce is a reduce-scatter and an all-gather over a ring.
    """
    message = rows.total / layout.dp / layout.cp * model.hidden * _WEIGHTS
    forwards, layers = 1 + (trained and recompute), model.layers / layout.pp
    backward = (_GATHERED_AGAIN if getattr(layout, "sequence_parallel", False) else 1.0) if trained else 0.0
    tensor = (forwards + backward) * layers * _reductions(model) * _ring(layout.tp) * message
    expert = 0.0
    if model.experts is not None:
        routed = model.experts.per_token * message / layout.tp * (layout.ep - 1) / layout.ep
        expert = (forwards + trained) * layers * 2 * routed  # to the experts and back
    return MessageBytes(tensor=tensor, expert=expert)


def _reductions(model: ModelDimensions) -> int:
    """Returns the all-reduces of tensor parallelism in a layer's forward pass; rows reach experts in other messages."""
    return 2 if model.experts is None or model.experts.shared_width else 1


def pass_seconds(
    model: ModelDimensions,
    gpu: GpuModel,
    layout: Layout,
    rows: Rows,
    *,
    gpus_per_node: int,
    trained: bool,
    recompute: bool = False,
    sharded_optimizer: bool = False,
    host_states: float = 0.0,
    efficiency: Efficiency = EFFICIENCY,
) -> PassSeconds:
    """Returns the seconds of the passes of one role with ``layout`` over the rows of a train step.

    ``trained`` adds backward passes and updates; ``recompute`` means that layers compute their forward pass again. The
    ranks of a data-parallel replica take neighbouring GPUs. ``host_states`` are the bytes of a rank's Adam states that
    each update copies from the host to the GPU and back.
    """
    share = efficiency.experts if model.experts else efficiency.dense
    ranks = world_size(layout)
    flops = pass_flops(model, rows, trained=trained, recompute=recompute)
    compute = flops / ranks / (gpu.flops * share)
    inside, outside = gpu.link * efficiency.link, gpu.network * efficiency.link
    sent = message_bytes(model, layout, rows, trained=trained, recompute=recompute)
    messages = sent.tensor / (inside if layout.tp <= gpus_per_node else outside)
    messages += sent.expert / (inside if layout.ep * layout.etp <= gpus_per_node else outside)
    vpp = getattr(layout, "vpp", 1)
    idle = (compute + messages) * (layout.pp - 1) / vpp / max(1.0, rows.micro_batches)
    update = 0.0
    if trained:
        replicas = layout.dp * layout.cp
        parameters = rank_parameters(model, layout)
        rate = inside if layout.tp * replicas <= gpus_per_node else outside
        reduced = parameters * _ring(replicas) * _GRADIENTS
        if sharded_optimizer:
            reduced = parameters * _ring(replicas) / 2 * (_GRADIENTS + _WEIGHTS)
        stepped = parameters / (replicas if sharded_optimizer else 1)
        copied = 2 * host_states / (gpu.host * efficiency.link)
        stepped_s = stepped * _UPDATE_BYTES / (gpu.bandwidth * efficiency.memory)
        update = rows.updates * (reduced / rate + stepped_s + copied)
    return PassSeconds(compute=compute, messages=messages, idle=idle, update=update)


def rank_parameters(model: ModelDimensions, layout: Layout) -> float:
    """Returns the parameters of a mean rank; the first and last stage have more of them."""
    dense = (model.parameters - model.expert_parameters) / layout.tp
    return (dense + model.expert_parameters / (layout.ep * layout.etp)) / layout.pp


def _ring(ranks: int) -> float:
    """Returns how many times a rank sends its tensor in an all-reduce over a ring."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Describes the engines of a rollout: ``tp`` GPUs of each, and the samples that one engine decodes together.

    ``size`` are the bytes of a number of weights and KV cache.
    """

    count: int
    tp: int
    max_running: int
    size: int = 2


def decode_step_seconds(
    model: ModelDimensions,
    gpu: GpuModel,
    engines: Engines,
    *,
    running: float,
    context: float,
    gpus_per_node: int,
    efficiency: Efficiency = EFFICIENCY,
) -> float:
    """Returns the seconds of a decode step: one token for each of ``running`` samples of ``context`` tokens."""
    tp, size = engines.tp, engines.size
    weights = float(model.layer_parameters + model.vocabulary * model.hidden)
    if model.experts is not None:
        unused = (1 - model.experts.per_token / model.experts.count) ** running  # with even routing
        weights += model.expert_parameters * (1 - unused)
    cache = running * context * model.cache_values_per_token * size / min(tp, model.kv_heads)
    states = running * 2 * model.state_bytes_per_sample(size) / tp
    attention = _FORWARD_PRODUCTS * model.full_attention_layers * model.query * context
    products = running * (model.row_products + attention + model.vocabulary * model.hidden) / tp
    of_bytes = (weights * size / tp + cache + states) / (gpu.bandwidth * efficiency.memory)
    of_products = _MULTIPLY_ADD * products / (gpu.flops * efficiency.decode)
    fixed = model.layers * efficiency.layer_s + efficiency.step_s
    if tp > 1:
        near = tp <= gpus_per_node
        sent = _ring(tp) * running * model.hidden * size
        rate = (gpu.link if near else gpu.network) * efficiency.link
        each = efficiency.message_s * (1 if near else _NETWORK_MESSAGES) + sent / rate
        fixed += 2 * model.layers * each
    return max(of_bytes, of_products) + fixed


def prefill_seconds(
    model: ModelDimensions,
    gpu: GpuModel,
    engines: Engines,
    *,
    rows: float,
    keys: float,
    efficiency: Efficiency = EFFICIENCY,
) -> float:
    """Returns the seconds of the prefill of ``rows`` rows of prompts, divided over all engines."""
    read = Rows(total=rows, keys=keys, head=0, micro_batches=1)
    share = efficiency.experts if model.experts else efficiency.dense
    return pass_flops(model, read, trained=False) / (engines.count * engines.tp) / (gpu.flops * share)


def batch_rollout_seconds(
    model: ModelDimensions,
    gpu: GpuModel,
    engines: Engines,
    *,
    samples: float,
    prompt: float,
    mean: float,
    longest: float,
    gpus_per_node: int,
    efficiency: Efficiency = EFFICIENCY,
) -> float:
    """Returns the seconds until all ``samples`` have ended, if all start together.

    Responses have ``mean`` tokens on average and at most ``longest``. The share of samples with more than t tokens is
    1 - (t / longest) ** a, which has that mean for a = mean / (longest - mean).
    """
    on_engine, found = samples / engines.count, 0.0
    for interval in range(_INTERVALS):
        place = (interval + 0.5) / _INTERVALS
        alive = 1.0 if mean >= longest else 1 - place ** (mean / (longest - mean))
        left = max(1.0, on_engine * alive)
        running = min(left, engines.max_running)
        step = decode_step_seconds(
            model,
            gpu,
            engines,
            running=running,
            context=prompt + place * longest,
            gpus_per_node=gpus_per_node,
            efficiency=efficiency,
        )
        found += longest / _INTERVALS * step * left / running
    return found


def steady_rollout_seconds(
    model: ModelDimensions,
    gpu: GpuModel,
    engines: Engines,
    *,
    samples: float,
    running: float,
    prompt: float,
    mean: float,
    gpus_per_node: int,
    efficiency: Efficiency = EFFICIENCY,
) -> float:
    """Returns the seconds of ``samples`` samples if each engine always decodes ``running`` samples."""
    running = min(running, engines.max_running)
    step = decode_step_seconds(
        model,
        gpu,
        engines,
        running=running,
        context=prompt + mean / 2,
        gpus_per_node=gpus_per_node,
        efficiency=efficiency,
    )
    return samples * mean * step / (engines.count * running)


# -- A run ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Holds the estimated seconds of a phase, the tokens that it samples or trains in this time, and an explanation."""

    name: str
    seconds: float
    tokens: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Holds the estimate of a train step, for responses of maximal length.

    ``alternates`` is True if the phases run one after the other. ``of_actor`` names the phases on the actor's GPUs,
    which always run one after the other. ``tokens`` are the sampled tokens of a step, and
    ``gpus`` all GPUs of the run.
    """

    gpu: str
    gpus: int
    alternates: bool
    of_actor: Sequence[str]
    tokens: int
    phases: Sequence[PhaseTime]
    not_estimated: Sequence[str]

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step: the sum of alternating phases, else the longest of rollout and trainer."""
        times = {phase.name: phase.seconds for phase in self.phases}
        if self.alternates:
            return sum(times.values())
        weights = times.pop(WEIGHTS_PHASE, 0.0)
        trainer = sum(times.pop(name) for name in self.of_actor)
        return max(trainer, *times.values()) + weights


ROLLOUT_PHASE, TRAIN_PHASE, WEIGHTS_PHASE, STATE_PHASE = "rollout", "train", "weights", "trainer state"
_NOT_ESTIMATED = ("critic", "teacher", "teacher_engine", "judge_engine")  # roles


def estimate_step(
    config: RelaxConfig, model: ModelDimensions, work: Workload, roles: Mapping[str, int]
) -> StepTime | None:
    """Returns the estimate for a run on GPUs of a known model, with engines on GPUs or without engines; else None."""
    placement = config.placement
    if placement.gpu is None or not placement.gpus_per_node:
        return None
    if engine_count(config) and not engines_take_gpus(config):
        return None
    gpu, node = GPU_MODELS[placement.gpu], placement.gpus_per_node
    samples = work.groups * work.group_size
    tokens, branch = samples * work.new_tokens, work.episode_rows - work.prompt_tokens
    towers = 0.0
    if work.media is not None:
        towers = work.groups * model.tower_work(patches=work.media.patches, audio_frames=work.media.audio_frames)
    of_prompts = work.groups * work.prompt_tokens * work.prompt_tokens / 2
    of_branches = samples * branch * (work.prompt_tokens + branch / 2)
    once = work.groups * work.group_rows
    repeats = 1 / (1 - work.repeated_share)
    rows = Rows(
        total=once * repeats,
        keys=(of_prompts + of_branches) / once,
        head=tokens,
        micro_batches=work.micro_batches,
        updates=config.algo.mini_batches,
        towers=towers * repeats,
    )
    alternates = config.mode.name is ModeName.colocate or config.mode.versions_in_flight == 1
    has_engines = engine_count(config) > 0
    phases = [_rollout(config, model, gpu, work, towers=towers, alternates=alternates)] if has_engines else []
    layouts = worker_group_layouts(config)
    of_actor = [role for role in forward_columns(config) if role not in layouts]
    for role, layout in (layouts | dict.fromkeys(of_actor, config.parallel)).items():
        trained = role == "actor"
        seconds = pass_seconds(
            model,
            gpu,
            layout,
            rows,
            gpus_per_node=node,
            trained=trained,
            recompute=trained and config.parallel.recompute is Recompute.full,
            sharded_optimizer=config.parallel.distributed_optimizer,
            host_states=adam_bytes(config, config.parallel, model) if trained and states_leave_gpu(config) else 0,
        )
        exchanges = 2 if role == "reference" and exchanges_reference(config) else 0
        bytes_moved = 2 * exchanges * rank_parameters(model, layout) * dtype_bytes(config)  # to the host and back
        exchange = bytes_moved / (gpu.host * EFFICIENCY.link)
        phases.append(_pass_phase(TRAIN_PHASE if trained else role, seconds, exchange=exchange, tokens=tokens))
    if has_engines:
        phases.append(_weights(config, model, gpu))
    if has_engines and config.mode.name is ModeName.colocate:
        phases.append(_state(config, model, gpu))
    return StepTime(
        gpu=placement.gpu.value,
        gpus=placement.nodes * node if not placement.roles else sum(placement.roles.values()),
        alternates=alternates,
        of_actor=[TRAIN_PHASE, *of_actor],
        tokens=tokens,
        phases=phases,
        not_estimated=[role for role in roles if role in _NOT_ESTIMATED],
    )


def _rollout(
    config: RelaxConfig, model: ModelDimensions, gpu: GpuModel, work: Workload, *, towers: float, alternates: bool
) -> PhaseTime:
    engines = Engines(
        count=config.engine.count,
        tp=config.engine.tp,
        max_running=work.samples_in_flight,
        size=engine_bytes(config),
    )
    node, samples = config.placement.gpus_per_node, work.groups * work.group_size
    context, new = work.prompt_tokens + work.observed_tokens, work.new_tokens
    running = min(work.samples_in_flight, samples / engines.count) if alternates else work.samples_in_flight
    if alternates:
        seconds = batch_rollout_seconds(
            model, gpu, engines, samples=samples, prompt=context, mean=new, longest=new, gpus_per_node=node
        )
    else:
        seconds = steady_rollout_seconds(
            model, gpu, engines, samples=samples, running=running, prompt=context, mean=new, gpus_per_node=node
        )
    step = decode_step_seconds(model, gpu, engines, running=running, context=context + new / 2, gpus_per_node=node)
    read = work.groups * work.prompt_tokens + samples * work.observed_tokens + towers
    prompts = prefill_seconds(model, gpu, engines, rows=read, keys=work.prompt_tokens / 2)
    return PhaseTime(
        name=ROLLOUT_PHASE,
        seconds=seconds + prompts,
        tokens=samples * new,
        detail=f"decode {seconds:.1f} ({running:.0f} samples an engine, {step * 1e3:.1f} ms a token), "
        f"prompts {prompts:.1f}",
    )


def _pass_phase(name: str, seconds: PassSeconds, *, exchange: float, tokens: int) -> PhaseTime:
    parts = {
        "compute": seconds.compute,
        "messages": seconds.messages,
        "pipeline idle": seconds.idle,
        "update": seconds.update,
        "exchange of weights": exchange,
    }
    detail = ", ".join(f"{part} {value:.1f}" for part, value in parts.items() if value >= 0.05)
    return PhaseTime(name=name, seconds=seconds.total + exchange, tokens=tokens, detail=detail)


def _weights(config: RelaxConfig, model: ModelDimensions, gpu: GpuModel) -> PhaseTime:
    """Returns the phase of a weight version: to the trainer's host, over the network to other hosts, and to engines."""
    version = model.parameters * dtype_bytes(config)
    host, network = gpu.host * EFFICIENCY.link, gpu.network * EFFICIENCY.link
    seconds = 2 * version / host + (version / network if config.placement.nodes > 1 else 0.0)
    return PhaseTime(
        name=WEIGHTS_PHASE, seconds=seconds, tokens=0, detail=f"{version / GIB:.1f} GiB to the host and to the engines"
    )


def _state(config: RelaxConfig, model: ModelDimensions, gpu: GpuModel) -> PhaseTime:
    """Returns the phase that copies weights and optimizer state to the host and back; gradients are not copied.

    Adam states that are always on the host are copied in the updates (`pass_seconds`).
    """
    terms = state_terms(config, config.parallel, model)
    of_rank = terms["weights"] + terms["Adam states"]
    return PhaseTime(
        name=STATE_PHASE,
        seconds=2 * of_rank / (gpu.host * EFFICIENCY.link),
        tokens=0,
        detail=f"{of_rank / GIB:.1f} GiB of a rank to the host and back",
    )


def time_lines(time: StepTime) -> list[str]:
    """Returns the estimate as lines of the plan."""
    rate = time.tokens / time.seconds
    how, kind = "", "trained"
    if any(phase.name == ROLLOUT_PHASE for phase in time.phases):
        kind = "sampled"
        how = " (phases alternate)" if time.alternates else " (rollout and trainer run at the same time)"
    lines = [
        f"{time.gpu}, estimated: {time.seconds:.1f} s a step{how}, {rate:,.0f} {kind} tokens/s, "
        f"{rate / time.gpus:,.0f} for each of {time.gpus} GPUs"
    ]
    for phase in time.phases:
        speed = f", {phase.tokens / phase.seconds:,.0f} tokens/s" if phase.tokens else ""
        lines.append(f"    {phase.name:<13} {phase.seconds:7.1f} s{speed}: {phase.detail}")
    lines.append("for responses of maximal length; without rewards, environments, evaluations and checkpoints")
    if time.not_estimated:
        lines.append(f"not estimated: {', '.join(time.not_estimated)}")
    return lines
