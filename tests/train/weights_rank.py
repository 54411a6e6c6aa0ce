"""Runs one rank of a worker group that loads the same models in many layouts. Rank 0 writes the measurements.

python weights_rank.py <rank> <4> <port> <folder of the models: untied, tied, moe, biased> <output JSON>
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_trainer import RANKS, parallel_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from relax_core.families.folder import folder_architecture
from relax_core.train import process_group
from relax_core.train.device import training_device
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.hf.stored_weights import stored_weights
from relax_core.train.model.gpt import build_chunks
from relax_core.weights.folder_stream import StoredTensor, open_safetensors

DENSE_LAYOUTS: dict[str, dict[str, int]] = {
    "dp4": {"dp": 4},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_cp2": {"tp": 2, "cp": 2},
    "pp2_vpp2_dp2": {"pp": 2, "vpp": 2, "dp": 2},
    "pp4": {"pp": 4},
}
MOE_LAYOUTS: dict[str, dict[str, int]] = {
    "tp2_ep4": {"tp": 2, "dp": 2, "ep": 4},
    "tp2_ep2_etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2},
    "tp2_pp2_vpp2_ep2": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2},
}
# The models and their layouts. The untied model covers each layout's effect on a tensor; other models add tensors.
CASES: dict[str, tuple[str, dict[str, dict[str, int]]]] = {
    "untied": ("qwen3", DENSE_LAYOUTS),
    "tied": ("qwen3", {name: DENSE_LAYOUTS[name] for name in ("tp2_pp2", "pp4")}),
    "biased": ("qwen2", {name: DENSE_LAYOUTS[name] for name in ("tp2_pp2", "pp2_vpp2_dp2")}),
    "moe": ("qwen3_moe", MOE_LAYOUTS),
    "sees": ("qwen3_vl", {name: DENSE_LAYOUTS[name] for name in ("tp2_cp2", "pp2_vpp2_dp2")}),
    "sees_moe": ("qwen3_vl_moe", {name: MOE_LAYOUTS[name] for name in ("tp2_ep2_etp2", "pp2_ep2")}),
}
BUCKET_BYTES = 80_000  # A bucket holds a few tensors of these models, so there are many buckets.


class HeldBytes(TorchDispatchMode):
    """Measures ``peak``: the maximum bytes of living tensors that were made in this context."""

    def __init__(self, before: list[torch.Tensor]) -> None:
        super().__init__()
        self._before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._before:
                    self._alive[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {at: (ref, size) for at, (ref, size) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


class Counted:
    """Wraps a stored tensor and counts the elements that are read."""

    read = 0

    def __init__(self, stored: StoredTensor) -> None:
        self.shape = stored.shape
        self._stored = stored

    def __getitem__(self, cut: Any, /) -> torch.Tensor:
        values = self._stored[cut]
        Counted.read += values.numel()
        return values


def counted(folder: Path) -> Iterator[tuple[str, Counted]]:
    Counted.read = 0
    return ((name, Counted(stored)) for name, stored in open_safetensors(folder))


def see(folder: Path, family: str, sizes: dict[str, int], *, rank: int, port: str) -> dict[str, Any]:
    """Loads and exports a model in a layout. Measures this rank's bytes."""
    parallel = parallel_config(**sizes)
    process_group.join(
        parallel, rank=rank, world_size=RANKS, store_address=f"127.0.0.1:{port}", timeout_s=300.0, seed=0
    )
    architecture = folder_architecture(folder, family=family)
    chunks = build_chunks(architecture, parallel, dtype=torch.float32)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(float("nan"))  # marks parameters that are not loaded
    weights = HfWeights(chunks, architecture, bucket_bytes=BUCKET_BYTES)
    weights.load(counted(folder))
    stored = load_file(folder / "model.safetensors")
    source = {name: tensor.to(training_device().torch) for name, tensor in stored.items()}
    names, different = [], []
    with HeldBytes([*parameters, *source.values()]) as held:
        for name, tensor in weights.export():
            names.append(name)
            if not (tensor.shape == source[name].shape and torch.equal(tensor, source[name])):
                different.append(name)
    seen = {
        "missing": sorted(source.keys() - set(names)),
        "different": different,
        "in order": names == [weight.name for weight in stored_weights(architecture)],
        "finite": all(bool(torch.isfinite(parameter).all()) for parameter in parameters),
        "held": held.peak,
        "largest": max(tensor.nbytes for tensor in source.values()),
        "read": Counted.read / sum(tensor.numel() for tensor in source.values()),
    }
    try:
        weights.load((name, tensor[:1]) for name, tensor in source.items() if tensor.dim() == 2)
    except ValueError as error:
        seen["refusal"] = str(error)  # every rank must raise this error, even without a part of the tensor
    process_group.leave()
    return seen


def main() -> None:
    rank, _, port, folder, output = sys.argv[1:]
    seen = {}
    for name, (family, layouts) in CASES.items():
        for layout, sizes in layouts.items():
            seen[f"{name} {layout}"] = see(Path(folder, name), family, sizes, rank=int(rank), port=port)
    Path(f"{output}.{rank}").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
