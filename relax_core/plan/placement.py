"""Plans a run's placement: GPUs and nodes of roles, encode workers, towers on ranks, and room for further engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_core.config.choices import GpuName, LauncherKind, ModeName, StatesPlace
from relax_core.config.errors import NotYet
from relax_core.config.schema import (
    ParallelConfig,
    PlacementConfig,
    RayJobLauncherConfig,
    RelaxConfig,
    SlurmLauncherConfig,
)
from relax_core.control.engine_set import autoscaler_bounds, limits_of, usable_engines
from relax_core.observe.process_usage import available_bytes
from relax_core.plan.batch import plural, tower_share
from relax_core.plan.gpu_models import gpu_memory_gib
from relax_core.plan.memory_terms import (
    GIB,
    MemoryHolder,
    encode_worker_bytes,
    patches_of_micro_batch,
    patches_of_rank,
    shared_item_bytes,
    stage_layers,
)
from relax_core.plan.model_dimensions import ModelDimensions, layout_shape
from relax_core.plan.workload import Workload
from relax_core.registry import find_engine
from relax_core.roles.process_placement import (
    engines_take_gpus,
    forward_columns,
    judges_take_gpus,
    layout_key,
    worker_group_layouts,
)
from relax_core.roles.role_context import JUDGE_ENGINE, TEACHER_ENGINE
from relax_core.server.order_types import EngineRoom
from relax_core.train.device import DEVICES, VARIABLE
from relax_core.train.parallel_layout import FORWARD_ROLES, first_stage_sizes, rank_coordinates, rank_faults

MODEL_ROLES = ("actor", "rollout", "critic", "reference", "actor_fwd", "teacher", TEACHER_ENGINE, JUDGE_ENGINE)
ROLLOUT = "rollout"  # the role's GPUs run the engines
_COORDINATES = ("pp", "dp", "cp", "tp", "ep", "etp")  # in the order in which they are printed


@dataclass(frozen=True, kw_only=True)
class GpuPlacement:
    """Holds the GPUs of one rank or engine.

    ``name`` is the name of the rank or engine. ``gpus`` are GPU numbers on the node, from 0; empty means CPU cores.
    ``coordinates`` are the position of a trainer rank in its parallel layout.
    """

    name: str
    node: int
    gpus: tuple[int, ...] = ()
    coordinates: str = ""


def gpus_of(config: RelaxConfig, roles: Mapping[str, int]) -> dict[str, int]:
    """Maps each role with a model to its number of GPUs. With mode=colocate each role has all GPUs."""
    placement = config.placement
    if config.mode.name is ModeName.colocate:
        return dict.fromkeys(needed_roles(config, roles), placement.nodes * placement.gpus_per_node)
    return dict(placement.roles)


def needed_roles(config: RelaxConfig, roles: Mapping[str, int]) -> list[str]:
    """Returns the roles that need GPUs, in order of placement. The engines belong to the role rollout."""
    on_cores = set() if engines_take_gpus(config) else {ROLLOUT, TEACHER_ENGINE}
    if not judges_take_gpus(config):
        on_cores.add(JUDGE_ENGINE)
    return [role for role in MODEL_ROLES if role in roles and role not in on_cores]


def placement_faults(config: RelaxConfig, roles: Mapping[str, int], model: ModelDimensions) -> Iterator[str]:
    """Yields one sentence for each fault of the placement, such as a role without GPUs.

    Another check has already verified that the layouts divide the model's sizes.
    """
    placement = config.placement
    total = placement.nodes * placement.gpus_per_node
    if total == 0:
        branch = DEVICES.get(os.environ.get(VARIABLE, ""))
        if config.optimizer.states is StatesPlace.host and (branch is None or not branch.gpu):
            yield (
                "optimizer.states=host with placement.gpus_per_node=0: on CPU cores the states are in host memory "
                "already. Use optimizer.states=device, or choose placement=gpu."
            )
        if placement.roles or placement.nodes != 1:
            yield (
                f"placement.nodes={placement.nodes}, placement.roles={placement.roles} with no GPUs. "
                "Choose placement=gpu; machines without GPUs are launcher.nodes."
            )
        return
    if gpu_memory_gib(placement) == 0:
        yield (
            f"placement.gpu={'null' if placement.gpu is None else placement.gpu.value} with placement.gpu_memory_gib="
            f"{'null' if placement.gpu_memory_gib is None else placement.gpu_memory_gib}: the memory of a GPU is "
            f"unknown. Set placement.gpu, one of {', '.join(name.value for name in GpuName)}, or the memory in GiB."
        )
    yield from _role_faults(config, roles)
    gpus = gpus_of(config, roles)
    colocate = config.mode.name is ModeName.colocate
    for role, layout in worker_group_layouts(config).items():
        if role in gpus:
            ranks_key = "placement.gpus_per_node" if colocate else f"placement.roles.{role}"
            yield from rank_faults(layout, ranks=gpus[role], ranks_key=ranks_key, key=layout_key(role))
    if ROLLOUT in gpus:
        yield from _engine_faults(config, gpus[ROLLOUT], model)
    launcher = config.launcher
    if isinstance(launcher, SlurmLauncherConfig) and launcher.nodes != placement.nodes:
        yield (
            f"launcher.nodes={launcher.nodes} with placement.nodes={placement.nodes}. "
            f"Set launcher.nodes={placement.nodes}."
        )


def _role_faults(config: RelaxConfig, roles: Mapping[str, int]) -> Iterator[str]:
    placement, needed = config.placement, needed_roles(config, roles)
    total = placement.nodes * placement.gpus_per_node
    if config.mode.name is ModeName.colocate:
        if placement.roles:
            yield f"placement.roles={placement.roles} with mode=colocate, where all roles share all GPUs. Drop it."
        return
    for role in needed:
        if placement.roles.get(role, 0) < 1:
            shared = ", or set placement.forward=actor" if role in FORWARD_ROLES else ""
            yield (
                f"placement.roles.{role} is not set, and algo={config.algo.name} needs that role. "
                f"Give it GPUs: +placement.roles.{role}=4{shared}"
            )
    for role in placement.roles:
        if role in forward_columns(config) and role not in needed:
            yield (
                f"placement.roles.{role}={placement.roles[role]} with placement.forward=actor: the actor's ranks "
                "compute its log-probs. Drop it, or set placement.forward=separate."
            )
        elif role not in needed:
            yield (
                f"placement.roles.{role}={placement.roles[role]}: algo={config.algo.name} with its settings has no "
                f"such role on a GPU. Drop it. Its roles: {', '.join(needed)}."
            )
    wanted = sum(placement.roles.values())
    if wanted > total:
        yield (
            f"placement.roles ask for {wanted} GPUs, placement.nodes={placement.nodes} x gpus_per_node="
            f"{placement.gpus_per_node} = {total}. Lower one, or set placement.nodes="
            f"{-(-wanted // placement.gpus_per_node)}."
        )


def _engine_faults(config: RelaxConfig, gpus: int, model: ModelDimensions) -> Iterator[str]:
    engine = config.engine
    if engine.count * engine.tp != gpus:
        fix = f"engine.count={gpus // engine.tp}" if gpus % engine.tp == 0 else f"engine.tp=1 engine.count={gpus}"
        yield (
            f"engine.count={engine.count} x engine.tp={engine.tp} = {engine.count * engine.tp} GPUs, but rollout has "
            f"{gpus}. Set {fix}."
        )
    if config.placement.gpus_per_node % engine.tp:
        yield (
            f"engine.tp={engine.tp} does not divide placement.gpus_per_node={config.placement.gpus_per_node}: an "
            "engine would have GPUs of two machines. Use a divisor."
        )
    if model.heads % engine.tp:
        yield f"engine.tp={engine.tp} does not divide the model's {model.heads} attention heads. Use a divisor."


def place(config: RelaxConfig, roles: Mapping[str, int]) -> list[GpuPlacement]:
    """Returns the GPUs of every rank and engine of a configuration without faults.

    GPUs are assigned role by role.
    """
    if config.placement.gpus_per_node == 0:
        return [
            GpuPlacement(name=f"{role}-{rank}", node=0, coordinates=_coordinates(config, role, rank))
            for role, count in roles.items()
            for rank in range(count)
        ]
    places: list[GpuPlacement] = []
    first = 0
    for role, count in gpus_of(config, roles).items():
        start = 0 if config.mode.name is ModeName.colocate else first
        places += list(_of_role(config, role, start=start, count=count))
        first += count
    return places


def _of_role(config: RelaxConfig, role: str, *, start: int, count: int) -> Iterator[GpuPlacement]:
    width = config.engine.tp if role == ROLLOUT else 1
    name = "engine" if role == ROLLOUT else role
    for number in range(count // width):
        node, gpu = divmod(start + number * width, config.placement.gpus_per_node)
        coordinates = _coordinates(config, role, number)
        yield GpuPlacement(
            name=f"{name}-{number}", node=node, gpus=tuple(range(gpu, gpu + width)), coordinates=coordinates
        )


def _coordinates(config: RelaxConfig, role: str, rank: int) -> str:
    """Returns a rank's coordinates in its worker group for the dimensions with a size above 1."""
    layout = worker_group_layouts(config).get(role)
    if layout is None:
        return ""
    at = rank_coordinates(layout, rank)
    return " ".join(f"{key}{getattr(at, key)}" for key in _COORDINATES if getattr(layout, key) > 1)


