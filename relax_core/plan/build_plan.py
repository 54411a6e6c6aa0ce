"""Builds the plan: everything that is known about a run before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_core.config.choices import LauncherKind
from relax_core.config.host_memory import available_bytes
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Requirements
from relax_core.control.host.run_paths import SHARED_MEMORY
from relax_core.control.run.role_counts import roles_of
from relax_core.data.sources import are_rows_named
from relax_core.plan.batch import batch_words, context_words, credit_words, episode_words, media_words
from relax_core.plan.data.context_length import planned_context
from relax_core.plan.data.data_check import DataLook, look_at_data
from relax_core.plan.data.epochs import epoch_words
from relax_core.plan.data.prompt_maker import stop_words
from relax_core.plan.encode_placement import EncodeNode, encode_nodes
from relax_core.plan.engine_room import engine_room, room_words
from relax_core.plan.gpu_placement import Place, gpus_of, place, placement_faults
from relax_core.plan.gpus import UNSEEN
from relax_core.plan.host_warnings import host_warnings
from relax_core.plan.memory.memory_cpu import cache_tokens, cpu_holders
from relax_core.plan.memory.memory_gpu import SHARED, cache_tokens_that_fit, gpu_holders
from relax_core.plan.memory.memory_terms import GIB, Holder, engine_bytes
from relax_core.plan.memory.transfers import Transfers, find_transfers
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.model.model_source import find_dimensions
from relax_core.plan.tower_ways import way_words
from relax_core.plan.unused_keys import unused_keys
from relax_core.plan.workload import Workload, find_workload
from relax_core.registry import find_algorithm, find_engine
from relax_core.roles.process.process_placement import engines_take_gpus
from relax_core.server.gateway_settings import EngineRoom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds everything that is known about a run before it starts.

    ``roles`` maps each role to its number of workers. ``free_bytes`` is this machine's free memory if the run would use
    it, else None. ``cache_tokens_fit`` is the room for KV-cache tokens on one engine's GPUs, else None. ``engines``
    says which engines may come while it trains; ``engine_room`` is None if none may be started. ``data`` is the result
    of the data check, and ``left_out`` the part of it that is not used as it is; both are empty if no data is
    available. ``warnings`` are printed first at a start. ``refused`` says why the run cannot work, each with the fix.
    ``not_yet`` says why it cannot start today although it could work. Memory, placement and transfers are empty if the
    layout itself is refused.
    """

    name: str
    model: ModelDimensions
    roles: Mapping[str, int]
    places: Sequence[Place]
    batch: Sequence[str]
    media: Sequence[str]
    context: Sequence[str]
    episodes: Sequence[str]
    credits: Sequence[str]
    work: Workload
    memory: Sequence[Holder]
    free_bytes: int | None
    cache_tokens: int
    cache_tokens_fit: int | None
    transfers: Transfers
    engines: Sequence[str]
    engine_room: EngineRoom | None
    data: Sequence[str]
    left_out: Sequence[str]
    unread: Sequence[str]
    warnings: Sequence[str]
    not_yet: Sequence[str]
    refused: Sequence[str]

    @property
    def total_bytes(self) -> int:
        """Returns the sum of all processes of a CPU run at their peaks."""
        return sum(holder.count * holder.peak.bytes for holder in self.memory)


def make_plan(config: RelaxConfig, not_yet: Sequence[str] = ()) -> Plan:
    """Returns the plan for a configuration whose checks found only ``not_yet``.

    Raises ValueError for a model that cannot be planned; everything else that cannot work is in ``refused``. A context
    that is not derived yet is derived here.
    """
    model = find_dimensions(config)
    if config.engine.context_length is None:
        config = planned_context(config)
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    roles = roles_of(config)
    look = _look(config)
    # An engine that takes its whole cache at the start has memory of its own for states.
    states = 0 if find_engine(config.engine.name).whole_cache else model.state_tokens(engine_bytes(config))
    work = find_workload(config, model, state_tokens=states)
    refused = [*_context_faults(config, model), *_state_faults(config, states), *placement_faults(config, roles, model)]
    on_gpus = config.placement.gpus_per_node > 0
    rows = None if look is None else look.rows

    def holders(changed: RelaxConfig) -> list[Holder]:
        if on_gpus:
            return gpu_holders(changed, gpus_of(config, roles), model=model, work=work)
        return cpu_holders(changed, requirements, roles, model=model, work=work, data_rows=rows)

    memory: list[Holder] = []
    ways: list[str] = []
    free = None
    encoding = encode_nodes(config, roles, work, data_rows=rows)
    if not refused:
        memory = holders(config)
        ways = list(way_words(config, work, model, peak=lambda changed: _trainer_peak(holders(changed))))
        free = available_bytes() if _runs_here(config) and not on_gpus else None
        refused += _gpu_faults(memory) if on_gpus else _cpu_faults(config, memory, free)
    room = engine_room(config, memory, here=_runs_here(config))
    transfers = find_transfers(config, requirements, model=model, work=work)
    of_host = host_warnings(config, memory, transfers, shared_memory=SHARED_MEMORY) if _runs_here(config) else ()
    return Plan(
        name=config.name,
        model=model,
        roles=roles,
        places=place(config, roles) if memory else [],
        batch=[*epoch_words(config), *batch_words(config, work)],
        media=[*media_words(config, work, model), *(node.words for node in encoding), *ways],
        context=context_words(config, work),
        episodes=episode_words(config, work),
        credits=credit_words(config, work),
        work=work,
        memory=memory,
        free_bytes=free,
        cache_tokens=config.engine.max_total_tokens if engines_take_gpus(config) else cache_tokens(config, work),
        cache_tokens_fit=cache_tokens_that_fit(config, model, work) if engines_take_gpus(config) else None,
        transfers=transfers,
        engines=list(room_words(config, room, free=free)),
        engine_room=room,
        data=[] if look is None else look.words(what=config.data.name),
        left_out=[] if look is None else look.left_out(),
        unread=list(unused_keys(config)),
        warnings=[
            *([UNSEEN] if on_gpus else []),
            *_order_words(config),
            *stop_words(config),
            *_encode_faults(encoding),
            *of_host,
        ],
        not_yet=list(not_yet),
        refused=refused,
    )


