"""Trains models with frozen parts on one rank and on two ranks in several layouts, for test_frozen_parts.py.

`python frozen_ranks.py <folder>` writes the models, single.json, rank0.json and rank1.json there.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_model
from tiny_trainer import dp_groups, make_backend, parallel_config, train_step
from torch import Tensor

from benchmarks.parity_media import Items, make_case
from benchmarks.parity_media import make_model as make_tiny_vision_model
from relax_core.config.choices import Recompute
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.train import process_group
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.optimizer import adam_states, part_of
from tests.train.rank_server import run_alone_and_on_two_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "pp2 vpp2 overlap": {"pp": 2, "vpp": 2, "distributed_optimizer": True, "overlap": True},
    "tp2 recompute": {"tp": 2, "sequence_parallel": True, "recompute": Recompute.full},
    "dp2 overlap": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}
FAMILIES = {"experts": "qwen3_moe", "sees": "qwen3_vl"}
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "all but the router": ("experts", ("router",)),
    "the router alone": ("experts", ("language",)),
    "the tower alone": ("sees", ("projector", "language")),
    "the projector alone": ("sees", ("vision", "language")),
    "the language model alone": ("sees", ("vision", "projector")),
}
CASES_OF_LAYOUT = {
    "pp2": tuple(CASES),
    "pp2 vpp2 overlap": ("the router alone", "the tower alone", "the language model alone"),
    "tp2 recompute": ("all but the router", "the tower alone", "the projector alone"),
    "dp2 overlap": ("the router alone", "the tower alone", "the projector alone"),
}
STEPS, STEPS_OF_LAYOUTS = 5, 3
SAVED = "the tower alone"  # in this case the next layout loads a checkpoint
OPTIMIZER = {"eps": 1e-4, "clip_grad": 0.0}


def part_of_weight(name: str) -> str:
    """Returns the model part of a Hugging Face name. This code is independent of the implementation."""
    if "visual." in name:
        return "projector" if "merger" in name else "vision"
    return "router" if name.endswith(".mlp.gate.weight") else "language"


def batches_of(folder: Path, model: str) -> list[list[TokenTree]]:
    """Returns micro-batches. A second rank gets only text from the third micro-batch, and no group from the last."""
    if model == "experts":
        return dp_groups()
    groups = make_case("mixed", Items(folder / model, folder / "media"))
    return [groups[:2], groups[2:4], groups[-2:], groups[3:4]]


def build(folder: Path, case: str, **overrides: Any) -> Any:
    model, frozen = CASES[case]
    settings = {"frozen": frozen, "family": FAMILIES[model], "media": FolderReader(folder / "media")}
    return make_backend(folder / model, **{"optimizer": OPTIMIZER, **settings, **overrides})


def exported(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export()}


def misplaced(backend: Any, frozen: Sequence[str]) -> dict[str, Any]:
    """Counts on this rank the frozen parameters that are trained and the trainable parameters that are not trained."""
    chunks = [(wrapped, model) for wrapped, model in zip(backend.model_chunks, backend.models, strict=True)]
    named = [(name, parameter) for _, model in chunks for name, parameter in model.named_parameters()]
    buffers = [buffer for wrapped, _ in chunks for buffer in wrapped.buffers + wrapped.expert_parallel_buffers]
    in_buffers = {parameter for buffer in buffers for parameter in buffer.params}
    states = adam_states(backend.optimizer, [parameter for _, parameter in named])
    wrong = 0
    for name, parameter in named:
        trains = part_of(name, backend.architecture) not in frozen
        wrong += (parameter in in_buffers) != trains or parameter.requires_grad != trains
        wrong += not trains and (
            parameter.grad is not None or getattr(parameter, "main_grad", None) is not None or parameter in states
        )
    return {"wrong": int(wrong), "trained": len(in_buffers), "states": len(states)}


def figures(
    backend: Any, folder: Path, case: str, *, steps: int, replica: int = 0, replicas: int = 1
) -> dict[str, Any]:
    """Trains ``steps`` steps and compares the first step with a run without frozen parts."""
    model, frozen = CASES[case]
    mine = [split_over_ranks(groups, replicas)[replica] for groups in batches_of(folder, model)]
    before = exported(backend)
    norms = [train_step(backend, mine, step=0).grad_norm]
    first = exported(backend)
    norms += [train_step(backend, mine, step=step).grad_norm for step in range(1, steps)]
    last = exported(backend)
    whole = torch.load(folder / f"{model}.pt") if first else {}
    return {
        "grad_norms": norms,
        "changed": [name for name in first if part_of_weight(name) in frozen and not last[name].equal(before[name])],
        "still": [name for name in first if part_of_weight(name) not in frozen and last[name].equal(before[name])],
        "gaps": {
            name: float((first[name] - whole[name]).abs().max()) for name in first if part_of_weight(name) not in frozen
        },
        **misplaced(backend, frozen),
    }


def whole_run(folder: Path, model: str) -> dict[str, float]:
    """Trains one step without frozen parts, saves the weights, and returns each part's gradient norm."""
    case = next(case for case, (of, _) in CASES.items() if of == model)
    backend = build(folder, case, frozen=())
    train_step(backend, batches_of(folder, model), step=0)
    torch.save(exported(backend), folder / f"{model}.pt")
    squares: dict[str, float] = {}
    for _, name, gradient in backend._weights.parts(lambda parameter: parameter.main_grad):
        part = part_of_weight(name)
        squares[part] = squares.get(part, 0.0) + float(gradient.double().square().sum())
    return {part: math.sqrt(square) for part, square in squares.items()}


def single(folder: Path) -> None:
    make_model(folder / "experts", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, num_hidden_layers=4)
    make_tiny_vision_model(folder / "sees", "qwen3_vl")
    seen: dict[str, Any] = {"norms": {model: whole_run(folder, model) for model in FAMILIES}}
    for case in CASES:
        backend = build(folder, case)
        seen[case] = figures(backend, folder, case, steps=STEPS)
    (folder / "single.json").write_text(json.dumps(seen))


def rank_main(folder: Path, rank: int, port: int) -> None:
    from megatron.core import parallel_state

    seen: dict[str, Any] = {}
    for name, written_by in zip(LAYOUTS, ["pp2", *LAYOUTS], strict=False):  # the previous layout wrote the checkpoint
        parallel = parallel_config(**LAYOUTS[name])
        ranks = {"parallel": parallel, "rank": rank, "world_size": 2, "store_address": f"127.0.0.1:{port}"}
        seen[name] = {}
        for case in CASES_OF_LAYOUT[name]:
            backend = build(folder, case, **ranks)
            replica = {"replica": parallel_state.get_data_parallel_rank(), "replicas": parallel.dp}
            found = figures(backend, folder, case, steps=STEPS_OF_LAYOUTS, **replica)
            if case == SAVED:
                backend.save(folder / name)
                again = build(folder, case, **ranks)
                again.load(folder / written_by)
                groups = [
                    split_over_ranks(batch, parallel.dp)[replica["replica"]] for batch in batches_of(folder, "sees")
                ]
                ends = []
                for trainer in (backend, again):
                    train_step(trainer, groups, step=STEPS_OF_LAYOUTS)
                    ends.append(exported(trainer))
                found["resumed"] = max((float((ends[0][key] - ends[1][key]).abs().max()) for key in ends[0]), default=0)
            seen[name][case] = found
        process_group.leave()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    sys.exit(run_alone_and_on_two_ranks(Path(sys.argv[1]), single, rank_main))