TORCH_S = 60.0  # seconds for an interpreter to import torch and to query the driver
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # device files of NVIDIA, of AMD, and of WSL for GPUs under Windows
SMALLER = 0.97  # share of placement.gpu_memory_gib: torch reports slightly less than the driver
UNSEEN = (
    "GPUs: Relax has run on one GPU only, with the trainer of a tiny model and the embedded engine. Several "
    "GPUs, SGLang on a GPU, the transfer of weights to it, and recovery on GPUs have been tested only on CPU cores, "
    "and the plan's memory numbers for a GPU are assumptions. "
    "Begin with a few steps of a small model, and watch the memory and the log-prob gap between engine and trainer."
)
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
print(json.dumps({"torch": torch.__version__, "sizes": sizes}))
"""


@dataclass(frozen=True, kw_only=True)
class FoundGpus:
    """Describes the GPUs of this machine.

    ``device_files`` are the drivers' files in /dev. ``sizes`` are the bytes of memory of each GPU that torch can use.
    ``torch`` is torch's version, or the reason why the query failed; it is empty if no driver was found.
    """

    device_files: Sequence[str] = ()
    sizes: Sequence[int] = ()
    torch: str = ""


def find_gpus(devices: Path = Path("/dev")) -> FoundGpus:
    """Looks for the drivers' files below ``devices``; if there are any, queries torch in a separate process."""
    files = device_files(devices)
    if not files:
        return FoundGpus()
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FoundGpus(device_files=files, torch=f"which did not answer within {TORCH_S:.0f} s")
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["no error output"])[-1]
        return FoundGpus(device_files=files, torch=f"which failed: {last}")
    output = json.loads(asked.stdout)
    return FoundGpus(device_files=files, sizes=output["sizes"], torch=output["torch"])


