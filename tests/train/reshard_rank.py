"""Runs one rank of a worker group that repeatedly trains in a layout, saves, and continues in another layout.

python reshard_rank.py <rank> <4> <port> <folder of the models> <folder of the output> <name of a chain> …
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tiny_trainer import RANKS, dp_groups, make_backend, parallel_config, train_step

from relax_core.train import process_group
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.parallel_layout import replica_ranks

PLAIN, DIVIDED = {"distributed_optimizer": False}, {"distributed_optimizer": True}
CHAINS: dict[str, tuple[str, str, str, list[dict[str, Any]]]] = {
    "dense": (
        "biased",
        "qwen2",
        "float32",
        [
            {"tp": 2, "dp": 2} | DIVIDED,
            {"pp": 2, "dp": 2, "first_stage_layers": 1} | DIVIDED,
            {"tp": 2, "pp": 2} | PLAIN,
            {"pp": 2, "vpp": 2, "dp": 2} | DIVIDED,
            {"tp": 2, "cp": 2} | DIVIDED,
        ],
    ),
    "tied": (
        "tied",
        "qwen3",
        "bfloat16",
        [{"pp": 2, "dp": 2} | DIVIDED, {"tp": 2, "dp": 2} | PLAIN, {"tp": 2, "pp": 2} | DIVIDED, {"dp": 4} | DIVIDED],
    ),
    "moe": (
        "moe",
        "qwen3_moe",
        "float32",
        [
            {"tp": 2, "dp": 2, "ep": 4} | DIVIDED,
            {"pp": 2, "dp": 2, "ep": 2} | PLAIN,
            {"dp": 4} | DIVIDED,
            {"tp": 2, "dp": 2, "ep": 2, "etp": 2} | DIVIDED,
        ],
    ),
    "sees": (
        "sees",
        "qwen3_vl",
        "float32",
        [{"tp": 2, "pp": 2} | PLAIN, {"dp": 4} | DIVIDED, {"pp": 2, "dp": 2} | DIVIDED],
    ),
    "sees_moe": (
        "sees_moe",
        "qwen3_vl_moe",
        "float32",
        [{"tp": 2, "dp": 2, "ep": 4} | DIVIDED, {"pp": 2, "dp": 2, "ep": 2} | PLAIN],
    ),
    "omni": ("omni", "qwen3_omni_moe", "float32", [{"tp": 2, "pp": 2, "ep": 2} | PLAIN]),
    "hybrid": ("hybrid", "qwen3_5", "float32", [{"tp": 2, "pp": 2} | PLAIN, {"tp": 2, "cp": 2} | DIVIDED]),
    "hybrid_moe": ("hybrid_moe", "qwen3_5_moe", "float32", [{"tp": 2, "pp": 2, "ep": 2} | PLAIN]),
}


# These chains have the same towers and layouts as "omni" and "hybrid", which `make test` runs.
SLOW = ("sees", "sees_moe", "hybrid_moe")


def run_chain(name: str, *, rank: int, port: str, models: Path, output: Path) -> None:
    """Trains a step in each layout, starting from the checkpoint of the previous layout.

    After a step, the layout saves <name>-<step> with its weights. The next layout loads this checkpoint and directly
    saves <name>-<step>-again. If a checkpoint <name>-alone exists, the first layout continues from it.
    """
    model, family, dtype, layouts = CHAINS[name]
    for step, sizes in enumerate(layouts):
        parallel = parallel_config(**sizes)
        backend = make_backend(
            models / model,
            family=family,
            dtype=dtype,
            parallel=parallel,
            rank=rank,
            world_size=RANKS,
            store_address=f"127.0.0.1:{port}",
            optimizer={"eps": 1e-4},
        )
        before = output / (f"{name}-{step - 1}" if step else f"{name}-alone")
        if before.exists():
            backend.load(before)
            backend.save(before.with_name(f"{before.name}-again"))
        replica = next(index for index, ranks in enumerate(replica_ranks(parallel)) if rank in ranks)
        train_step(backend, [split_over_ranks(groups, parallel.dp)[replica] for groups in dp_groups()], step=step)
        backend.save(output / f"{name}-{step}")
        weights = {key: tensor.clone() for key, tensor in backend.export()}
        if rank == 0:
            save_file(weights, output / f"{name}-{step}.safetensors")
        process_group.leave()


def main() -> None:
    rank, _, port, models, output, *names = sys.argv[1:]
    for name in names:
        run_chain(name, rank=int(rank), port=port, models=Path(models), output=Path(output))


if __name__ == "__main__":
    main()
