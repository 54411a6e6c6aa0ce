"""Computes the peak resident memory of every process of a run on CPU cores.

A process's base value is what its imports take. It was measured with the versions of constraints.txt on x86-64 Linux
(docs/plan.md says how). Memory that is mapped from files counts like any other, as `ps` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from relax_core.config.reward_choice import may_be_isolated
from relax_core.config.schema import ParallelConfig, RelaxConfig
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.env import IsolatedConfig
from relax_core.control.run.role_counts import worker_group_layouts
from relax_core.plan.memory.judge_memory import judge_holders
from relax_core.plan.memory.media_terms import encode_worker_bytes, engine_media_terms, shared_item_bytes
from relax_core.plan.memory.memory_terms import (
    FLOAT,
    MIB,
    Holder,
    Phase,
    dtype_bytes,
    engine_bytes,
    head_bytes,
    mask_making_bytes,
)
from relax_core.plan.memory.trainer_share import (
    OF_MEDIA,
    activation_terms,
    forward_terms,
    share_of,
    stages_of,
    state_terms,
)
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.model.model_source import teacher_dimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine, find_env
from relax_core.rollout.agents.run_agents import agent_words, agents_at_one_time
from relax_core.train.parallel_layout import critic_parallel, forward_parallel, one_rank, world_size

TRAINER = 435
TRAINER_VISION, ENGINE_VISION = 63, 111  # MiB more with transformers' modules of a vision tower
BASES = {  # MiB
    "supervisor": 68,
    "controller": 216,
    "Ray gcs": 53,
    "Ray raylet": 40,
    "Serve controller": 164,
    "bus": 133,
    "metrics": 135,
    "advantages": 322,
    "rollout": 154,
    "owner of an engine": 131,
}
SIZED = ("supervisor", "Serve controller", "advantages", "rollout", "owner of an engine")  # by the configuration
HEADERS, PARQUET = 23, 40  # for checking data with images and videos (Pillow, PyAV), or in Parquet files (pyarrow)
SERVE_DEPLOYMENT, REWARD_WORKER, QUEUE_PROCESS = 164, 65, 250
AGENT_STAND_IN = 10  # relax_core/control/host/agent_on_demand.py
AGENT = 64  # a Python program with a client library, and its guard; one may use agent.memory_gib
GATEWAY = 68  # FastAPI and uvicorn
TORCH = 188  # for computing advantages with torch in the rollout
SHARED_ITEMS = "items in /dev/shm"  # the holder of media items, which is no process
KEPT_BY_ALLOCATOR = 0.5  # share of what a micro-batch allocates: pieces that glibc neither returns nor reuses
SAMPLING_COPIES = 8  # float32 arrays [samples, vocabulary] of one decode step
SLOT_BYTES = 256  # rows of the table of running samples, which is allocated at once
PASS_COLUMNS = 8192  # columns of one prefill behind kept prefixes, which has two copies of their keys and values
FIRST_COLUMNS = 64  # first columns of the engine's KV cache, which then doubles


def cpu_holders(
    config: RelaxConfig,
    requirements: Requirements,
    roles: Mapping[str, int],
    *,
    model: ModelDimensions,
    work: Workload,
    data_rows: int | None = None,
) -> list[Holder]:
    """Returns the memory of every process of the run, and of the items in shared memory of data with ``data_rows``."""
    holders = [_plain(name, mib) for name, mib in BASES.items() if name not in SIZED]
    holders.append(_plain("stand-in of a Ray agent", AGENT_STAND_IN, count=2))
    holders.append(_plain("supervisor", _supervisor(config, work)))
    if config.gateway.name != "none":
        holders.append(_plain("gateway", GATEWAY))
    engines = roles["engine"] + roles.get("teacher_engine", 0) + roles.get("judge_engine", 0)
    holders.append(_plain("owner of an engine", BASES["owner of an engine"], count=engines))
    rollout = BASES["rollout"] + (0 if "advantages" in roles else TORCH)
    holders.append(_plain("rollout", rollout, count=roles["rollout"]))
    if "advantages" in roles:
        holders.append(_plain("advantages", BASES["advantages"]))
    if config.run.serve:
        holders.append(_plain("Serve controller", BASES["Serve controller"]))
        holders.append(_plain("Serve front of a role", SERVE_DEPLOYMENT, count=len(roles)))
    if may_be_isolated(config.reward):
        holders.append(_plain("reward worker", REWARD_WORKER, count=roles["rollout"] * config.rollout.reward_workers))
    if find_env(config.env.name).isolated:
        isolated = cast(IsolatedConfig, config.env)
        count, most = roles["rollout"] * isolated.workers, round(isolated.worker_memory_gib * 1024)
        holders.append(_plain("environment worker", most, count=count))
    env = find_env(config.env.name)
    if env.agent is not None and agent_words(config, env):
        holders.append(_plain("agent with its guard", AGENT, count=roles["rollout"] * agents_at_one_time(config)))
    if config.bus.storage_units is not None:
        holders.append(_plain("TransferQueue process", QUEUE_PROCESS, count=1 + config.bus.storage_units))
    holders.append(_trainer("actor", config, config.parallel, model, work, publishes=True))
    if requirements.critic:
        holders.append(_trainer("critic", config, critic_parallel(config.parallel), model, work, publishes=False))
    for role, layout in worker_group_layouts(config).items():
        if role != "actor":
            parallel = forward_parallel(config.parallel, layout)
            holders.append(_forward(role, config, parallel, [model], work, follows=role == "actor_fwd"))
    if requirements.teacher is not None:
        holders += _teachers(config, requirements, work)
    holders.append(_engine("engine", config, model, work, count=config.engine.count))
    holders += judge_holders(config)
    if work.media is not None:
        encoder = Phase(name="always", terms={"encoding": encode_worker_bytes(work)})
        workers = roles["rollout"] * config.modality.workers
        holders.append(Holder(name="encode worker", count=workers, phases=(encoder,)))
        items = shared_item_bytes(config, work, rollout_workers=roles["rollout"], data_rows=data_rows)
        holders.append(Holder(name=SHARED_ITEMS, count=1, phases=(Phase(name="always", terms={"items": items}),)))
    return holders


def _teachers(config: RelaxConfig, requirements: Requirements, work: Workload) -> list[Holder]:
    assert requirements.teacher is not None
    models = [teacher_dimensions(model, family=config.model.family) for model in requirements.teacher.models.values()]
    if requirements.teacher.served_by == "forward":
        return [_forward("teacher", config, one_rank(config.parallel), models, work, follows=False)]
    engines = [_engine("teacher engine", config, one, work, count=1) for one in models]
    return [_plain("teacher", BASES["rollout"]), *engines]


def _imports(mib: int, model: ModelDimensions, *, vision: int) -> int:
    """Returns the bytes of a process's imports, with transformers' modules if it has a vision tower."""
    return (mib + (vision if model.patches is not None else 0)) * MIB


def _supervisor(config: RelaxConfig, work: Workload) -> int:
    """Returns the MiB of the process that starts the run, and checks its data in front."""
    named = [config.data.path, *(config.data.paths or ())]
    parquet = any(one is not None and Path(str(one)).suffix == ".parquet" for one in named)
    return BASES["supervisor"] + (HEADERS if work.media is not None else 0) + (PARQUET if parquet else 0)


def _plain(name: str, mib: int, *, count: int = 1) -> Holder:
    return Holder(name=name, count=count, phases=(Phase(name="always", terms={"imports": mib * MIB}),))


def _trainer(
    name: str,
    config: RelaxConfig,
    parallel: ParallelConfig,
    model: ModelDimensions,
    work: Workload,
    *,
    publishes: bool,
) -> Holder:
    """Returns the memory of a trainer's ranks, each of which counts like the fullest one."""
    stages = [
        Holder(
            name=name,
            count=world_size(parallel),
            phases=_trainer_phases(config, parallel, model, work, publishes=publishes, later=later),
        )
        for later in stages_of(parallel)
    ]
    return max(stages, key=lambda one: one.peak.bytes)


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
    imports = _imports(TRAINER, model, vision=TRAINER_VISION)
    state = {"imports": imports, **state_terms(config, parallel, model, later=later)}
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
        phases.append(Phase(name="sync", terms=state | kept | {"published weights": published}))
    return tuple(phases)


