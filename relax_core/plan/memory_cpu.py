"""Peak resident memory of every process of a run on CPU cores.

A process's base is what its imports take; it was measured with the versions of constraints.txt on x86-64 Linux
(docs/plan.md says how). Memory mapped from files counts like any other, as `ps` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Needs
from relax_core.plan.dimensions import ModelDimensions
from relax_core.plan.memory import (
    FLOAT,
    MIB,
    Holder,
    Phase,
    activation_values,
    dtype_bytes,
    head_bytes,
    mask_bytes,
    mask_making_bytes,
    optimizer_bytes_a_parameter,
)
from relax_core.plan.models import teacher_dimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_reward

TRAINER, ENGINE = 435, 256
BASES = {  # MiB
    "supervisor": 38,
    "controller": 216,
    "Ray gcs": 53,
    "Ray raylet": 40,
    "Ray monitor": 84,
    "Ray dashboard": 117,
    "Ray log monitor": 80,
    "Ray dashboard agent": 122,
    "Ray runtime-env agent": 81,
    "Serve controller": 164,
    "bus": 133,
    "metrics": 135,
    "advantages": 322,
    "rollout": 154,
    "owner of an engine": 131,
}
FRONT, REWARD_WORKER, QUEUE_PROCESS = 164, 65, 250
KEPT_BY_ALLOCATOR = 0.5  # of what a micro-batch allocates: pieces that glibc neither gives back nor fits into
SAMPLING_COPIES = 8  # float32 arrays [samples, vocabulary] of one decode step
SLOT_BYTES = 256  # of the table of running samples, which is made at once
FIRST_COLUMNS = 64  # of the engine's KV cache, which then doubles


def cpu_holders(
    config: RelaxConfig, needs: Needs, roles: Mapping[str, int], *, model: ModelDimensions, work: Workload
) -> list[Holder]:
    """Every process of the run."""
    holders = [_plain(name, mib) for name, mib in BASES.items() if name != "owner of an engine"]
    engines = roles["engine"] + roles.get("teacher_engine", 0)
    holders.append(_plain("owner of an engine", BASES["owner of an engine"], count=engines))
    holders.append(_plain("Serve front of a role", FRONT, count=len(roles)))
    if find_reward(config.reward.name).isolated:
        holders.append(_plain("reward worker", REWARD_WORKER, count=config.rollout.reward_workers))
    if config.bus.storage_units is not None:
        holders.append(_plain("TransferQueue process", QUEUE_PROCESS, count=1 + config.bus.storage_units))
    holders.append(_trainer("actor", config, model, work, ranks=config.parallel.dp, publishes=True))
    if needs.critic:
        holders.append(_trainer("critic", config, model, work, ranks=1, publishes=False))
    if needs.old_logprobs == "actor_fwd":
        holders.append(_forward("actor_fwd", config, [model], work, follows=True))
    if needs.reference:
        holders.append(_forward("reference", config, [model], work, follows=False))
    if needs.teacher is not None:
        holders += _teachers(config, needs, work)
    holders.append(_engine("engine", config, model, work, count=config.engine.count))
    return holders


def _teachers(config: RelaxConfig, needs: Needs, work: Workload) -> list[Holder]:
    assert needs.teacher is not None
    models = [teacher_dimensions(model) for model in needs.teacher.models.values()]
    if needs.teacher.served_by == "forward":
        return [_forward("teacher", config, models, work, follows=False)]
    engines = [_engine("teacher engine", config, one, work, count=1) for one in models]
    return [_plain("teacher", BASES["rollout"]), *engines]


def _plain(name: str, mib: int, *, count: int = 1) -> Holder:
    return Holder(name=name, count=count, phases=(Phase(name="always", terms={"imports": mib * MIB}),))


def _trainer(
    name: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, ranks: int, publishes: bool
) -> Holder:
    size, parameters = dtype_bytes(config), model.parameters
    shards = ranks if config.parallel.distributed_optimizer else 1
    state = {
        "imports": TRAINER * MIB,
        "weights": parameters * size,
        "gradients": parameters * FLOAT,
        "Adam states": parameters * optimizer_bytes_a_parameter(config) // shards,
    }
    activations = {
        "activations": work.micro_batch_rows * model.layers * activation_values(model) * size,
        "attention mask": mask_bytes(config, work),
    }
    forward = _with_kept({**activations, "making the mask": mask_making_bytes(work)})
    backward = _with_kept({**activations, "logits chunk": head_bytes(config, model, work)})
    kept = {"kept by the allocator": max(sum(forward.values()), sum(backward.values()))}
    phases = [
        Phase(name="start", terms={"imports": TRAINER * MIB, "weights": 2 * parameters * size}),
        Phase(name="forward", terms=state | forward),
        Phase(name="backward", terms=state | backward),
        Phase(name="optimizer", terms=state | kept),
    ]
    if publishes:
        phases.append(Phase(name="sync", terms=state | kept | {"published weights": parameters * size}))
    return Holder(name=name, count=ranks, phases=tuple(phases))


def _forward(
    name: str, config: RelaxConfig, models: Sequence[ModelDimensions], work: Workload, *, follows: bool
) -> Holder:
    """One process; of several teachers' models all stay loaded. ``follows``: it reads every published version."""
    size = dtype_bytes(config)
    largest = max(models, key=lambda one: one.parameters)
    state = {"imports": TRAINER * MIB, "weights": sum(one.parameters for one in models) * size}
    passing = {
        "one layer": work.micro_batch_rows * activation_values(largest) * size,
        "attention mask": mask_bytes(config, work) + mask_making_bytes(work),
        "logits chunk": head_bytes(config, largest, work),
    }
    sync = {"published weights": largest.parameters * size}
    phases = [Phase(name="start", terms=state | sync), Phase(name="forward", terms=state | _with_kept(passing))]
    if follows:
        kept = {"kept by the allocator": sum(_with_kept(passing).values())}
        phases.append(Phase(name="sync", terms=state | kept | sync))
    return Holder(name=name, count=1, phases=tuple(phases))


def _engine(name: str, config: RelaxConfig, model: ModelDimensions, work: Workload, *, count: int) -> Holder:
    size = dtype_bytes(config)
    state = {"imports": ENGINE * MIB, "weights": model.parameters * size}
    serving = {
        f"KV cache ({cache_tokens(config, work)} tokens)": cache_tokens(config, work)
        * model.cache_values_per_token
        * size,
        "sampling": SAMPLING_COPIES * work.samples_in_flight * model.vocabulary * FLOAT,
        "slots": SLOT_BYTES * config.engine.max_running_samples,
    }
    new = {"new weights": model.parameters * size}
    phases = (
        Phase(name="start", terms=state | new),
        Phase(name="rollout", terms=state | serving),
        Phase(name="sync", terms=state | serving | new),
        Phase(name="wake-up", terms=state | serving),
    )
    return Holder(name=name, count=count, phases=phases)


def cache_tokens(config: RelaxConfig, work: Workload) -> int:
    """Tokens of the engine's KV cache once it has grown: a rectangle whose columns double, within its budget."""
    engine, columns = config.engine, FIRST_COLUMNS
    while columns < work.sample_tokens:
        columns *= 2
    return min(work.samples_in_flight * min(columns, engine.context_length), engine.max_total_tokens)


def _with_kept(terms: Mapping[str, int]) -> dict[str, int]:
    return {**terms, "kept by the allocator": round(KEPT_BY_ALLOCATOR * sum(terms.values()))}
