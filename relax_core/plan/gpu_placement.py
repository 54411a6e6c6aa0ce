"""Assigns ranks and engines to GPUs and nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from relax_core.config.choices import ModeName
from relax_core.config.schema import RelaxConfig
from relax_core.config.sections.launcher_schema import SlurmLauncherConfig
from relax_core.control.run.role_counts import layout_key, worker_group_layouts
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.roles.process.process_placement import engines_take_gpus, judges_take_gpus
from relax_core.roles.process.role_context import JUDGE_ENGINE, TEACHER_ENGINE
from relax_core.train.parallel_layout import rank_coordinates, rank_faults

MODEL_ROLES = ("actor", "rollout", "critic", "reference", "actor_fwd", "teacher", TEACHER_ENGINE, JUDGE_ENGINE)
ROLLOUT = "rollout"  # it uses the GPUs of the engines
_COORDINATES = ("pp", "dp", "cp", "tp", "ep", "etp")  # in the order in which they are printed


@dataclass(frozen=True, kw_only=True)
class Place:
    """Holds the GPUs of one rank or engine.

    ``name`` is that of the rank or engine. ``gpus`` are numbers on that node, from 0; empty means CPU cores.
    ``coordinates`` are those of a trainer rank in its parallel layout.
    """

    name: str
    node: int
    gpus: tuple[int, ...] = ()
    coordinates: str = ""


def gpus_of(config: RelaxConfig, roles: Mapping[str, int]) -> dict[str, int]:
    """Maps each role that holds a model to its number of GPUs. Time-sharing roles have all GPUs each."""
    placement = config.placement
    if config.mode.name is ModeName.colocate:
        return dict.fromkeys(needed_roles(config, roles), placement.nodes * placement.gpus_per_node)
    return dict(placement.roles)


def needed_roles(config: RelaxConfig, roles: Mapping[str, int]) -> list[str]:
    """Returns the roles that need GPUs, in the order in which they take them. The engines count as rollout."""
    on_cores = set() if engines_take_gpus(config) else {ROLLOUT, TEACHER_ENGINE}
    if not judges_take_gpus(config):
        on_cores.add(JUDGE_ENGINE)
    return [role for role in MODEL_ROLES if role in roles and role not in on_cores]


def placement_faults(config: RelaxConfig, roles: Mapping[str, int], model: ModelDimensions) -> Iterator[str]:
    """Returns one sentence for each rank or engine that has no GPU.

    What the layouts must divide has been checked before.
    """
    placement = config.placement
    total = placement.nodes * placement.gpus_per_node
    if total == 0:
        if placement.roles or placement.nodes != 1:
            yield (
                f"placement.nodes={placement.nodes}, placement.roles={placement.roles} with no GPUs. "
                "Choose placement=gpu; machines without GPUs are launcher.nodes."
            )
        return
    if placement.gpu_memory_gib == 0:
        yield "placement.gpu_memory_gib=0.0: how much memory has a GPU? Set it, e.g. 79.6 for an 80 GB H100."
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
            yield (
                f"placement.roles.{role} is not set, and algo={config.algo.name} needs that role. "
                f"Give it GPUs: +placement.roles.{role}=4"
            )
    for role in placement.roles:
        if role not in needed:
            yield (
                f"placement.roles.{role}={placement.roles[role]}: algo={config.algo.name} as it is set starts no such "
                f"role on a GPU. Drop it. Its roles: {', '.join(needed)}."
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
            "engine would straddle two machines. Use a divisor."
        )
    if model.heads % engine.tp:
        yield f"engine.tp={engine.tp} does not divide the model's {model.heads} attention heads. Use a divisor."


def place(config: RelaxConfig, roles: Mapping[str, int]) -> list[Place]:
    """Returns the GPUs of every rank and engine of a configuration without faults.

    Roles take GPUs one after the other.
    """
    if config.placement.gpus_per_node == 0:
        return [
            Place(name=f"{role}-{rank}", node=0, coordinates=_coordinates(config, role, rank))
            for role, count in roles.items()
            for rank in range(count)
        ]
    places: list[Place] = []
    first = 0
    for role, count in gpus_of(config, roles).items():
        start = 0 if config.mode.name is ModeName.colocate else first
        places += list(_of_role(config, role, start=start, count=count))
        first += count
    return places


def _of_role(config: RelaxConfig, role: str, *, start: int, count: int) -> Iterator[Place]:
    width = config.engine.tp if role == ROLLOUT else 1
    name = "engine" if role == ROLLOUT else role
    for number in range(count // width):
        node, gpu = divmod(start + number * width, config.placement.gpus_per_node)
        coordinates = _coordinates(config, role, number)
        yield Place(name=f"{name}-{number}", node=node, gpus=tuple(range(gpu, gpu + width)), coordinates=coordinates)


def _coordinates(config: RelaxConfig, role: str, rank: int) -> str:
    """Returns a rank's position in its worker group, for the sizes above 1."""
    layout = worker_group_layouts(config).get(role)
    if layout is None:
        return ""
    at = rank_coordinates(layout, rank)
    return " ".join(f"{key}{getattr(at, key)}" for key in _COORDINATES if getattr(layout, key) > 1)