def device_files(devices: Path = Path("/dev")) -> list[str]:
    """Returns the drivers' files below ``devices``; empty on a machine without a GPU."""
    return sorted(str(file) for pattern in DEVICE_FILES for file in devices.glob(pattern))


def gpu_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of a start on GPUs that can be detected on this machine.

    After a run has joined an external Ray cluster, `relax_core.roles.process_placement.cluster_fault` counts its GPUs.
    """
    placement, launcher = config.placement, config.launcher
    if not placement.gpus_per_node:
        return
    if launcher.name is LauncherKind.local and launcher.ray_address is None:
        yield from machine_faults(placement, find_gpus())


def machine_faults(placement: PlacementConfig, found: FoundGpus) -> Iterator[NotYet]:
    """Yields a sentence if this machine lacks GPUs for a run that starts Ray itself.

    Such a run can still be planned.
    """
    wanted = f"placement.gpus_per_node={placement.gpus_per_node}"
    have = len(found.sizes)
    if placement.nodes > 1 and found.device_files:
        yield NotYet(
            f"placement.nodes={placement.nodes} with the run's own Ray, which has only this machine. Add "
            "launcher.ray_address=auto, or choose launcher=slurm."
        )
    if not found.device_files:
        looked = ", ".join(f"/dev/{pattern}" for pattern in DEVICE_FILES)
        fix = "Choose placement=cpu."
        if placement.nodes > 1:
            wanted = f"placement.nodes={placement.nodes} {wanted}"
            fix = "Start it on the machine with the GPUs, with launcher=slurm or launcher.ray_address=auto."
        yield NotYet(f"{wanted}, and this machine has no GPU: none of {looked} exists. {fix}")
    elif not have:
        yield NotYet(
            f"{wanted}, and this machine has {found.device_files[0]}, but the torch of "
            f"{sys.executable} finds no GPU ({found.torch}): torch.cuda.is_available() is false. Install the build of "
            "torch for the driver's CUDA version, and check that CUDA_VISIBLE_DEVICES names a GPU."
        )
    elif have < placement.gpus_per_node:
        yield NotYet(f"{wanted}, and torch finds {have} on this machine. Set placement.gpus_per_node={have}.")
    else:
        smallest = min(found.sizes) / (1 << 30)
        if smallest < SMALLER * gpu_memory_gib(placement):
            yield NotYet(
                f"placement.gpu_memory_gib={gpu_memory_gib(placement):g}, and the smallest GPU of this machine has "
                f"{smallest:.1f}. Set placement.gpu_memory_gib={smallest:.1f}."
            )


@dataclass(frozen=True, kw_only=True)
class EncodeNode:
    """Holds a node that encodes media: its encode workers, their bytes of memory, and the bytes of the shared items.

    ``cores`` and ``memory`` are the node's resources; they are None if only a running Ray cluster knows them.
    """

    number: int
    rollouts: int
    workers: int
    worker_bytes: int
    item_bytes: int
    cores: int | None
    memory: int | None

    @property
    def description(self) -> str:
        """Returns the plan's sentences about the node."""
        of_cores = "" if self.cores is None else f" on {plural(self.cores, 'core')}"
        of_memory = "" if self.memory is None else f" of {self.memory / GIB:.1f} GiB"
        return (
            f"Node {self.number} has {plural(self.rollouts, 'rollout worker')} with "
            f"{plural(self.workers, 'encode worker')}{of_cores}. They take {self.worker_bytes / GIB:.2f} GiB"
            f"{of_memory}, and their items {self.item_bytes / GIB:.2f} GiB of /dev/shm."
        )

    def faults(self) -> Iterator[str]:
        """Yields sentences if the node has fewer cores than encode workers, or too little memory."""
        fits = "Use a smaller modality.workers or fewer rollout.workers."
        here = f"modality.workers={self.workers // self.rollouts}: node {self.number} has "
        here += f"{plural(self.rollouts, 'rollout worker')}, so {plural(self.workers, 'encode worker')}"
        if self.cores is not None and self.workers > self.cores:
            yield f"{here} on {plural(self.cores, 'core')}. {fits}"
        needed = self.worker_bytes + self.item_bytes
        if self.memory is not None and needed > self.memory:
            yield (
                f"{here} that need {needed / GIB:.1f} GiB with their items; it has {self.memory / GIB:.1f} GiB. {fits}"
            )


