"""Builds the plan of a run with the other modules of `relax_core/plan`, and formats it as text."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.config.choices import LauncherKind
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.host_network import GLOO_INTERFACES, missing_interface, network_interfaces
from relax_core.control.host.run_paths import SHARED_MEMORY
from relax_core.data.sources import are_rows_named
from relax_core.observe.process_usage import available_bytes
from relax_core.plan.batch import (
    batch_notes,
    context_notes,
    credit_notes,
    episode_notes,
    lora_notes,
    media_notes,
    order_notes,
    plural,
)
from relax_core.plan.context_length import planned_context
from relax_core.plan.data_check import DataSummary, epoch_notes, summarize_data
from relax_core.plan.memory_plan import (
    SHARED,
    SHARED_ITEMS,
    cache_tokens,
    cache_tokens_that_fit,
    cpu_holders,
    gpu_holders,
    host_state_bytes,
)
from relax_core.plan.memory_terms import GIB, MemoryHolder, Transfers, engine_bytes, find_transfers, size_text
from relax_core.plan.model_dimensions import ModelDimensions, find_dimensions
from relax_core.plan.placement import (
    UNSEEN,
    EncodeNode,
    GpuPlacement,
    encode_nodes,
    engine_room,
    engine_room_notes,
    gpus_of,
    place,
    placement_faults,
    tower_layout_notes,
)
from relax_core.plan.prompt_maker import stop_token_warnings
from relax_core.plan.step_time import StepTime, estimate_step, time_lines
from relax_core.plan.unused_keys import unused_keys
from relax_core.plan.workload import Workload, find_workload
from relax_core.registry import find_algorithm, find_engine
from relax_core.roles.process_placement import engines_take_gpus, roles_of
from relax_core.server.order_types import EngineRoom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds the plan of a run.

    ``roles`` maps each role to its number of workers. ``free_bytes`` is this machine's free memory if the run uses this
    machine, else None. ``host_bytes`` is the memory of a host with GPUs for the state of its training ranks
    (`host_state_bytes`). ``cache_tokens_fit`` is the number of KV-cache tokens that fit on one engine's GPUs; it is
    None for engines on CPU cores. ``engines`` describes the engines that may be added during training, and
    ``engine_room`` the resources of one such engine; it is None if no engine may be added. ``time`` is the estimate of
    a step's seconds; it is None without a known GPU. ``data`` is the result of the data check, and ``left_out``
    describes its unused and shortened rows; both are empty if no data is available. A start prints ``warnings`` first.
    ``refused`` has the reasons why the run cannot work, each with a fix. ``not_yet`` has the reasons why a run that can
    work cannot start now. Memory and placement are empty if the layout itself is refused.
    """

    name: str
    model: ModelDimensions
    roles: Mapping[str, int]
    places: Sequence[GpuPlacement]
    batch: Sequence[str]
    media: Sequence[str]
    context: Sequence[str]
    episodes: Sequence[str]
    credits: Sequence[str]
    work: Workload
    memory: Sequence[MemoryHolder]
    free_bytes: int | None
    host_bytes: int
    cache_tokens: int
    cache_tokens_fit: int | None
    transfers: Transfers
    time: StepTime | None
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
        """Returns the sum of the peak memory of all processes of a CPU run."""
        return sum(holder.count * holder.peak.bytes for holder in self.memory)


