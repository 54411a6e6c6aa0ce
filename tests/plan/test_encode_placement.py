"""Tests the placement of a run's encode workers, with their cores and memory."""

from __future__ import annotations

import os
from dataclasses import replace

from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig
from relax_core.plan.build_plan import make_plan
from relax_core.plan.memory_terms import encode_worker_bytes
from relax_core.plan.placement import EncodeNode, encode_nodes

GIB = 1 << 30


def of_slurm(*words: str) -> RelaxConfig:
    slurm = ("launcher=slurm", "launcher.nodes=2", "launcher.cpus_per_node=8", "launcher.memory_gb=64")
    return load_config(["model=tiny_qwen3_vl", "data=see", *slurm, *words])


def test_encode_workers_stand_on_every_node_with_rollout_workers() -> None:
    config = of_slurm("rollout.workers=3", "modality.workers=5")
    work = make_plan(config).work
    first, second = encode_nodes(config, {"rollout": 3}, work, data_rows=None)
    assert (first.number, first.rollouts, first.workers, first.cores) == (0, 2, 10, 8)
    assert (second.number, second.rollouts, second.workers, second.cores) == (1, 1, 5, 8)
    assert first.worker_bytes == 10 * encode_worker_bytes(work) and first.memory == 64 * 10**9
    (fault,) = first.faults()
    assert fault == (
        "modality.workers=5: node 0 has 2 rollout workers, so 10 encode workers on 8 cores. Use a smaller "
        "modality.workers or fewer rollout.workers."
    )
    assert list(second.faults()) == []


def test_the_plan_prints_them_and_warns() -> None:
    cores = len(os.sched_getaffinity(0))
    plan = make_plan(load_config(["model=tiny_qwen3_vl", "data=see", f"modality.workers={cores + 1}"]))
    assert f"Node 0 has 1 rollout worker with {cores + 1} encode workers on {cores} core" in plan.media[-1]
    assert [
        warning
        for warning in plan.warnings
        if warning.startswith(f"modality.workers={cores + 1}: node 0 has 1 rollout worker")
    ]
    text = make_plan(load_config([]))
    assert text.media == [] and not [warning for warning in text.warnings if "modality" in warning]


def test_a_node_without_the_memory_is_told() -> None:
    node = EncodeNode(
        number=1, rollouts=1, workers=2, worker_bytes=2 * GIB, item_bytes=GIB, cores=4, memory=round(2.5 * GIB)
    )
    (fault,) = node.faults()
    assert "2 encode workers that need 3.0 GiB with their items; it has 2.5 GiB." in fault
    assert list(replace(node, memory=None, cores=None).faults()) == []