def encode_nodes(
    config: RelaxConfig, roles: Mapping[str, int], work: Workload, *, data_rows: int | None
) -> list[EncodeNode]:
    """Returns the nodes with rollout workers and thus with encode workers; empty for a text-only run.

    Rollout workers are spread over all nodes, node 0 first (`relax_core.roles.process_placement.node_options`).
    """
    if work.media is None:
        return []
    nodes = max(config.placement.nodes, config.launcher.nodes)
    cores, memory = cores_of_a_node(config), _host_memory(config)
    found = []
    for number, rollouts in sorted(Counter(rank % nodes for rank in range(roles["rollout"])).items()):
        workers = rollouts * config.modality.workers
        found.append(
            EncodeNode(
                number=number,
                rollouts=rollouts,
                workers=workers,
                worker_bytes=workers * encode_worker_bytes(work),
                item_bytes=shared_item_bytes(config, work, rollout_workers=rollouts, data_rows=data_rows),
                cores=cores,
                memory=memory,
            )
        )
    return found


def _runs_here(config: RelaxConfig) -> bool:
    one_node = config.placement.nodes == 1
    return config.launcher.name is LauncherKind.local and config.launcher.ray_address is None and one_node


def cores_of_a_node(config: RelaxConfig) -> int | None:
    """Returns the CPU cores that the run may use on each of its nodes, or None if unknown on this machine."""
    if isinstance(config.launcher, SlurmLauncherConfig | RayJobLauncherConfig):
        return config.launcher.cpus_per_node
    return _own_cores() if _runs_here(config) else None


