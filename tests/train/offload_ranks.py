"""Trains layouts without and with offloads, and with optimizer.states=host, for test_state_offload.py and others.

`python offload_ranks.py <folder>` trains on one rank and on two. It writes models, single.json, rank0.json and
rank1.json to the folder.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_trainer import dp_groups, make_backend, parallel_config, train_step

from relax_core.config.choices import StatesPlace
from relax_core.train import host_states, process_group
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.optimizer import optimizer_tensors
from relax_core.train.policy_backend import MegatronBackend
from relax_core.weights.lora_merge import Lora
from tests.train.rank_server import run_alone_and_on_two_ranks
from tests.train.tiny_models import make_model

SHARDED = {"distributed_optimizer": True}
OVERLAP = {"distributed_optimizer": True, "overlap": True}
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "gate_proj", "down_proj"), rslora=False)
ON_ONE: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32 sharded": {"parallel": SHARDED},
    "float32 overlap": {"parallel": OVERLAP},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 untied sharded": {"dtype": "bfloat16", "parallel": SHARDED, "model": "untied"},
    "bfloat16 overlap": {"dtype": "bfloat16", "parallel": OVERLAP},
    "bfloat16 moe": {"dtype": "bfloat16", "model": "moe"},
    "bfloat16 lora": {"dtype": "bfloat16", "lora": LORA},
}
ON_TWO: dict[str, dict[str, Any]] = {
    "bfloat16 dp2 sharded": {"dtype": "bfloat16", "parallel": {"dp": 2} | SHARDED},
    "float32 dp2 overlap": {"parallel": {"dp": 2} | OVERLAP},
    "float32 tp2": {"parallel": {"tp": 2}},
    "float32 pp2 tied": {"parallel": {"pp": 2}},  # the last stage has a copy of the embedding
    "bfloat16 moe ep2 sharded": {"dtype": "bfloat16", "parallel": {"dp": 2, "ep": 2} | SHARDED, "model": "moe"},
    "bfloat16 lora dp2 sharded": {"dtype": "bfloat16", "parallel": {"dp": 2} | SHARDED, "lora": LORA},
}
STEPS = 4
BUCKET_ELEMENTS = 5000  # so that an update has several buckets, some of one parameter


def make_models(folder: Path) -> None:
    make_model(folder / "tied", tied=True)
    make_model(folder / "untied", tied=False)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    make_model(folder / "moe", tied=False, **experts)


def storages(backend: MegatronBackend) -> dict[int, Any]:
    """Returns the storages that the state consists of, found through the attributes of the models and optimizers."""
    tensors = [parameter.data for model in backend.models for parameter in model.parameters()]
    trained = [parameter for model in backend.models for parameter in model.parameters() if parameter.requires_grad]
    tensors += [parameter.main_grad for parameter in trained]
    for wrapped in getattr(backend.optimizer, "chained_optimizers", [backend.optimizer]):
        if not getattr(wrapped, "is_stub_optimizer", False):
            tensors += [value for state in wrapped.optimizer.state.values() for value in state.values()]
            tensors += [parameter.data for group in wrapped.optimizer.param_groups for parameter in group["params"]]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors if tensor.dim()}


def reference_error(backend: MegatronBackend, groups: list[Any], initial: list[np.ndarray]) -> list[float]:
    """Returns the largest difference of reference and initial log-probs, and of reference and trained log-probs."""
    reference, trained = backend.reference_logprobs(groups), backend.logprobs(groups)
    return [
        max(float(abs(value - other).max()) for value, other in zip(reference, others, strict=True))
        for others in (initial, trained)
    ]


def train(
    folder: Path, name: str, *, offloads: bool, states: StatesPlace = StatesPlace.device, **ranks: Any
) -> dict[str, Any]:
    """Trains `STEPS` steps of a layout; with ``offloads`` the state is on the host after two of them and at the end.

    With ``states`` on the host a new back end continues from a checkpoint after the third step.
    """
    case = {**ON_ONE, **ON_TWO}[name]
    model = case.get("model", "tied")
    parallel = parallel_config(**{"distributed_optimizer": False, **case.get("parallel", {})})

    def made() -> MegatronBackend:
        backend: MegatronBackend = make_backend(
            folder / model,
            family="qwen3_moe" if model == "moe" else "qwen3",
            dtype=case.get("dtype", "float32"),
            parallel=parallel,
            optimizer={"states": states},
            lora=case.get("lora"),
            **ranks,
        )
        return backend

    backend = made()
    found: dict[str, Any] = {"metrics": []}
    on_host = states is StatesPlace.host

    def turn() -> None:
        state = storages(backend)
        before = {key: storage.nbytes() for key, storage in state.items()}
        found["states on the device"] = states_on_device(backend)
        kept = backend.offload_optimizer()
        exported = [(name, tensor.clone()) for name, tensor in backend.export()]
        freed = kept + backend.offload()
        found["offloaded"] = {
            "bytes": sum(before.values()), "freed": freed, "without weights": kept,
            "left": sum(storage.nbytes() for storage in state.values()),
        }  # fmt: skip
        backend.onload()
        backend.onload()
        assert {key: storage.nbytes() for key, storage in state.items()} == before
        for (_, was), (_, now) in zip(exported, backend.export(), strict=True):
            assert torch.equal(was, now)

    replicas = parallel.dp
    replica = ranks.get("rank", 0) if replicas > 1 else 0
    own_groups = split_over_ranks(dp_groups()[0], replicas)[replica]
    keeps_reference = offloads and not on_host
    if keeps_reference:
        backend.keep_reference()
        initial = backend.logprobs(own_groups)
    for step in range(STEPS):
        if offloads and step == 2:
            turn()
            if keeps_reference:
                found["reference"] = reference_error(backend, own_groups, initial)
        if on_host and step == 3:
            backend.save(folder / f"{name}-resumed")
            process_group.leave()
            backend = made()
            backend.load(folder / f"{name}-resumed")
        batches = [split_over_ranks(groups, replicas)[replica] for groups in dp_groups()]
        metrics = train_step(backend, batches, step=step)
        found["metrics"].append([metrics.loss, metrics.grad_norm])
    if offloads:
        if keeps_reference:
            found["reference"] += reference_error(backend, own_groups, initial)
        turn()
    digest = hashlib.sha256()
    for weight, tensor in backend.export():
        digest.update(weight.encode() + tensor.contiguous().view(torch.uint8).clone().cpu().numpy().tobytes())
    found["export"] = digest.hexdigest()
    saved = folder / f"{name}-{offloads}-{states.value}"
    backend.save(saved)
    rank = ranks.get("rank", 0)
    files = sorted(saved.glob(f"__{rank}_*.distcp"))
    found["files"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    process_group.leave()
    return found


def states_on_device(backend: MegatronBackend) -> int:
    """Returns the bytes of master weights and moments on the device."""
    weights = {parameter.untyped_storage()._cdata for model in backend.models for parameter in model.parameters()}
    found = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in optimizer_tensors(backend.optimizer)
        if tensor.dim() and tensor.untyped_storage()._cdata not in weights
    }
    assert found
    return sum(found.values())


def three(folder: Path, name: str, **ranks: Any) -> list[dict[str, Any]]:
    """Trains without offloads, with offloads, and with both offloads and optimizer.states=host in small buckets."""
    runs = [train(folder, name, offloads=offloads, **ranks) for offloads in (False, True)]
    before, host_states.UPDATE_BUCKET_ELEMENTS = host_states.UPDATE_BUCKET_ELEMENTS, BUCKET_ELEMENTS
    try:
        return [*runs, train(folder, name, offloads=True, states=StatesPlace.host, **ranks)]
    finally:
        host_states.UPDATE_BUCKET_ELEMENTS = before


def single(folder: Path) -> None:
    make_models(folder)
    (folder / "single.json").write_text(json.dumps({name: three(folder, name) for name in ON_ONE}))


def rank_main(folder: Path, rank: int, port: int) -> None:
    settings = {"rank": rank, "world_size": 2, "store_address": f"127.0.0.1:{port}"}
    (folder / f"rank{rank}.json").write_text(json.dumps({name: three(folder, name, **settings) for name in ON_TWO}))


if __name__ == "__main__":
    sys.exit(run_alone_and_on_two_ranks(Path(sys.argv[1]), single, rank_main))