def make_plan(config: RelaxConfig, not_yet: Sequence[str] = ()) -> Plan:
    """Returns the plan for a configuration; ``not_yet`` has the problems that prevent a start now.

    The checks found no other problems. Raises ValueError for a model that cannot be planned. Other reasons why the run
    cannot work are in `Plan.refused`. If engine.context_length is null, this function derives it.
    """
    model = find_dimensions(config)
    if config.engine.context_length is None:
        config = planned_context(config)
    requirements: Requirements = find_algorithm(config.algo.name).requirements(config.algo)
    roles = roles_of(config)
    look = _data_look(config)
    # An engine that allocates its whole cache at the start has separate memory for linear attention's states.
    states = 0 if find_engine(config.engine.name).whole_cache else model.state_tokens(engine_bytes(config))
    work = find_workload(config, model, state_tokens=states)
    refused = [*_context_faults(config, model), *_state_faults(config, states), *placement_faults(config, roles, model)]
    on_gpus = config.placement.gpus_per_node > 0
    rows = None if look is None else look.rows

    def holders(changed: RelaxConfig) -> list[MemoryHolder]:
        if on_gpus:
            return gpu_holders(changed, gpus_of(config, roles), model=model, work=work)
        return cpu_holders(changed, requirements, roles, model=model, work=work, data_rows=rows)

    memory: list[MemoryHolder] = []
    ways: list[str] = []
    free = None
    encoding = encode_nodes(config, roles, work, data_rows=rows)
    if not refused:
        memory = holders(config)
        ways = list(tower_layout_notes(config, work, model, peak=lambda changed: _trainer_peak(holders(changed))))
        free = available_bytes() if _runs_here(config) and not on_gpus else None
        refused += _gpu_faults(memory) if on_gpus else _cpu_faults(config, memory, free)
    room = engine_room(config, memory, here=_runs_here(config))
    transfers = find_transfers(config, requirements, model=model, work=work)
    host_bytes = 0 if refused else host_state_bytes(config, gpus_of(config, roles), model)
    of_host: list[str] = []
    if _runs_here(config):
        of_host = [
            *_host_memory_warning(host_bytes, free=available_bytes()),
            *host_warnings(config, memory, transfers, shared_memory=SHARED_MEMORY),
        ]
    return Plan(
        name=config.name,
        model=model,
        roles=roles,
        places=place(config, roles) if memory else [],
        batch=[*epoch_notes(config), *batch_notes(config, work), *lora_notes(config, model)],
        media=[*media_notes(config, work, model), *(node.description for node in encoding), *ways],
        context=context_notes(config, work),
        episodes=episode_notes(config, work),
        credits=credit_notes(config, work),
        work=work,
        memory=memory,
        free_bytes=free,
        host_bytes=host_bytes,
        cache_tokens=config.engine.max_total_tokens if engines_take_gpus(config) else cache_tokens(config, work),
        cache_tokens_fit=cache_tokens_that_fit(config, model, work) if engines_take_gpus(config) else None,
        transfers=transfers,
        time=None if refused else estimate_step(config, model, work, roles),
        engines=list(engine_room_notes(config, room, free=free)),
        engine_room=room,
        data=[] if look is None else look.describe(what=config.data.name),
        left_out=[] if look is None else look.left_out(),
        unread=list(unused_keys(config)),
        warnings=[
            *([UNSEEN] if on_gpus else []),
            *order_notes(config),
            *stop_token_warnings(config),
            *_encode_faults(encoding),
            *of_host,
        ],
        not_yet=list(not_yet),
        refused=refused,
    )


def as_json_values(plan: Plan) -> dict[str, Any]:
    """Returns the plan as dicts and lists, with the total bytes of each phase and the peak of each memory holder."""
    values = dataclasses.asdict(plan)
    values["model"]["parameters"] = plan.model.parameters
    for holder, of_holder in zip(plan.memory, values["memory"], strict=True):
        of_holder["peak"] = {"phase": holder.peak.name, "bytes": holder.peak.bytes}
        for phase, of_phase in zip(holder.phases, of_holder["phases"], strict=True):
            of_phase["bytes"] = phase.bytes
    if plan.time is not None:
        values["time"]["seconds"] = plan.time.seconds
    values["total_bytes"] = plan.total_bytes
    values["can_work"] = not plan.refused
    values["can_start"] = not plan.refused and not plan.not_yet
    return values


def _trainer_peak(holders: Sequence[MemoryHolder]) -> int:
    return next(holder.peak.bytes for holder in holders if holder.name in ("actor", SHARED))


def _encode_faults(nodes: Sequence[EncodeNode]) -> Iterator[str]:
    for node in nodes:
        yield from node.faults()


def _data_look(config: RelaxConfig) -> DataSummary | None:
    data = config.data
    if config.launcher.name is LauncherKind.ray_job or (data.task is None and not are_rows_named(data)):
        return None
    return summarize_data(config)


def _runs_here(config: RelaxConfig) -> bool:
    return config.launcher.name is LauncherKind.local and config.launcher.ray_address is None


def _context_faults(config: RelaxConfig, model: ModelDimensions) -> Iterator[str]:
    """Checks the context of a published shape.

    Validation has already checked the context of a folder or a built-in model.
    """
    context = config.engine.context_tokens
    if config.model.path is None and config.model.builtin is None and context > model.positions:
        yield (
            f"engine.context_length={context} is more than the {model.positions} positions of "
            f"model.shape={model.name}. Use engine.context_length={model.positions} or less."
        )


def _state_faults(config: RelaxConfig, state_tokens: int) -> Iterator[str]:
    """Yields a sentence if the engine's cache is too small for one group with an empty prompt, states included."""
    group, new, room = config.algo.group_size, config.rollout.max_new_tokens, config.engine.max_total_tokens
    needed = group * (new + state_tokens)
    if state_tokens and needed > room:
        yield (
            f"engine.max_total_tokens={room} cannot hold one group: algo.group_size={group} x (rollout.max_new_tokens="
            f"{new} + {state_tokens} for the states of a sample's linear attention) = {needed}. Raise it."
        )


