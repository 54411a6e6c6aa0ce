"""Computes the peak memory of every GPU of a placement, by phase.

No run on GPUs exists to compare with: the base values are assumptions, named here and in docs/plan.md. Activations
count as in the CPU build, in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relax_core.config.choices import ModeName
from relax_core.config.schema import RelaxConfig
from relax_core.control.run.role_counts import worker_group_layouts
from relax_core.plan.gpu_placement import ROLLOUT
from relax_core.plan.memory.judge_memory import judge_model, own_judges, with_judge_engine
from relax_core.plan.memory.media_terms import engine_media_terms
from relax_core.plan.memory.memory_advice import trainer_room
from relax_core.plan.memory.memory_terms import (
    GIB,
    MIB,
    Holder,
    Phase,
    dtype_bytes,
    engine_bytes,
    head_bytes,
    mask_making_bytes,
)
from relax_core.plan.memory.trainer_share import activation_terms, forward_terms, share_of, stages_of, state_terms
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine
from relax_core.roles.process.role_context import JUDGE_ENGINE
from relax_core.train.parallel_layout import forward_parallel, one_rank

SHARED = "every GPU"  # the name of the holder if all roles share all GPUs
PROCESS_BYTES = 2 * GIB  # assumed: CUDA context, NCCL buffers, cuBLAS workspaces of one process
ENGINE_BYTES = 4 * GIB  # assumed: as above for an engine, with its CUDA graphs and prefill activations
FRAGMENTS = 0.1  # assumed: share of what a micro-batch allocates
SYNC_BUCKET_BYTES = 2 * 64 * MIB  # one bucket is filled while the other is sent


def gpu_holders(
    config: RelaxConfig, gpus: Mapping[str, int], *, model: ModelDimensions, work: Workload
) -> list[Holder]:
    """Returns one holder for each kind of GPU: that of the trainer, the engines, and the forward roles.

    If roles share all GPUs there is one holder for all of them.
    """
    limit = round(config.placement.gpu_memory_gib * GIB)
    if config.mode.name is ModeName.colocate:
        return [_shared(config, gpus, model, work, limit=limit)]
    holders = []
    for role, count in gpus.items():
        if role in ("actor", "critic"):
            holders.append(_trainer(role, config, model, work, count=count, limit=limit))
        elif role == ROLLOUT:
            holders.append(_engine(config, model, work, count=count, limit=limit))
        elif role == JUDGE_ENGINE:
            holders.append(_judge_engine(config, work, count=count, limit=limit))
        else:
            holders.append(_forward(role, config, model, work, count=count, limit=limit))
    return holders


def cache_tokens_that_fit(config: RelaxConfig, model: ModelDimensions, work: Workload) -> int:
    """Returns how many KV-cache tokens of one engine fit on a GPU beside the weights."""
    tp = config.engine.tp
    free = round(config.placement.gpu_memory_gib * GIB) - ENGINE_BYTES - _engine_weights(config, model)
    if config.mode.name is ModeName.colocate:
        free -= PROCESS_BYTES
    states = model.state_bytes_per_sample(engine_bytes(config))
    free -= work.samples_in_flight * states // tp + SYNC_BUCKET_BYTES
    free -= sum(engine_media_terms(config, model, work).values())
    return max(0, free // _cache_bytes_a_token(config, model))


def _engine_weights(config: RelaxConfig, model: ModelDimensions) -> int:
    """Returns the bytes on one GPU of an engine; the vision tower is whole on each if images are dealt to them."""
    dealt = config.parallel.shard_media and find_engine(config.engine.name).deals_items and "audio" not in model.towers
    whole = model.tower_parameters if dealt else 0
    return ((model.parameters - whole) // config.engine.tp + whole) * engine_bytes(config)


def _cache_bytes_a_token(config: RelaxConfig, model: ModelDimensions) -> int:
    """Returns the bytes on one GPU of an engine; with more GPUs than key-value heads the heads are copied."""
    return model.cache_values_per_token * engine_bytes(config) // min(config.engine.tp, model.kv_heads)


def _trainer_phases(config: RelaxConfig, model: ModelDimensions, work: Workload) -> tuple[Phase, ...]:
    """Returns the phases of the stage that needs most."""
    stages = [_stage_phases(config, model, work, later=later) for later in stages_of(config.parallel)]
    return max(stages, key=lambda phases: max(phase.bytes for phase in phases))


def _stage_phases(config: RelaxConfig, model: ModelDimensions, work: Workload, *, later: bool) -> tuple[Phase, ...]:
    parallel = config.parallel
    state = {"process": PROCESS_BYTES, **state_terms(config, parallel, model, later=later)}
    activations = activation_terms(config, parallel, model, work, later=later)
    forward = _with_fragments({**activations, "making the mask": mask_making_bytes(config, parallel, work)})
    backward = _with_fragments({**activations, "logits chunk": head_bytes(config, model, work, split=parallel.tp)})
    return (
        Phase(name="forward", terms=state | forward),
        Phase(name="backward", terms=state | backward),
        Phase(name="optimizer", terms=state),
        Phase(name="sync", terms=state | {"sync buckets": SYNC_BUCKET_BYTES}),
    )


def _trainer(
    role: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int, limit: int
) -> Holder:
    def peak(changed: RelaxConfig, its_work: Workload) -> int:
        return max(phase.bytes for phase in _trainer_phases(changed, model, its_work))

    room = trainer_room(config, work, peak, limit=limit) if peak(config, work) > limit else ""
    return Holder(name=role, count=count, phases=_trainer_phases(config, model, work), limit=limit, room=room)


def _engine_terms(config: RelaxConfig, model: ModelDimensions, work: Workload) -> dict[str, int]:
    tp, tokens = config.engine.tp, config.engine.max_total_tokens
    terms = {
        "engine process": ENGINE_BYTES,
        "engine weights": _engine_weights(config, model),
        f"KV cache ({tokens} tokens)": tokens * _cache_bytes_a_token(config, model),
        **engine_media_terms(config, model, work),
    }
    if model.delta_net is not None:
        states = model.state_bytes_per_sample(engine_bytes(config))
        terms["linear-attention states"] = work.samples_in_flight * states // tp
    return terms


def _engine(config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int, limit: int) -> Holder:
    terms = _engine_terms(config, model, work)
    phases = (
        Phase(name="rollout", terms=terms),
        Phase(name="sync", terms=terms | {"sync buckets": SYNC_BUCKET_BYTES}),
    )
    return Holder(name=ROLLOUT, count=count, phases=phases, limit=limit, room=_engine_fix(config, model, work))


def _judge_engine(config: RelaxConfig, work: Workload, *, count: int, limit: int) -> Holder:
    """Returns the memory of an engine of the largest judge."""
    judge = max(own_judges(config).values(), key=lambda one: judge_model(one).parameters)
    model, its = judge_model(judge), with_judge_engine(config, judge)
    terms = _engine_terms(its, model, replace(work, media=None))
    fits = cache_tokens_that_fit(its, model, replace(work, media=None))
    room = f"Set engine.max_total_tokens={fits} or less" if fits else "Use a smaller judge"
    return Holder(name=JUDGE_ENGINE, count=count, phases=(Phase(name="rollout", terms=terms),), limit=limit, room=room)


def _engine_fix(config: RelaxConfig, model: ModelDimensions, work: Workload) -> str:
    fits = cache_tokens_that_fit(config, model, work)
    return f"Set engine.max_total_tokens={fits} or less" if fits else "Raise engine.tp"


def _forward(
    role: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int, limit: int
) -> Holder:
    """Returns the memory of a forward role; a teacher is whole on its GPU."""
    layout = worker_group_layouts(config).get(role)
    parallel = one_rank(config.parallel) if layout is None else forward_parallel(config.parallel, layout)
    passing = forward_terms(config, parallel, model, work)
    passing["logits chunk"] = head_bytes(config, model, work, split=parallel.tp)
    state = {"process": PROCESS_BYTES, "weights": share_of(parallel, model).parameters * dtype_bytes(config)}
    phases = [Phase(name="forward", terms=state | _with_fragments(passing))]
    if role == "actor_fwd":
        phases.append(Phase(name="sync", terms=state | {"sync buckets": SYNC_BUCKET_BYTES}))
    room = f"Give it more GPUs: placement.roles.{role}={2 * count} parallel.{role}.tp={2 * parallel.tp}"
    return Holder(name=role, count=count, phases=tuple(phases), limit=limit, room=room)


def _shared(
    config: RelaxConfig, gpus: Mapping[str, int], model: ModelDimensions, work: Workload, *, limit: int
) -> Holder:
    """Returns the phases of time sharing, in which the trainer's state is on the host while engines generate."""
    engine = _engine_terms(config, model, work)
    trainer = _beside_idle_engine(_trainer_phases(config, model, work))
    weights = {key: engine[key] for key in ("engine process", "engine weights")}
    shares = [share_of(config.parallel, model, later=later).parameters for later in stages_of(config.parallel)]
    sending = {"process": PROCESS_BYTES, "weights": max(shares) * dtype_bytes(config)}
    phases = (
        Phase(name="rollout", terms={"process": PROCESS_BYTES, **engine}),
        *trainer,
        Phase(name="sync", terms={**weights, **sending, "sync buckets": SYNC_BUCKET_BYTES}),
        Phase(name="wake-up", terms={"process": PROCESS_BYTES, **engine}),
    )
    worst = max(phases, key=lambda phase: phase.bytes)

    def peak(changed: RelaxConfig, its_work: Workload) -> int:
        return max(phase.bytes for phase in _beside_idle_engine(_trainer_phases(changed, model, its_work)))

    room = ""
    if worst.bytes > limit:
        of_engine = worst.name in ("rollout", "wake-up")
        room = _engine_fix(config, model, work) if of_engine else trainer_room(config, work, peak, limit=limit)
    return Holder(name=SHARED, count=gpus["actor"], phases=phases, limit=limit, room=room)


def _beside_idle_engine(phases: Sequence[Phase]) -> list[Phase]:
    """Returns the trainer's phases while an engine without weights and cache is on the same GPU."""
    return [Phase(name=one.name, terms={**one.terms, "engine process": ENGINE_BYTES}) for one in phases[:3]]


def _with_fragments(terms: Mapping[str, int]) -> dict[str, int]:
    return {**terms, "fragments": round(FRAGMENTS * sum(terms.values()))}