def _copy_bytes(parallel: ParallelConfig, state: Mapping[str, int]) -> int:
    """Returns the bytes that a rank writes during the next step; data-parallel ranks share equal parts."""
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
) -> Holder:
    """Returns the memory of a forward role; the models of several teachers all stay loaded.

    ``follows`` says that the role reads every published version.
    """
    size = dtype_bytes(config)
    largest = max(models, key=lambda one: one.parameters)
    weights = sum(share_of(parallel, one).parameters for one in models) * size
    state = {"imports": _imports(TRAINER, largest, vision=TRAINER_VISION), "weights": weights}
    passing = forward_terms(config, parallel, largest, work)
    passing["logits chunk"] = head_bytes(config, largest, work, split=parallel.tp)
    sync = {"published weights": largest.parameters * size}
    phases = [Phase(name="start", terms=state | sync), Phase(name="forward", terms=state | _with_kept(passing))]
    if follows:
        kept = {"kept by the allocator": sum(_with_kept(passing).values())}
        phases.append(Phase(name="sync", terms=state | kept | sync))
    return Holder(name=name, count=world_size(parallel), phases=tuple(phases))


def _engine(name: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int) -> Holder:
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
    return Holder(name=name, count=count, phases=phases)


def _prefix_terms(kept: int, token_bytes: int, work: Workload) -> dict[str, int]:
    """Returns the memory of ``kept`` tokens of finished responses, and of a prefill that goes on from them."""
    columns = min(max(PASS_COLUMNS, work.sample_tokens), work.samples_in_flight * work.sample_tokens)
    return {
        f"prefix cache ({kept} tokens)": kept * token_bytes,
        "copies of kept prefixes": 2 * columns * token_bytes,
    }


def cache_tokens(config: RelaxConfig, work: Workload) -> int:
    """Returns the tokens of the engine's grown KV cache: a rectangle whose columns double, within its budget."""
    engine, columns = config.engine, FIRST_COLUMNS
    if find_engine(engine.name).whole_cache:
        return engine.max_total_tokens
    while columns < work.sample_tokens:
        columns *= 2
    return min(work.samples_in_flight * min(columns, engine.context_tokens), engine.max_total_tokens)


def _with_kept(terms: Mapping[str, int]) -> dict[str, int]:
    kept = sum(size for name, size in terms.items() if name not in OF_MEDIA)
    return {**terms, "kept by the allocator": round(KEPT_BY_ALLOCATOR * kept)}