def _gpu_faults(memory: Sequence[MemoryHolder]) -> Iterator[str]:
    for holder in memory:
        if holder.peak.bytes > holder.limit:
            terms = ", ".join(f"{name} {size / GIB:.1f}" for name, size in holder.peak.terms.items() if size)
            yield (
                f"{holder.name}: {holder.peak.name} needs {holder.peak.bytes / GIB:.1f} GiB a GPU ({terms}), "
                f"placement.gpu_memory_gib={holder.limit / GIB:.1f}. {holder.room}."
            )


def _cpu_faults(config: RelaxConfig, memory: Sequence[MemoryHolder], free: int | None) -> Iterator[str]:
    """Returns one sentence with the largest memory holders if the run does not fit into this machine's memory."""
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


NCCL_INTERFACES = "NCCL_SOCKET_IFNAME"


def host_warnings(
    config: RelaxConfig, memory: Sequence[MemoryHolder], transfers: Transfers, *, shared_memory: Path
) -> Iterator[str]:
    """Yields warnings for a run on this machine."""
    yield from _shared_memory_warning(memory, transfers, folder=shared_memory)
    names = os.environ.get(GLOO_INTERFACES, "")
    if names and (problem := missing_interface(names)) is not None:
        yield problem
    names = os.environ.get(NCCL_INTERFACES, "")
    if config.placement.gpus_per_node > 0 and names and not _nccl_matches(names):
        yield (
            f"{NCCL_INTERFACES}={names} matches no network interface of this machine "
            f"({', '.join(network_interfaces())}). Unset it or name another interface."
        )


def _host_memory_warning(needed: int, *, free: int) -> Iterator[str]:
    if needed > free:
        yield (
            f"the state of the trainer needs {size_text(needed)} of pinned host memory, and this machine has "
            f"{size_text(free)} free. Use a machine with more memory, or a smaller model."
        )


def _shared_memory_warning(memory: Sequence[MemoryHolder], transfers: Transfers, *, folder: Path) -> Iterator[str]:
    items = sum(holder.peak.bytes for holder in memory if holder.name == SHARED_ITEMS)
    need = transfers.published_bytes + items
    try:
        free = shutil.disk_usage(folder).free
    except FileNotFoundError:
        yield f"{folder} does not exist, but published weights need {size_text(need)} there. Mount a tmpfs there."
        return
    if free < need:
        of_items = f" and media items {size_text(items)}" if items else ""
        yield (
            f"{folder} has {size_text(free)} free, but {transfers.published_bytes // transfers.sync_bytes} weight "
            f"versions need {size_text(transfers.published_bytes)}{of_items}. Free some memory there, or enlarge it: "
            f"mount -o remount,size=SIZE {folder}; in a container: --shm-size=SIZE."
        )


def _nccl_matches(names: str) -> bool:
    """Returns whether an interface matches a list in NCCL's syntax.

    The list has prefixes of names. A leading ``=`` means whole names, and a leading ``^`` excludes names.
    """
    excludes, names = names.startswith("^"), names.removeprefix("^")
    exact, names = names.startswith("="), names.removeprefix("=")
    given = [name for name in names.split(",") if name]

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in given)

    return any(matches(interface) != excludes for interface in network_interfaces())


_WIDTH = 118


