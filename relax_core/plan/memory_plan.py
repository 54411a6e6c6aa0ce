"""Estimates the memory of every process of a run, on CPU cores and on GPUs, and proposes settings that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from relax_core.config.choices import ModeName, Recompute, StatesPlace
from relax_core.config.reward_choice import may_be_isolated
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.env import IsolatedConfig
from relax_core.contracts.judge import JudgeConfig
from relax_core.families.tiny_configs import MAX_POSITIONS, MODEL_NAMES
from relax_core.plan.gpu_models import gpu_memory_gib
from relax_core.plan.gpu_terms import fullest_stages, trainer_phases
from relax_core.plan.memory_terms import (
    FLOAT,
    GIB,
    MIB,
    OF_MEDIA,
    MemoryHolder,
    Phase,
    activation_terms,
    adam_bytes,
    dtype_bytes,
    encode_worker_bytes,
    engine_bytes,
    engine_media_terms,
    exchanges_reference,
    factor_parameters,
    forward_terms,
    head_bytes,
    mask_making_bytes,
    share_of,
    shared_item_bytes,
    stages_of,
    state_terms,
    states_leave_gpu,
    without_lora,
)
from relax_core.plan.model_dimensions import ModelDimensions, teacher_dimensions
from relax_core.plan.placement import ROLLOUT
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine, find_env
from relax_core.roles.process_placement import sends_factors, shares_gpus, worker_group_layouts
from relax_core.roles.role_context import JUDGE_ENGINE
from relax_core.rollout.agents.agent_command import agent_command_of, max_concurrent_agents
from relax_core.rollout.judges.judge_choice import judge_engine, judge_plan
from relax_core.rollout.rewards.reward_pool import REWARD_CALLS
from relax_core.train.parallel_layout import critic_parallel, forward_parallel, one_rank, world_size

CHARACTERS_A_TOKEN = 3  # a low estimate for real vocabularies
TEXTS = 3  # texts in a judge's prompt, each with up to max_response_chars: question, reference, response


def judges_with_engines(config: RelaxConfig) -> dict[str, JudgeConfig]:
    """Returns the judges that use engines of the run, by name."""
    plan = judge_plan(config)
    judges = {} if plan is None else {name: setup.settings for name, setup in plan.judges.items()}
    return {name: judge for name, judge in judges.items() if judge.url is None}


def judge_model(judge: JudgeConfig) -> ModelDimensions:
    """Returns the dimensions of a judge's model; raises ValueError for a folder that cannot be read."""
    assert judge.model is not None, "the reward's check has passed"
    return teacher_dimensions(judge.model, family=None)


def with_judge_engine(config: RelaxConfig, judge: JudgeConfig) -> RelaxConfig:
    """Returns the configuration with the settings of the judge's engines as ``engine``."""
    model = judge_model(judge)
    positions = MAX_POSITIONS if judge.model in MODEL_NAMES else model.positions
    return replace(config, engine=judge_engine(config.engine, judge, positions=positions or MAX_POSITIONS))


def judge_holders(config: RelaxConfig) -> list[MemoryHolder]:
    """Returns the memory of each judge's engines on CPU cores.

    A judge may get all responses of a train step at once.
    """
    return [_holder(config, name, judge) for name, judge in judges_with_engines(config).items()]


