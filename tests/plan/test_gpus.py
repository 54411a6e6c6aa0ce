"""Tests the checks of GPUs before a start. The findings are given, so the test needs no GPU."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from relax_core.config.choices import ModeName
from relax_core.config.compose import compose, typed_config
from relax_core.config.errors import NotYet
from relax_core.config.schema import RelaxConfig
from relax_core.config.validate import problems_of
from relax_core.plan.build_plan import as_text, make_plan
from relax_core.plan.placement import UNSEEN, FoundGpus, find_gpus, gpu_problems, machine_faults

GIB = 1 << 30
ONE = ["placement=gpu", "placement.gpus_per_node=1", "+placement.roles.actor=1", "engine=embedded"]


def planned(*overrides: str) -> RelaxConfig:
    return typed_config(compose(overrides))


def found(*sizes_gib: float) -> FoundGpus:
    return FoundGpus(device_files=["/dev/nvidia0"], sizes=[round(size * GIB) for size in sizes_gib], torch="2.13.0")


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (found(79.2), None),
        (found(79.2, 79.2), None),
        (FoundGpus(), "this machine has no GPU: none of /dev/nvidia[0-9]*, /dev/kfd, /dev/dxg exists."),
        (found(), "torch.cuda.is_available() is false."),
        (found(23.6), "has 23.6. Set placement.gpu_memory_gib=23.6."),
        (found(79.2, 23.6), "has 23.6. Set placement.gpu_memory_gib=23.6."),
    ],
)
def test_a_start_needs_the_gpus_that_it_names(gpus: FoundGpus, words: str | None) -> None:
    faults = list(machine_faults(planned(*ONE).placement, gpus))
    assert len(faults) == (0 if words is None else 1)
    assert all(isinstance(fault, NotYet) and words is not None and words in fault for fault in faults), faults


def test_fewer_gpus_and_machines_than_asked_for_are_told() -> None:
    placement = planned("experiment=qwen3_30b_a3b_async_16gpu").placement
    nodes, gpus = machine_faults(placement, found(*[139.8] * 4))
    assert nodes.startswith("placement.nodes=2 with the run's own Ray, which has only this machine.")
    assert gpus == "placement.gpus_per_node=8, and torch finds 4 on this machine. Set placement.gpus_per_node=4."


def test_without_a_drivers_file_nobody_is_asked_and_with_one_torch_is(tmp_path: Path) -> None:
    assert find_gpus(tmp_path) == FoundGpus()
    (tmp_path / "nvidiactl").touch()  # a device file of the driver, but not of a GPU
    assert find_gpus(tmp_path) == FoundGpus()
    (tmp_path / "nvidia0").touch()
    asked = find_gpus(tmp_path)
    assert asked.device_files == [f"{tmp_path}/nvidia0"]
    assert asked.torch == importlib.metadata.version("torch")


def test_gpus_of_a_job_are_asked_of_its_launcher() -> None:
    slurm = ["launcher=slurm"]
    assert list(gpu_problems(planned(*ONE, *slurm))) == []
    assert list(gpu_problems(planned(*ONE, "launcher.ray_address=auto"))) == []  # counted after the cluster is joined
    assert list(gpu_problems(planned())) == []


def test_a_placement_on_gpus_is_no_mistake_and_turns_on_them_are_not_built() -> None:
    assert problems_of(planned(*ONE)) == []
    plan = make_plan(planned(*ONE))
    assert plan.warnings == [UNSEEN] and "Warning   GPUs: Relax has run on one GPU" in as_text(plan)
    assert make_plan(planned()).warnings == []


SHARED = ("placement=one_gpu",)


@pytest.mark.parametrize(
    ("overrides", "mode", "engine"),
    [
        (["placement=gpu"], ModeName.asynchronous, "sglang"),
        (["placement=gpu", "engine=embedded"], ModeName.asynchronous, "embedded"),
        (["placement=one_gpu"], ModeName.colocate, "sglang"),
        (["mode=async", "engine=embedded", "placement=one_gpu"], ModeName.asynchronous, "embedded"),
        ([], ModeName.asynchronous, "embedded"),
    ],
)
def test_a_placement_on_gpus_chooses_sglang_unless_an_engine_is_chosen(
    overrides: list[str], mode: ModeName, engine: str
) -> None:
    config = planned(*overrides)
    assert (config.mode.name, config.engine.name) == (mode, engine)


def test_one_machine_shares_its_gpus_between_trainer_and_engines() -> None:
    assert problems_of(planned(*SHARED)) == []
    plan = make_plan(planned(*SHARED))
    assert plan.refused == []
    assert [(place.name, place.gpus) for place in plan.places] == [("actor-0", (0,)), ("engine-0", (0,))]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["placement.nodes=2"], ("placement.nodes=2", "mode=async")),
        (["launcher.ray_address=auto"], ("launcher.ray_address", "mode=async")),
        (["algo=ppo"], ("critic", "mode=async")),
        (["algo=distill"], ("teacher", "mode=async")),
    ],
)
def test_what_cannot_share_gpus_yet_is_planned_and_not_started(overrides: list[str], words: tuple[str, ...]) -> None:
    problems = [problem for problem in problems_of(planned(*SHARED, *overrides)) if words[0] in problem]
    assert len(problems) == 1 and isinstance(problems[0], NotYet)
    assert all(word in problems[0] for word in words)


def test_reference_and_actor_fwd_use_the_actors_gpus() -> None:
    needs = ("algo.kl_coef=0.1", "algo.old_logprobs=actor_fwd")
    config = planned(*SHARED, *needs)
    assert problems_of(config) == []
    assert [place.name for place in make_plan(config).places] == ["actor-0", "engine-0"]
    (problem,) = problems_of(planned(*SHARED, *needs, "placement.forward=separate"))
    assert not isinstance(problem, NotYet)
    for words in (
        "placement.forward=separate with mode=colocate",
        "reference and actor_fwd",
        "placement.forward=actor",
    ):
        assert words in problem


def test_separate_processes_of_the_reference_need_gpus() -> None:
    needs = ("placement=gpu", "engine.count=4", "parallel=dp2", "algo.kl_coef=0.1")
    roles = "+placement.roles={actor: 2, rollout: 4}"
    assert make_plan(planned(*needs, roles)).refused == []
    (fault,) = make_plan(planned(*needs, roles, "placement.forward=separate")).refused
    assert "placement.roles.reference is not set" in fault and "placement.forward=actor" in fault
    with_reference = "+placement.roles={actor: 2, rollout: 4, reference: 1}"
    assert make_plan(planned(*needs, with_reference, "placement.forward=separate")).refused == []
    (fault,) = make_plan(planned(*needs, with_reference)).refused
    assert "placement.roles.reference=1 with placement.forward=actor" in fault and "Drop it" in fault


def test_the_embedded_engine_takes_no_gpu() -> None:
    plan = make_plan(planned(*ONE))
    assert plan.refused == [] and plan.cache_tokens_fit is None
    assert [(place.name, place.gpus) for place in plan.places] == [("actor-0", (0,))]
    (fault,) = make_plan(planned(*ONE, "+placement.roles.rollout=1", "placement.gpus_per_node=2")).refused
    assert fault.startswith(
        "placement.roles.rollout=1: algo=grpo with its settings has no such role on a GPU. Drop it."
    )