def as_json_values(plan: Plan) -> dict[str, Any]:
    """Returns plain dicts and lists, with the sum of each phase and the peak of each holder."""
    values = dataclasses.asdict(plan)
    values["model"]["parameters"] = plan.model.parameters
    for holder, of_holder in zip(plan.memory, values["memory"], strict=True):
        of_holder["peak"] = {"phase": holder.peak.name, "bytes": holder.peak.bytes}
        for phase, of_phase in zip(holder.phases, of_holder["phases"], strict=True):
            of_phase["bytes"] = phase.bytes
    values["total_bytes"] = plan.total_bytes
    values["can_work"] = not plan.refused
    values["can_start"] = not plan.refused and not plan.not_yet
    return values


def _trainer_peak(holders: Sequence[Holder]) -> int:
    return next(one.peak.bytes for one in holders if one.name in ("actor", SHARED))


def _encode_faults(nodes: Sequence[EncodeNode]) -> Iterator[str]:
    for node in nodes:
        yield from node.faults()


def _look(config: RelaxConfig) -> DataLook | None:
    data = config.data
    if config.launcher.name is LauncherKind.ray_job or (data.task is None and not are_rows_named(data)):
        return None
    return look_at_data(config)


def _order_words(config: RelaxConfig) -> Iterator[str]:
    """Warns that several rollout workers make a run without staleness unrepeatable."""
    if config.mode.max_staleness == 0 and not config.in_order:
        yield (
            f"mode.max_staleness=0 with rollout.workers={config.rollout.workers}: which worker rolls a group out "
            "depends on timing, so the same seed gives another run. With rollout.workers=1 it gives the same bits."
        )


def _runs_here(config: RelaxConfig) -> bool:
    return config.launcher.name is LauncherKind.local and config.launcher.ray_address is None


def _context_faults(config: RelaxConfig, model: ModelDimensions) -> Iterator[str]:
    """Checks the context of a published shape; a folder's and the built-in model's were checked before."""
    context = config.engine.context_tokens
    if config.model.path is None and config.model.builtin is None and context > model.positions:
        yield (
            f"engine.context_length={context} is more than the {model.positions} positions of "
            f"model.shape={model.name}. Use engine.context_length={model.positions} or less."
        )


def _state_faults(config: RelaxConfig, state_tokens: int) -> Iterator[str]:
    """Returns a sentence if the engine has no room for one group with its states, whatever the prompt."""
    group, new, room = config.algo.group_size, config.rollout.max_new_tokens, config.engine.max_total_tokens
    needed = group * (new + state_tokens)
    if state_tokens and needed > room:
        yield (
            f"engine.max_total_tokens={room} cannot hold one group: algo.group_size={group} x (rollout.max_new_tokens="
            f"{new} + {state_tokens} for the states of a sample's linear attention) = {needed}. Raise it."
        )


def _gpu_faults(memory: Sequence[Holder]) -> Iterator[str]:
    for holder in memory:
        if holder.peak.bytes > holder.limit:
            terms = ", ".join(f"{name} {size / GIB:.1f}" for name, size in holder.peak.terms.items() if size)
            yield (
                f"{holder.name}: {holder.peak.name} needs {holder.peak.bytes / GIB:.1f} GiB a GPU ({terms}), "
                f"placement.gpu_memory_gib={holder.limit / GIB:.1f}. {holder.room}."
            )


def _cpu_faults(config: RelaxConfig, memory: Sequence[Holder], free: int | None) -> Iterator[str]:
    """Returns one sentence with the largest sums if the run does not fit into this machine."""
    store = config.launcher.object_store_mb << 20
    need = sum(holder.count * holder.peak.bytes for holder in memory) + store
    if free is None or need <= free:
        return
    largest = sorted(memory, key=lambda holder: -holder.count * holder.peak.bytes)[:3]
    sums = ", ".join(f"{holder.count} x {holder.name} {holder.peak.bytes / GIB:.1f}" for holder in largest)
    yield (
        f"too little memory: the run needs about {need / GIB:.1f} GiB ({sums}, ...), {free / GIB:.1f} GiB are free. "
        "Close other programs, or lower engine.max_total_tokens, engine.max_running_samples, engine.count, "
        "parallel.dp, parallel.micro_batch_tokens, or the model's size. The terms: plan=true."
    )
