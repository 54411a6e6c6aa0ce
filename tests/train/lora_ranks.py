"""Trains LoRA factors on one rank and in layouts of two ranks. Each process writes tensors for test_lora.py.

`python lora_ranks.py <folder>` writes two models, KIND_alone.pt for each, and LAYOUT.pt of rank 0 there.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tiny_models import make_model
from tiny_trainer import dp_groups, make_backend, parallel_config, train_step

from relax_core.config.choices import Recompute
from relax_core.train import process_group
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.policy_backend import MegatronBackend
from relax_core.weights.lora_merge import Lora
from tests.train.rank_server import run_alone_and_on_two_ranks

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = Lora(rank=4, alpha=8.0, targets=TARGETS, rslora=False)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sequence_parallel": False},
    "tp2 sp": {"tp": 2},
    "tp2 sp recompute": {"tp": 2, "recompute": Recompute.full},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2 sharded overlap": {"dp": 2, "distributed_optimizer": True, "overlap": True},
    "moe tp2 sp": {"tp": 2},
    "moe tp2 etp2": {"tp": 2, "etp": 2},
    "moe dp2 ep2": {"dp": 2, "ep": 2},
}
SAVED = "tp2 sp"  # its checkpoint is loaded by one rank
STEPS = 3


def build(folder: Path, kind: str, **overrides: Any) -> MegatronBackend:
    family = {"family": "qwen3_moe"} if kind == "moe" else {}
    optimizer = {"eps": 1e-3, "lr": 1e-2}
    backend = make_backend(folder / kind, optimizer=optimizer, lora=LORA, **family, **overrides)
    assert isinstance(backend, MegatronBackend)
    return backend


def exported(backend: MegatronBackend) -> dict[str, Any]:
    """Returns copies of the base, the merged weights and the factors; empty on ranks above 0."""
    return {
        "base": {name: tensor.clone() for name, tensor in backend.export_base()},
        "merged": {name: tensor.clone() for name, tensor in backend.export()},
        "factors": [(name, a.clone(), b.clone(), scale) for name, a, b, scale in backend.export_factors()],
    }


def trained(backend: MegatronBackend, *, replica: int = 0, replicas: int = 1) -> dict[str, Any]:
    """Trains three steps, with the reference's log-probs before and after, and returns all results."""
    groups = [group for batch in dp_groups() for group in batch]
    found: dict[str, Any] = {"first": exported(backend), "reference": backend.reference_logprobs(groups)}
    batches = [split_over_ranks(batch, replicas)[replica] for batch in dp_groups()]
    steps = [train_step(backend, batches, step=step) for step in range(STEPS)]
    found |= {"norms": [step.grad_norm for step in steps], "losses": [step.loss for step in steps]}
    found |= exported(backend) | {"reference after": backend.reference_logprobs(groups)}
    return found


def alone(folder: Path) -> None:
    make_model(folder / "dense")
    make_model(folder / "moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    for kind in ("dense", "moe"):
        backend = build(folder, kind)
        found = trained(backend)
        if kind == "dense":
            write_gradients(backend, folder)
        torch.save(found, folder / f"{kind}_alone.pt")
        process_group.leave()


def write_gradients(backend: MegatronBackend, folder: Path) -> None:
    """Writes the gradients of the factors, and the gradients of a model without LoRA that has the merged weights."""
    accumulate(backend)
    weights = HfWeights(backend.models, backend.architecture, adapters=backend._adapters, tensor_of=gradient)
    found: dict[str, Any] = {
        "factors": [(name, a.cpu().clone(), b.cpu().clone()) for name, a, b, _ in weights.export_factors()],
        "values": [(name, a.cpu().clone(), b.cpu().clone()) for name, a, b, _ in backend.export_factors()],
    }
    merged = {name: tensor.clone() for name, tensor in backend.export()}
    process_group.leave()
    full = make_backend(folder / "dense")
    full.load_weights(merged.items())
    accumulate(full)
    weights = HfWeights(full.models, full.architecture, tensor_of=gradient)
    found["weights"] = {name: tensor.cpu().clone() for name, tensor in weights.export()}
    torch.save(found, folder / "gradients.pt")


def accumulate(backend: MegatronBackend) -> None:
    backend.begin_step(STEPS)
    for batch in dp_groups():
        backend.accumulate(batch)
    backend._schedule.finish()


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns Megatron's gradient of a parameter, and the parameter itself if it is frozen."""
    return getattr(parameter, "main_grad", parameter.detach())


def rank_main(folder: Path, rank: int, port: int) -> None:
    from megatron.core import parallel_state

    for name, sizes in LAYOUTS.items():
        kind = "moe" if name.startswith("moe") else "dense"
        backend = build(
            folder, kind, parallel=parallel_config(**sizes), rank=rank, world_size=2, store_address=f"127.0.0.1:{port}"
        )
        found = trained(backend, replica=parallel_state.get_data_parallel_rank(), replicas=sizes.get("dp", 1))
        if name == SAVED:
            backend.copy_state()
            backend.write_copy(folder / "checkpoint")
            backend.drop_copy()
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
        process_group.leave()


if __name__ == "__main__":
    sys.exit(run_alone_and_on_two_ranks(Path(sys.argv[1]), alone, rank_main))