def _holder(config: RelaxConfig, name: str, judge: JudgeConfig) -> MemoryHolder:
    model, engine, size = judge_model(judge), with_judge_engine(config, judge).engine, engine_bytes(config)
    prompt = min(engine.context_tokens, TEXTS * judge.max_response_chars // CHARACTERS_A_TOKEN + judge.max_new_tokens)
    asked = config.rollout.prompts_per_step * config.algo.group_size * judge.votes
    at_once = min(asked, REWARD_CALLS * judge.votes, engine.max_running_samples)
    tokens = min(-(-at_once // judge.count) * prompt, engine.max_total_tokens)
    terms = {
        "imports": find_engine(judge.engine).memory_mib * MIB,
        "weights": model.parameters * size,
        f"KV cache ({tokens} tokens)": tokens * model.cache_values_per_token * size,
    }
    return MemoryHolder(name=f"judge {name}", count=judge.count, phases=(Phase(name="rollout", terms=terms),))


Peak = Callable[[RelaxConfig, Workload], int]  # returns a GPU's bytes in the trainer's largest phase
_MORE_GPUS = "raise parallel.tp, parallel.cp or parallel.pp with more GPUs"


def trainer_room(config: RelaxConfig, work: Workload, peak: Peak, *, limit: int) -> str:
    """Returns the fix for a trainer with a peak above ``limit`` bytes, without a full stop.

    The fix is the first change of settings that fits, or the number of rows that fit.
    """
    parallel = config.parallel
    changes: list[dict[str, Any]] = [{}]
    if parallel.dp * parallel.cp > 1 and not parallel.distributed_optimizer:
        changes.append({"distributed_optimizer": True})
    if parallel.recompute is not Recompute.full:
        changes += [change | {"recompute": Recompute.full} for change in tuple(changes)]
    places = (config.optimizer.states,) if states_leave_gpu(config) else (StatesPlace.device, StatesPlace.host)
    for place in places:
        moved = replace(config, optimizer=replace(config.optimizer, states=place))
        for change in changes:
            changed = replace(moved, parallel=replace(parallel, **change))
            rows = work.micro_batch_rows if peak(changed, work) <= limit else _rows_that_fit(changed, work, peak, limit)
            if rows >= work.episode_rows:
                words = [f"parallel.{key}={_typed(value)}" for key, value in change.items()]
                if place is not config.optimizer.states:
                    words.append(f"optimizer.states={place.value}")
                if rows < work.micro_batch_rows:
                    words.append(f"parallel.micro_batch_tokens={rows}")
                return f"Set {' '.join(words)}"
    sharded = " parallel.distributed_optimizer=true" if "distributed_optimizer" in changes[-1] else ""
    tried = f" with parallel.recompute=full{sharded} optimizer.states=host"
    if rows == 0:
        return f"Even{tried} its weights, gradients and Adam states leave no room for a row: {_MORE_GPUS}"
    return (
        f"One episode has {work.prompt_tokens} prompt and "
        f"{work.episode_rows - work.prompt_tokens} response rows and is never split, but of its "
        f"{work.episode_rows} rows only {rows} fit even{tried}: {_MORE_GPUS}, or lower rollout.max_new_tokens"
    )


def _rows_that_fit(config: RelaxConfig, work: Workload, peak: Peak, limit: int) -> int:
    """Returns the number of micro-batch rows that fit on one rank if the planned number does not fit.

    Returns 0 if no row fits.
    """
    fitting, too_many = 0, work.micro_batch_rows
    while too_many - fitting > 1:
        rows = (fitting + too_many) // 2
        if peak(config, replace(work, micro_batch_rows=rows)) <= limit:
            fitting = rows
        else:
            too_many = rows
    return fitting


def _typed(value: Recompute | bool) -> str:
    return value.value if isinstance(value, Recompute) else str(value).lower()


TRAINER = 435
TRAINER_VISION, ENGINE_VISION = 63, 111  # additional MiB for transformers' vision modules
BASES = {  # MiB
    "supervisor": 68,
    "controller": 216,
    "Ray gcs": 53,
    "Ray raylet": 40,
    "Serve controller": 164,
    "bus": 133,
    "trackers": 135,
    "advantages": 322,
    "rollout": 154,
    "owner of an engine": 131,
}
# processes with memory that depends on the configuration
SIZED = ("supervisor", "Serve controller", "advantages", "rollout", "owner of an engine")
HEADERS, PARQUET = 23, 40  # MiB to check data with images and videos (Pillow, PyAV), or in Parquet files (pyarrow)
SERVE_DEPLOYMENT, REWARD_WORKER, QUEUE_PROCESS = 164, 65, 250
AGENT_STAND_IN = 10  # relax_core/control/host/agent_on_demand.py
AGENT = 64  # a Python program with a client library, and its guard; the limit is `MEMORY_GIB` of agent_limits.py
GATEWAY = 68  # FastAPI and uvicorn
TORCH = 188  # MiB to compute advantages with torch in the rollout process
SHARED_ITEMS = "items in /dev/shm"  # the memory holder of media items; it is not a process
KEPT_BY_ALLOCATOR = 0.5  # share of a micro-batch's allocations that glibc neither returns nor reuses
SAMPLING_COPIES = 8  # float32 arrays [samples, vocabulary] of one decode step
SLOT_BYTES = 256  # for each row of the table of running samples; the table is allocated completely at the start
# columns of one prefill that continues kept prefixes; it copies the prefixes' keys and values twice
PASS_COLUMNS = 8192
FIRST_COLUMNS = 64  # initial columns of the engine's KV cache, which doubles when it is full


def cpu_holders(
    config: RelaxConfig,
    requirements: Requirements,
    roles: Mapping[str, int],
    *,
    model: ModelDimensions,
    work: Workload,
    data_rows: int | None = None,
) -> list[MemoryHolder]:
    """Returns the memory of every process of the run, and of the media items in shared memory.

    ``data_rows`` is the number of data rows, or None if unknown.
    """
    holders = [_plain(name, mib) for name, mib in BASES.items() if name not in SIZED]
    holders.append(_plain("stand-in of a Ray agent", AGENT_STAND_IN, count=2))
    holders.append(_plain("supervisor", _supervisor(config, work)))
    if config.gateway.name != "none":
        holders.append(_plain("gateway", GATEWAY))
    engines = roles.get("engine", 0) + roles.get("teacher_engine", 0) + roles.get("judge_engine", 0)
    holders.append(_plain("owner of an engine", BASES["owner of an engine"], count=engines))
    rollout = BASES["rollout"] + (0 if "advantages" in roles else TORCH)
    holders.append(_plain("rollout", rollout, count=roles["rollout"]))
    if "advantages" in roles:
        holders.append(_plain("advantages", BASES["advantages"]))
    if config.run.serve:
        holders.append(_plain("Serve controller", BASES["Serve controller"]))
        holders.append(_plain("Serve front of a role", SERVE_DEPLOYMENT, count=len(roles)))
    if "engine" in roles and may_be_isolated(config.reward):
        holders.append(_plain("reward worker", REWARD_WORKER, count=roles["rollout"] * config.rollout.reward_workers))
    if find_env(config.env.name).isolated:
        isolated = cast(IsolatedConfig, config.env)
        count, most = roles["rollout"] * isolated.workers, round(isolated.worker_memory_gib * 1024)
        holders.append(_plain("environment worker", most, count=count))
    env = find_env(config.env.name)
    if env.agent is not None and agent_command_of(config, env):
        holders.append(_plain("agent with its guard", AGENT, count=roles["rollout"] * max_concurrent_agents(config)))
    if config.bus.name == "transfer_queue":
        holders.append(_plain("TransferQueue process", QUEUE_PROCESS, count=2))  # the bus's controller and storage
    holders.append(_trainer("actor", config, config.parallel, model, work, publishes=True))
    if requirements.critic:
        holders.append(
            _trainer("critic", without_lora(config), critic_parallel(config.parallel), model, work, publishes=False)
        )
    for role, layout in worker_group_layouts(config).items():
        if role != "actor":
            parallel = forward_parallel(config.parallel, layout)
            holders.append(_forward(role, config, parallel, [model], work, follows=role == "actor_fwd"))
    if requirements.teacher is not None:
        holders += _teachers(config, requirements, work)
    if "engine" in roles:
        holders.append(_engine("engine", config, model, work, count=roles["engine"]))
    holders += judge_holders(config)
    if work.media is not None:
        encoder = Phase(name="always", terms={"encoding": encode_worker_bytes(work)})
        workers = roles["rollout"] * config.modality.workers
        holders.append(MemoryHolder(name="encode worker", count=workers, phases=(encoder,)))
        items = shared_item_bytes(config, work, rollout_workers=roles["rollout"], data_rows=data_rows)
        holders.append(MemoryHolder(name=SHARED_ITEMS, count=1, phases=(Phase(name="always", terms={"items": items}),)))
    return holders


def _teachers(config: RelaxConfig, requirements: Requirements, work: Workload) -> list[MemoryHolder]:
    assert requirements.teacher is not None
    models = [teacher_dimensions(model, family=config.model.family) for model in requirements.teacher.models.values()]
    if requirements.teacher.served_by == "forward":
        return [_forward("teacher", config, one_rank(config.parallel), models, work, follows=False)]
    engines = [_engine("teacher engine", config, model, work, count=1) for model in models]
    return [_plain("teacher", BASES["rollout"]), *engines]


def _imports(mib: int, model: ModelDimensions, *, vision: int) -> int:
    """Returns the bytes of a process's imports, with transformers' vision modules if the model has a vision tower."""
    return (mib + (vision if model.patches is not None else 0)) * MIB


def _supervisor(config: RelaxConfig, work: Workload) -> int:
    """Returns the MiB of the process that checks the data and starts the run."""
    named = [config.data.path, *(config.data.paths or ())]
    parquet = any(path is not None and Path(str(path)).suffix == ".parquet" for path in named)
    return BASES["supervisor"] + (HEADERS if work.media is not None else 0) + (PARQUET if parquet else 0)


def _plain(name: str, mib: int, *, count: int = 1) -> MemoryHolder:
    return MemoryHolder(name=name, count=count, phases=(Phase(name="always", terms={"imports": mib * MIB}),))


def _trainer(
    name: str,
    config: RelaxConfig,
    parallel: ParallelConfig,
    model: ModelDimensions,
    work: Workload,
    *,
    publishes: bool,
) -> MemoryHolder:
    """Returns the memory of a trainer's ranks; each rank is assumed to be as full as the fullest rank."""
    stages = [
        MemoryHolder(
            name=name,
            count=world_size(parallel),
            phases=_trainer_phases(config, parallel, model, work, publishes=publishes, later=later),
        )
        for later in stages_of(parallel)
    ]
    return max(stages, key=lambda stage: stage.peak.bytes)


def _trainer_phases(
    config: RelaxConfig,
    parallel: ParallelConfig,
    model: ModelDimensions,
    work: Workload,
    *,
    publishes: bool,
    later: bool,
) -> tuple[Phase, ...]:
    published = model.parameters * dtype_bytes(config)
    sent = factor_parameters(config, parallel, model) * dtype_bytes(config) if sends_factors(config) else published
    imports = _imports(TRAINER, model, vision=TRAINER_VISION)
    state = {"imports": imports, **state_terms(config, parallel, model, later=later)}
    if publishes and exchanges_reference(config):
        state["reference's weights"] = share_of(parallel, model, later=later).parameters * dtype_bytes(config)
    activations = activation_terms(config, parallel, model, work, later=later)
    forward = _with_kept({**activations, "making the mask": mask_making_bytes(config, parallel, work)})
    backward = _with_kept({**activations, "logits chunk": head_bytes(config, model, work, split=parallel.tp)})
    kept = {"kept by the allocator": max(sum(forward.values()), sum(backward.values()))}
    phases = [
        Phase(name="start", terms={"imports": imports, "weights": state["weights"] + published}),
        Phase(name="forward", terms=state | forward),
        Phase(name="backward", terms=state | backward),
        Phase(name="optimizer", terms=state | kept),
        Phase(name="checkpoint", terms=state | kept | {"copy of a checkpoint": _copy_bytes(parallel, state)}),
    ]
    if publishes:
        phases.append(Phase(name="sync", terms=state | kept | {"published weights": sent}))
    return tuple(phases)


def _copy_bytes(parallel: ParallelConfig, state: Mapping[str, int]) -> int:
    """Returns the checkpoint bytes that a rank copies and writes during the next step.

    Data-parallel ranks write equal shares.
    """
    alike = parallel.dp * parallel.cp
    adam = state["Adam states"] if parallel.distributed_optimizer else state["Adam states"] // alike
    return state["weights"] // alike + adam


def _forward(
    name: str,
    config: RelaxConfig,
    parallel: ParallelConfig,
    models: Sequence[ModelDimensions],
    work: Workload,
    *,
    follows: bool,
) -> MemoryHolder:
    """Returns the memory of a forward role; if there are several teachers, all their models stay loaded.

    ``follows`` is True if the role reads every published weight version.
    """
    size = dtype_bytes(config)
    largest = max(models, key=lambda model: model.parameters)
    weights = sum(share_of(parallel, model).parameters for model in models) * size
    state = {"imports": _imports(TRAINER, largest, vision=TRAINER_VISION), "weights": weights}
    passing = forward_terms(config, parallel, largest, work)
    passing["logits chunk"] = head_bytes(config, largest, work, split=parallel.tp)
    sync = {"published weights": largest.parameters * size}
    phases = [Phase(name="start", terms=state | sync), Phase(name="forward", terms=state | _with_kept(passing))]
    if follows:
        kept = {"kept by the allocator": sum(_with_kept(passing).values())}
        phases.append(Phase(name="sync", terms=state | kept | sync))
    return MemoryHolder(name=name, count=world_size(parallel), phases=tuple(phases))


def _engine(name: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int) -> MemoryHolder:
    size = engine_bytes(config)
    imports = _imports(find_engine(config.engine.name).memory_mib, model, vision=ENGINE_VISION)
    state = {"imports": imports, "weights": model.parameters * size}
    tokens = cache_tokens(config, work)
    cache = tokens * model.cache_values_per_token * size
    states = work.samples_in_flight * model.state_bytes_per_sample(size)
    kept = config.engine.prefix_cache_tokens if name == "engine" else 0  # a teacher's engine finishes no responses
    serving = {
        f"KV cache ({tokens} tokens)": cache,
        **(_prefix_terms(kept, model.cache_values_per_token * size, work) if kept else {}),
        **({"linear-attention states": states} if states else {}),
        "sampling": SAMPLING_COPIES * work.samples_in_flight * model.vocabulary * FLOAT,
        "slots": SLOT_BYTES * config.engine.max_running_samples,
        **engine_media_terms(config, model, work),
    }
    growing = {} if find_engine(config.engine.name).whole_cache else {"KV cache before it doubled": cache // 2}
    new = {"new weights": model.parameters * dtype_bytes(config)}
    phases = (
        Phase(name="start", terms=state | new),
        Phase(name="rollout", terms=state | serving),
        Phase(name="growth", terms=state | serving | growing),
        Phase(name="sync", terms=state | serving | new),
        Phase(name="wake-up", terms=state | serving),
    )
    return MemoryHolder(name=name, count=count, phases=phases)


def _prefix_terms(kept: int, token_bytes: int, work: Workload) -> dict[str, int]:
    """Returns the memory of ``kept`` tokens of finished responses, and of a prefill that continues these responses."""
    columns = min(max(PASS_COLUMNS, work.sample_tokens), work.samples_in_flight * work.sample_tokens)
    return {
        f"prefix cache ({kept} tokens)": kept * token_bytes,
        "copies of kept prefixes": 2 * columns * token_bytes,
    }


def cache_tokens(config: RelaxConfig, work: Workload) -> int:
    """Returns the largest size of the KV cache in tokens: samples times columns (which double), within the budget."""
    engine, columns = config.engine, FIRST_COLUMNS
    if find_engine(engine.name).whole_cache:
        return engine.max_total_tokens
    while columns < work.sample_tokens:
        columns *= 2
    return min(work.samples_in_flight * min(columns, engine.context_tokens), engine.max_total_tokens)


def _with_kept(terms: Mapping[str, int]) -> dict[str, int]:
    kept = sum(size for name, size in terms.items() if name not in OF_MEDIA)
    return {**terms, "kept by the allocator": round(KEPT_BY_ALLOCATOR * kept)}


SHARED = "every GPU"  # the name of the holder if all roles share all GPUs
PROCESS_BYTES = 2 * GIB  # assumed for one process: CUDA context, NCCL buffers, cuBLAS workspaces
ENGINE_BYTES = 4 * GIB  # assumed for an engine: the same, plus CUDA graphs and prefill activations
FRAGMENTS = 0.1  # assumed fragmentation, as a share of a micro-batch's allocations
SYNC_BUCKET_BYTES = 2 * 64 * MIB  # two buckets: one is filled while the other is sent


def gpu_holders(
    config: RelaxConfig, gpus: Mapping[str, int], *, model: ModelDimensions, work: Workload
) -> list[MemoryHolder]:
    """Returns one holder for the GPUs of each role: trainer, engines, and forward roles.

    If all roles share all GPUs, there is only one holder.
    """
    limit = round(gpu_memory_gib(config.placement) * GIB)
    if shares_gpus(config):
        return [_shared(config, gpus, model, work, limit=limit)]
    holders = []
    for role, count in gpus.items():
        if role in ("actor", "critic"):
            own = config if role == "actor" else without_lora(config)
            holders.append(_gpu_trainer(role, own, model, work, count=count, limit=limit))
        elif role == ROLLOUT:
            holders.append(_gpu_engine(config, model, work, count=count, limit=limit))
        elif role == JUDGE_ENGINE:
            holders.append(_judge_engine(config, work, count=count, limit=limit))
        else:
            holders.append(_gpu_forward(role, config, model, work, count=count, limit=limit))
    return holders


def cache_tokens_that_fit(config: RelaxConfig, model: ModelDimensions, work: Workload) -> int:
    """Returns how many KV-cache tokens of one engine fit on a GPU in addition to the weights."""
    tp = config.engine.tp
    free = round(gpu_memory_gib(config.placement) * GIB) - ENGINE_BYTES - _engine_weights(config, model)
    if config.mode.name is ModeName.colocate:
        free -= PROCESS_BYTES
    states = model.state_bytes_per_sample(engine_bytes(config))
    free -= work.samples_in_flight * states // tp + SYNC_BUCKET_BYTES
    free -= sum(engine_media_terms(config, model, work).values())
    return max(0, free // _cache_bytes_a_token(config, model))


def _engine_weights(config: RelaxConfig, model: ModelDimensions) -> int:
    """Returns the bytes of an engine's weights on one GPU.

    If images are distributed over the GPUs, each GPU has the whole vision tower.
    """
    sharded = (
        config.parallel.shard_media and find_engine(config.engine.name).shards_items and "audio" not in model.towers
    )
    whole = model.tower_parameters if sharded else 0
    return ((model.parameters - whole) // config.engine.tp + whole) * engine_bytes(config)


def _cache_bytes_a_token(config: RelaxConfig, model: ModelDimensions) -> int:
    """Returns the cache bytes of a token on one GPU.

    With more GPUs than key-value heads, several GPUs have copies of the same head.
    """
    return model.cache_values_per_token * engine_bytes(config) // min(config.engine.tp, model.kv_heads)


def _gpu_trainer_phases(config: RelaxConfig, model: ModelDimensions, work: Workload) -> tuple[Phase, ...]:
    """Returns the phases of the pipeline stage with the largest peak."""
    stages = [_stage_phases(config, model, work, stage=stage) for stage in fullest_stages(config.parallel)]
    return max(stages, key=lambda phases: max(phase.bytes for phase in phases))


def host_state_bytes(config: RelaxConfig, gpus: Mapping[str, int], model: ModelDimensions) -> int:
    """Returns the host memory of a node with GPUs that has the states of its training ranks.

    These are Adam states with optimizer.states=host, weights and Adam states between the turns of mode=colocate, and
    the reference's weights with placement.forward=actor. ``gpus`` maps each role to its number of GPUs.
    """
    colocate = shares_gpus(config)
    offloads = colocate or states_leave_gpu(config)
    references = int(exchanges_reference(config))
    if not config.placement.gpus_per_node or not (offloads or references):
        return 0
    ranks = gpus["actor"] + (gpus.get("critic", 0) if offloads and not colocate else 0)
    of_rank = 0
    for later in stages_of(config.parallel):
        adam = adam_bytes(config, config.parallel, model, later=later) if offloads else 0
        weights = share_of(config.parallel, model, later=later).parameters * dtype_bytes(config)
        of_rank = max(of_rank, adam + (int(colocate) + references) * weights)
    return min(ranks, config.placement.gpus_per_node) * of_rank


def _stage_phases(config: RelaxConfig, model: ModelDimensions, work: Workload, *, stage: int) -> tuple[Phase, ...]:
    state = {"process": PROCESS_BYTES, **state_terms(config, config.parallel, model, later=stage > 0)}
    phases = trainer_phases(config, model, work, stage=stage)
    return (
        *(Phase(name=name, terms=_with_fragments(state, terms)) for name, terms in phases.items()),
        Phase(name="sync", terms=state | {"sync buckets": SYNC_BUCKET_BYTES}),
    )


def _gpu_trainer(
    role: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int, limit: int
) -> MemoryHolder:
    def peak(changed: RelaxConfig, its_work: Workload) -> int:
        return max(phase.bytes for phase in _gpu_trainer_phases(changed, model, its_work))

    room = trainer_room(config, work, peak, limit=limit) if peak(config, work) > limit else ""
    return MemoryHolder(name=role, count=count, phases=_gpu_trainer_phases(config, model, work), limit=limit, room=room)


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


def _gpu_engine(config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int, limit: int) -> MemoryHolder:
    terms = _engine_terms(config, model, work)
    phases = (
        Phase(name="rollout", terms=terms),
        Phase(name="sync", terms=terms | {"sync buckets": SYNC_BUCKET_BYTES}),
    )
    return MemoryHolder(name=ROLLOUT, count=count, phases=phases, limit=limit, room=_engine_fix(config, model, work))


def _judge_engine(config: RelaxConfig, work: Workload, *, count: int, limit: int) -> MemoryHolder:
    """Returns the memory of one engine of the largest judge."""
    judge = max(judges_with_engines(config).values(), key=lambda own_judge: judge_model(own_judge).parameters)
    model, its = judge_model(judge), with_judge_engine(config, judge)
    terms = _engine_terms(its, model, replace(work, media=None))
    fits = cache_tokens_that_fit(its, model, replace(work, media=None))
    room = f"Set engine.max_total_tokens={fits} or less" if fits else "Use a smaller judge"
    return MemoryHolder(
        name=JUDGE_ENGINE, count=count, phases=(Phase(name="rollout", terms=terms),), limit=limit, room=room
    )


def _engine_fix(config: RelaxConfig, model: ModelDimensions, work: Workload) -> str:
    fits = cache_tokens_that_fit(config, model, work)
    return f"Set engine.max_total_tokens={fits} or less" if fits else "Raise engine.tp"


def _gpu_forward(
    role: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int, limit: int
) -> MemoryHolder:
    """Returns the memory of a forward role; a teacher is not split over GPUs."""
    layout = worker_group_layouts(config).get(role)
    parallel = one_rank(config.parallel) if layout is None else forward_parallel(config.parallel, layout)
    passing = forward_terms(config, parallel, model, work)
    passing["logits chunk"] = head_bytes(config, model, work, split=parallel.tp)
    state = {"process": PROCESS_BYTES, "weights": share_of(parallel, model).parameters * dtype_bytes(config)}
    phases = [Phase(name="forward", terms=_with_fragments(state, passing))]
    if role == "actor_fwd":
        phases.append(Phase(name="sync", terms=state | {"sync buckets": SYNC_BUCKET_BYTES}))
    room = f"Give it more GPUs: placement.roles.{role}={2 * count} parallel.{role}.tp={2 * parallel.tp}"
    return MemoryHolder(name=role, count=count, phases=tuple(phases), limit=limit, room=room)


def _shared(
    config: RelaxConfig, gpus: Mapping[str, int], model: ModelDimensions, work: Workload, *, limit: int
) -> MemoryHolder:
    """Returns the memory of GPUs that trainer and engines use alternately.

    The trainer's state is on the host while the engines generate.
    """
    engine = _engine_terms(config, model, work)
    trainer = _with_idle_engine(_gpu_trainer_phases(config, model, work))
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
        return max(phase.bytes for phase in _with_idle_engine(_gpu_trainer_phases(changed, model, its_work)))

    room = ""
    if worst.bytes > limit:
        of_engine = worst.name in ("rollout", "wake-up")
        room = _engine_fix(config, model, work) if of_engine else trainer_room(config, work, peak, limit=limit)
    return MemoryHolder(name=SHARED, count=gpus["actor"], phases=phases, limit=limit, room=room)


def _with_idle_engine(phases: Sequence[Phase]) -> list[Phase]:
    """Returns the trainer's phases while an engine without weights and cache is on the same GPU."""
    return [Phase(name=phase.name, terms={**phase.terms, "engine process": ENGINE_BYTES}) for phase in phases[:-1]]


def _with_fragments(state: Mapping[str, int], terms: Mapping[str, int]) -> dict[str, int]:
    """Returns the terms, plus fragmentation of all terms except the state."""
    passing = sum(size for name, size in terms.items() if name not in state)
    return {**state, **terms, "fragments": round(FRAGMENTS * passing)}
