"""Trains SFT, DPO and KTO in several divisions into micro-batches and on two ranks. Each process writes measurements.

`python objective_ranks.py <folder>` writes a model, and a JSON and a safetensors file for each objective and case.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_models import VOCABULARY, make_model
from tiny_trainer import make_backend, parallel_config, train_step

from algorithms import dpo, kto, sft
from relax_core.contracts.tree import OF_DATA, TokenTree
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.train import process_group
from tests.train.rank_server import run_alone_and_on_two_ranks
from tests.trees import answers_tree

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": sft.SPEC, "config": sft.SftConfig()},
    "dpo": {"algorithm": dpo.SPEC, "config": dpo.DpoConfig(beta=2.0, sft_coef=0.5)},
    "kto": {"algorithm": kto.SPEC, "config": kto.KtoConfig(beta=0.5, undesirable_weight=1.5)},
}
# Numbers of the groups in each micro-batch.
DIVISIONS: dict[str, list[list[int]]] = {
    "one": [[0, 1, 2, 3, 4]],
    "each": [[0], [1], [2], [3], [4]],
    "mixed": [[3, 1, 4], [0], [2]],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2": {"dp": 2, "distributed_optimizer": True},
}
STEPS = 3
# With a large eps Adam's update is nearly proportional to the gradient, so a wrong scale of the loss is visible.
OPTIMIZER = {"lr": 0.3, "eps": 1.0, "clip_grad": 1000.0}


def groups_of(objective: str) -> list[TokenTree]:
    """Makes five groups of one sample (sft) or two samples (dpo, kto). Some tokens are masked.

    The last token of a sample is trained. The second sample of kto has no trained tokens; its tokens are frequent in
    desirable responses, so its log-probs rise and the KL estimate is above 0.
    """
    random = np.random.default_rng(5)
    groups = []
    for number, lengths in enumerate([(7, 2), (3, 3), (1, 6), (4, 9), (12, 5)]):
        own = lengths if objective != "sft" else lengths[:1]
        mask = random.random(sum(own)) < 0.8
        mask[np.cumsum(own) - 1] = True
        if objective == "kto":
            mask[own[0] :] = False
        groups.append(
            answers_tree(
                f"g{number}",
                random.integers(0, VOCABULARY, 4 + number),
                own,
                random.integers(0, 4 if objective == "kto" else VOCABULARY, sum(own)),
                loss_mask=mask,
                rewards=[float(number not in (1, 2)), 0.0][: len(own)],
                engine=OF_DATA,
                advantages=np.ones(sum(own), dtype=np.float32),
            )
        )
    return groups


def train(folder: Path, objective: str, case: str, division: str, *, replica: int = 0, **overrides: Any) -> None:
    """Makes updates and writes their metrics and the weights. Replica r trains every second group from group r."""
    backend = make_backend(folder, optimizer=OPTIMIZER, **OBJECTIVES[objective], **overrides)
    replicas = overrides["parallel"].dp if "parallel" in overrides else 1
    groups, updates = groups_of(objective), []
    if objective != "sft":
        backend.keep_reference()
    for step in range(STEPS):
        trees = groups
        if objective != "sft":
            found = backend.reference_logprobs(groups)
            trees = [tree.with_extras(reference_logprobs=values) for tree, values in zip(groups, found, strict=True)]
        if objective == "kto":
            current = backend.logprobs(groups)
            trees = [tree.with_extras(old_logprobs=values) for tree, values in zip(trees, current, strict=True)]
            made = advantage_extras(trees, kto.SPEC, OBJECTIVES["kto"]["config"])
            trees = [tree.with_extras(**extras) for tree, extras in zip(trees, made, strict=True)]
        batches = [[trees[number] for number in numbers][replica::replicas] for numbers in DIVISIONS[division]]
        metrics = train_step(backend, batches, step=step)
        updates.append({"loss": metrics.loss, "grad_norm": metrics.grad_norm, **metrics.algorithm})
    name = f"{objective}.{case}.{backend.rank}"
    (folder / f"{name}.json").write_text(json.dumps(updates))
    weights = {key: value.detach().cpu().clone() for key, value in backend.export()}  # collective; empty after rank 0
    save_file(weights, folder / f"{name}.safetensors")
    process_group.leave()


def alone(folder: Path) -> None:
    make_model(folder)
    for objective in OBJECTIVES:
        for division in DIVISIONS:
            train(folder, objective, division, division)


def rank_main(folder: Path, rank: int, port: int) -> None:
    for objective in OBJECTIVES:
        for layout, sizes in LAYOUTS.items():
            parallel = parallel_config(**sizes, sequence_parallel=False)
            replica = rank if parallel.dp > 1 else 0
            own = {"parallel": parallel, "rank": rank, "world_size": 2, "store_address": f"127.0.0.1:{port}"}
            train(folder, objective, layout, "mixed", replica=replica, **own)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(run_alone_and_on_two_ranks(Path(sys.argv[1]), alone, rank_main))
