"""Trains tiny models in the CPU branch and in the GPU branch, both on CPU tensors, for test_gpu_branch.py.

``python gpu_branch_ranks.py <folder>`` writes ``<branch>/<case>.json`` (losses and gradient norms) and
``<branch>/<case>.safetensors`` (the exported weights) there. All processes are forked from one that has imported
Megatron, because an import takes seconds: one process per branch trains every family, and two train every layout.
"""

import dataclasses
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_trainer import PPO_CLIP, make_backend, make_groups, parallel_config

from benchmarks import parity_media, parity_omni
from benchmarks.family_models import VARIANTS, make_family_model
from relax_core.contracts.algorithm import LossInputs, LossOutputs
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.train import device, process_group
from relax_core.train.micro_batches import split_over_ranks
from tests.ports import free_port
from tests.trees import with_experts, with_tokens

BRANCHES = ("cpu", "gpu_branch_on_cpu")
DTYPES = ("float32", "bfloat16")
STEPS = 3
TEXT = ("qwen3", "qwen3_moe", "qwen2", "llama, llama3 rope", "mistral")
VISION = (parity_media.DENSE, parity_media.EXPERTS, parity_media.HYBRID, parity_media.HYBRID_EXPERTS)
FAMILIES = (*TEXT, *VISION, parity_omni.OMNI)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {  # name → family and differences from the layout of one rank
    "tp2": ("qwen3", {"tp": 2}),
    "pp2": ("qwen3", {"pp": 2}),
    "cp2": ("qwen3", {"cp": 2}),
    "ep2": ("qwen3_moe", {"dp": 2, "ep": 2}),
    "dp2, distributed optimizer": ("qwen3", {"dp": 2, "distributed_optimizer": True}),
}
# Gradients are about as large as this epsilon, so that updates measure them instead of their signs.
OPTIMIZER = {"eps": 1e-2, "weight_decay": 0.1}
# The norm after a gated delta net amplifies the rounding of updates; in bfloat16 the third gradient differed by 7e-2.
SLOW = {**OPTIMIZER, "lr": 1e-3 / 30}


def policy_gradient(inputs: LossInputs, config: Any) -> LossOutputs:
    """Has no clip, where rounding could decide whether a token has a gradient."""
    return LossOutputs(loss_sum=-(inputs.logprobs * inputs.advantages * inputs.loss_mask).sum())


POLICY_GRADIENT = dataclasses.replace(PPO_CLIP, name="policy_gradient", loss=policy_gradient)


def choose(branch: str) -> None:
    """Selects the branch of this forked process; both have the device type for which Megatron was compiled."""
    os.environ[device.VARIABLE] = branch
    device.training_device.cache_clear()
    assert device.training_device() == device.DEVICES[branch]


def make_models(folder: Path) -> None:
    for family in TEXT:
        make_family_model(folder / family, family)
    for family in VISION:
        parity_media.make_model(folder / family, family)
    parity_omni.make_omni_model(folder / parity_omni.OMNI)


def batches_of(folder: Path, family: str) -> list[list[TokenTree]]:
    """Returns two micro-batches of a family; those of a family with towers have items of each kind, and text."""
    model, media = folder / family, folder / "media"
    if family in TEXT:
        groups = make_groups([[5, 1, 8], [7, 2], [3, 3, 3, 3]], prompt_lengths=[9, 4, 12], masked=0.3)
        return [groups[:2], groups[2:]]
    if family == parity_omni.OMNI:
        items = parity_omni.OmniItems(model, media)
        return [parity_omni.make_omni_case(case, items) for case in ("four kinds", "text")]
    items = parity_media.Items(model, media)
    return [parity_media.make_case(case, items) for case in ("branches", "text")]


def prepared(groups: Sequence[TokenTree], *, experts: tuple[int, int, int] | None) -> list[TokenTree]:
    """Gives groups what a step needs.

    The advantages are positive, so that the loss is no small difference of large terms. With ``experts`` (layers,
    experts, experts per token) each row has random experts: in bfloat16 the branches' routers would choose different
    experts where two are nearly equal.
    """
    random = np.random.default_rng(1)
    made = []
    for group in groups:
        tree = with_tokens(group, advantages=np.abs(group.extras["advantages"]))
        if experts is not None:
            layers, count, per_token = experts
            order = random.random((tree.computed_rows, layers, count)).argsort(-1)
            tree = with_experts(tree, order[..., :per_token].astype(np.uint8))
        made.append(tree)
    return made


def train(folder: Path, case: str, family: str, **overrides: Any) -> None:
    """Trains `STEPS` steps; rank 0 writes what the branch computes."""
    from megatron.core import parallel_state

    media = None if family in TEXT else FolderReader(folder / "media")
    kind, _ = VARIANTS.get(family, (family, {}))
    hybrid = family in (parity_media.HYBRID, parity_media.HYBRID_EXPERTS)
    optimizer = SLOW if hybrid and overrides["dtype"] == "bfloat16" else OPTIMIZER
    backend = make_backend(
        folder / family, family=kind, algorithm=POLICY_GRADIENT, optimizer=optimizer, media=media, **overrides
    )
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    architecture, experts = backend.architecture, None
    if architecture.experts is not None and overrides["dtype"] == "bfloat16":
        experts = architecture.num_layers, architecture.experts.count, architecture.experts.per_token
    batches = [prepared(groups, experts=experts) for groups in batches_of(folder, family)]
    steps = []
    for step in range(STEPS):
        backend.begin_step(step)
        for groups in batches:
            backend.accumulate(split_over_ranks(groups, replicas)[replica])
        metrics = backend.finish_step()
        steps.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm})
    weights = {name: tensor.clone() for name, tensor in backend.export()}
    if backend.rank == 0:
        path = folder / os.environ[device.VARIABLE] / case
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(steps))
        save_file(weights, path.with_suffix(".safetensors"))


def families_main(folder: Path, branch: str) -> None:
    choose(branch)
    for family in FAMILIES:
        for dtype in DTYPES:
            train(folder, f"{family} {dtype}", family, dtype=dtype)


def layouts_main(folder: Path, branch: str, rank: int, port: int) -> None:
    choose(branch)
    for name, (family, sizes) in LAYOUTS.items():
        for dtype in DTYPES:
            parallel = parallel_config(**sizes)
            ranks = {"rank": rank, "world_size": 2, "store_address": f"127.0.0.1:{port}"}
            train(folder, f"{name} {dtype}", family, dtype=dtype, parallel=parallel, **ranks)
        process_group.leave()


def run_all(works: Sequence[Callable[[], None]]) -> None:
    """Runs the calls at the same time, each in a forked process; ends this process if one of them fails."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    make_models(folder)
    for branch in BRANCHES:
        run_all([partial(families_main, folder, branch)])
        port = free_port()
        run_all([partial(layouts_main, folder, branch, rank, port) for rank in range(2)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