def _own_cores() -> int:
    """Returns the cores that this process may use by its CPU affinity and its container's limit (control group v2)."""
    cores = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, period = limit.read_text().split() if limit.is_file() else ("max", "1")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _host_memory(config: RelaxConfig) -> int | None:
    if isinstance(config.launcher, SlurmLauncherConfig | RayJobLauncherConfig):
        gigabytes = config.launcher.memory_gb
        return None if gigabytes is None else round(gigabytes * 1e9)
    return available_bytes() if _runs_here(config) else None


OF_ENGINES = ("engine", "owner of an engine")  # the memory holders of one engine


def engine_room(config: RelaxConfig, memory: Sequence[MemoryHolder], *, here: bool) -> EngineRoom | None:
    """Returns the resources of a further engine, or None if the run cannot add engines during training.

    ``memory`` is the plan's memory, and ``here`` is True if the run uses only this machine.
    """
    limits = limits_of(config)
    if config.gateway.name == "none" or limits.refusal or limits.no_more or not memory:
        return None
    return EngineRoom(
        usable=usable_engines(config),
        engine_bytes=sum(holder.peak.bytes for holder in memory if holder.name in OF_ENGINES),
        engine_cores=config.engine.threads,
        machine_cores=os.cpu_count() if here else None,
    )


def engine_room_notes(config: RelaxConfig, room: EngineRoom | None, *, free: int | None) -> Iterator[str]:
    """Yields sentences about adding and removing engines; ``free`` is this machine's free memory in bytes."""
    if config.gateway.name == "none":
        return
    limits = limits_of(config)
    if why := limits.refusal or limits.no_more:
        yield why
        return
    start = plural(limits.start, "engine")
    if room is None:
        yield f"{start} at the start, and up to {limits.most} by order"
        return
    yield (
        f"{start} at the start, and up to {limits.most} by order; the samples in flight can fill "
        f"{plural(room.usable, 'engine')}"
    )
    left = "" if free is None else f" of {free / GIB:.1f} GiB that are free"
    cores = "" if room.machine_cores is None else f" of this machine's {room.machine_cores}"
    yield (
        f"each added engine takes {room.engine_bytes / GIB:.1f} GiB{left}, and "
        f"{plural(room.engine_cores, 'core')}{cores}"
    )
    if config.engine.autoscaler.enabled:
        least, most = autoscaler_bounds(config)
        yield (
            f"the autoscaler orders {least} to {most} engines"
            if most > least
            else f"the autoscaler orders no engine, because the samples can fill only {plural(least, 'engine')}"
        )


UNBALANCED = 1.1  # a layout is proposed if the configured layout takes more than this factor longer
AS_GOOD = 1.02  # layouts with times within this factor are equally good; the first of them is proposed


@dataclass(frozen=True, kw_only=True)
class TowerLayout:
    """Holds a distribution of the towers' work over ranks: its settings of `parallel` and its costs.

    ``time`` is the time of the slowest stage, divided by the time that a rank would take with equal work on all ranks.
    ``size`` is the peak memory of the trainer's fullest rank, in bytes.
    """

    parallel: ParallelConfig
    time: float
    size: int

    @property
    def settings(self) -> str:
        """Returns the layout as settings, such as "parallel.shard_media=true parallel.first_stage_layers=null"."""
        layers = "null" if self.parallel.first_stage_layers is None else self.parallel.first_stage_layers
        words = [f"parallel.shard_media={str(self.parallel.shard_media).lower()}"]
        return " ".join([*words, *([f"parallel.first_stage_layers={layers}"] if self.parallel.pp > 1 else [])])