def as_text(plan: Plan) -> str:
    """Returns the plan as text of a few screens, with the verdict first."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Plan) -> Iterator[str]:
    yield from _verdict(plan)
    for number, warning in enumerate(plan.warnings):
        yield from ("", *_wrapped("Warning   " if number == 0 else " " * 10, warning.split(" "), between=""))
    model = plan.model
    experts = f", {model.experts.count} experts, {model.experts.per_token} a token" if model.experts else ""
    towers = "".join(f", {name} tower {size / 1e6:.0f}M" for name, size in model.towers.items())
    yield ""
    yield (
        f"Model     {model.name} ({model.family}): {model.parameters / 1e6:,.1f}M parameters, {model.layers} layers, "
        f"hidden {model.hidden}, {model.heads} heads, {model.kv_heads} key-value heads{experts}{towers}"
    )
    roles = ", ".join(role if count == 1 else f"{count} x {role}" for role, count in plan.roles.items())
    yield f"Services  {roles}; bus, metrics, controller"
    yield from _section("Placement", _placement(plan))
    yield from _section("Data", plan.data)
    yield from _section("Batch", plan.batch)
    yield from _section("Media", plan.media)
    yield from _section("Context", plan.context)
    yield from _section("Episodes", plan.episodes)
    yield from _section("Credits", plan.credits)
    yield from _section("Memory", _memory(plan))
    yield from _section("Engines", plan.engines)
    yield from _section("Sync", _transfers(plan))
    if plan.time is not None:
        yield from _section("Time", time_lines(plan.time))
    if plan.unread:
        yield from _section("Unread", (f"{setting}." for setting in plan.unread))


def _verdict(plan: Plan) -> Iterator[str]:
    if plan.refused:
        yield f"{plan.name}: this cannot work:"
        yield from (f"  - {problem}" for problem in plan.refused)
    elif plan.not_yet:
        yield f"{plan.name}: plans, but cannot start yet:"
    else:
        yield f"{plan.name}: can start."
    if plan.not_yet and plan.refused:
        yield "and it cannot start yet:"
    yield from (f"  - {problem}" for problem in plan.not_yet)


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f"{title if number == 0 else '':<10}{line}"


def _placement(plan: Plan) -> Iterator[str]:
    if plan.places and not any(role_place.gpus for role_place in plan.places):
        yield "every process on this machine's CPU cores"
        ranks = [
            f"{role_place.name} ({role_place.coordinates})" for role_place in plan.places if role_place.coordinates
        ]
        if ranks:
            yield from _wrapped("ranks ", ranks)
        return
    for node in sorted({role_place.node for role_place in plan.places}):
        on_gpus: dict[str, list[str]] = {}
        for role_place in (role_place for role_place in plan.places if role_place.node == node):
            gpus = (
                f"{role_place.gpus[0]}-{role_place.gpus[-1]}" if len(role_place.gpus) > 1 else str(role_place.gpus[0])
            )
            on_gpus.setdefault(gpus, []).append(
                role_place.name + (f" ({role_place.coordinates})" if role_place.coordinates else "")
            )
        yield from _wrapped(f"node {node}  GPU ", [f"{gpus}: {' + '.join(names)}" for gpus, names in on_gpus.items()])


def _wrapped(head: str, words: list[str], *, between: str = ",") -> Iterator[str]:
    line, indent = head, " " * len(head)
    for number, word in enumerate(words):
        end = "" if number == len(words) - 1 else between
        if len(line) + len(word) > _WIDTH and line.strip():
            yield line.rstrip()
            line = indent
        line += f"{word}{end} "
    yield line.rstrip()


def _memory(plan: Plan) -> Iterator[str]:
    if not plan.memory:
        return
    on_gpus = any(holder.limit for holder in plan.memory)
    yield "peak of each GPU, by phase" if on_gpus else "peak resident memory of each process, by phase"
    for holder in plan.memory:
        if on_gpus or not _only_imports(holder):
            yield from _holder(holder)
    if not on_gpus:
        small = [holder for holder in plan.memory if _only_imports(holder)]
        rest = sum(holder.count * holder.peak.bytes for holder in small)
        yield f"{sum(holder.count for holder in small)} other processes: {size_text(rest)}, their imports"
        free = f", {size_text(plan.free_bytes)} are free" if plan.free_bytes is not None else ""
        yield f"sum of all peaks: {size_text(plan.total_bytes)}{free}"
    if plan.host_bytes:
        yield f"host memory of a node for the trainer's state: {size_text(plan.host_bytes)}"
    if "engine" not in plan.roles:
        return
    fits = f", {plan.cache_tokens_fit} would fit" if plan.cache_tokens_fit is not None else ""
    yield f"KV cache of an engine: {plan.cache_tokens} tokens{fits}"


def _only_imports(holder: MemoryHolder) -> bool:
    return all(not size or name == "imports" for phase in holder.phases for name, size in phase.terms.items())


def _holder(holder: MemoryHolder) -> Iterator[str]:
    limit = f" of {size_text(holder.limit)}" if holder.limit else ""
    peak = holder.peak
    yield f"{holder.count} x {holder.name}: {size_text(peak.bytes)}{limit}, in {peak.name}"
    for phase in holder.phases:
        terms = [f"{name} {size_text(size)}" for name, size in phase.terms.items() if size]
        yield from _wrapped(f"    {phase.name:<9} {size_text(phase.bytes):>9} = ", terms)


def _transfers(plan: Plan) -> Iterator[str]:
    transfers = plan.transfers
    if transfers.kept_set_bytes:
        yield (
            f"kept sets: {transfers.kept_set_bytes} bytes a sampled token and "
            f"{size_text(transfers.kept_step_bytes)} a train step at most; a set of n tokens takes 4 + 4 n bytes"
        )
    if "engine" in plan.roles:
        yield (
            f"weights: {size_text(transfers.sync_bytes)} a version, {plural(transfers.receivers, 'receiver')}; "
            f"published versions take {size_text(transfers.published_bytes)} at most"
        )
        yield f"to the engines by {transfers.transport}: {transfers.transport_reason}"
    yield (
        f"checkpoint: {size_text(transfers.checkpoint_bytes)}; {transfers.checkpoints_kept} are kept, "
        f"{size_text(transfers.checkpoints_kept * transfers.checkpoint_bytes)} on disk"
    )
    if transfers.passed_bytes:
        yield f"an export copies {size_text(transfers.passed_bytes)} of unused tensors from model.path"