def tower_layout_notes(
    config: RelaxConfig, work: Workload, model: ModelDimensions, *, peak: Callable[[RelaxConfig], int]
) -> Iterator[str]:
    """Yields sentences that compare layouts of the towers' work over tensor-, context- and pipeline-parallel ranks.

    ``peak`` returns the bytes of the trainer's fullest rank for a configuration. A layout that is clearly faster than
    the configured layout is proposed.
    """
    parallel = config.parallel
    if work.media is None or model.patches is None or parallel.tp * parallel.cp * parallel.pp == 1:
        return
    towers = tower_share(config, work, model)
    ways = [_way(config, change, work, model, towers=towers, peak=peak) for change in _changes(config, work, model)]
    yield "Layouts of the towers' work: peak of a rank; time of the slowest stage relative to an equal share of work."
    for way in ways:
        configured = " (configured)" if way.parallel == parallel else ""
        yield f"  {way.settings}: {way.size / GIB:.2f} GiB; {way.time:.2f}{configured}"
    now = _way(config, {}, work, model, towers=towers, peak=peak)
    best = next(way for way in ways if way.time <= AS_GOOD * min(way.time for way in ways))
    if now.time > UNBALANCED * best.time:
        yield f"The towers unbalance the ranks. Set {best.settings}."
    if parallel.shard_media and find_engine(config.engine.name).shards_items and config.engine.tp > 1:
        audio = "audio" in model.towers
        splits = (
            "splits the towers of an audio model over its GPUs" if audio else "also distributes images over its GPUs"
        )
        yield f"engine={config.engine.name} {splits}{'' if audio else ' (--mm-enable-dp-encoder)'}."


def _changes(config: RelaxConfig, work: Workload, model: ModelDimensions) -> Iterator[dict[str, Any]]:
    """Yields the settings of each layout: shared media items or not, and equal or fewer layers in the first stage.

    The smaller number of first-stage layers is the configured number, or the fastest number if none is configured.
    """
    parallel = config.parallel
    sizes = [
        first
        for first in first_stage_sizes(parallel, layout_shape(model), vpp=parallel.vpp)
        if first * parallel.pp < model.layers
    ]
    for layers in (False, True) if parallel.pp > 1 and sizes else (False,):
        for sharded in (False, True) if parallel.tp * parallel.cp > 1 else (False,):
            first = None
            if layers:
                towers = tower_share(config, work, model)
                tried = {size: replace(parallel, shard_media=sharded, first_stage_layers=size) for size in sizes}
                first = min(sizes, key=lambda size: slowest_stage(tried[size], work, model, towers=towers))
                if parallel.first_stage_layers is not None and parallel.shard_media == sharded:
                    first = parallel.first_stage_layers
            yield {"shard_media": sharded, "first_stage_layers": first}


def _way(
    config: RelaxConfig,
    change: dict[str, Any],
    work: Workload,
    model: ModelDimensions,
    *,
    towers: float,
    peak: Callable[[RelaxConfig], int],
) -> TowerLayout:
    parallel = replace(config.parallel, **change)
    time = slowest_stage(parallel, work, model, towers=towers)
    return TowerLayout(parallel=parallel, time=time, size=peak(replace(config, parallel=parallel)))


def slowest_stage(parallel: ParallelConfig, work: Workload, model: ModelDimensions, *, towers: float) -> float:
    """Returns the slowest stage's time, divided by the time that a rank would take with an equal share of the work.

    The work of a micro-batch is its number of matrix products, without embedding and output layer. ``towers`` is the
    towers' share of this work.
    """
    ranks = parallel.tp * parallel.cp
    passed = patches_of_rank(parallel, work) / max(1, patches_of_micro_batch(parallel, work))
    layers = {later: stage_layers(parallel, model, later=later) / model.layers for later in (False, True)}
    first = (1 - towers) * layers[False] / ranks + towers * passed
    later = (1 - towers) * layers[True] / ranks if parallel.pp > 1 else 0.0
    return max(first, later) * parallel.pp * ranks
