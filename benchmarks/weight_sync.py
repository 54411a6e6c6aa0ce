"""One weight update of the embedded engine, three ways: shared memory, a gloo broadcast, a folder on disk.

    python -m benchmarks.weight_sync [--megabytes 0.4 40] [--rounds 9]

The ways take turns in every round. Total is from tensors in the trainer's hands until the engine serves the new
version (writing, digesting, sending, checking, copying); stall is how long decoding stands still for it.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import torch
from safetensors.torch import save_file

from benchmarks.tiny_model import demo_model, engine_config
from relax_core.engines.client import EngineClient
from relax_core.engines.process import EngineLaunch, EngineProcess
from relax_core.engines.weight_group import WeightGroup
from relax_core.weights.files import tensors_digest, write_weights

Tensors = list[tuple[str, torch.Tensor]]
TOKEN = "benchmark"
GROUP = "weights"


class RawClient(EngineClient):
    """The routes that only this benchmark calls."""

    def post(self, route: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", route, payload)


def by_shared_memory(client: RawClient, folder: Path, tensors: Tensors, version: int) -> float:
    path = folder / f"weights-{version}.bin"
    reply = client.update_weights(write_weights(path, version=version, tensors=tensors))
    path.unlink()
    return float(reply["stall_ms"])


def by_disk(client: RawClient, folder: Path, tensors: Tensors, version: int) -> float:
    save_file(dict(tensors), folder / "model.safetensors")
    body = {"model_path": str(folder), "weight_version": version}
    return float(client.post("/update_weights_from_disk", body)["stall_ms"])


def by_gloo(client: RawClient, group: WeightGroup, pool: ThreadPoolExecutor, tensors: Tensors, version: int) -> float:
    client.post("/begin_weight_update", {})
    body = {
        "names": [name for name, _ in tensors],
        "dtypes": [str(value.dtype).removeprefix("torch.") for _, value in tensors],
        "shapes": [list(value.shape) for _, value in tensors],
        "group_name": GROUP,
        "weight_version": version,
    }
    receiving = pool.submit(client.post, "/update_weights_from_distributed", body)
    group.send([value for _, value in tensors])
    receiving.result()
    return float(client.post("/end_weight_update", {"digest": tensors_digest(tensors)})["stall_ms"])


def join_group(client: RawClient, pool: ThreadPoolExecutor) -> WeightGroup:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    joining = pool.submit(client.post, "/init_weights_update_group", {**where, "group_name": GROUP})
    group = WeightGroup.join(GROUP, address="127.0.0.1", port=port, rank=0, world_size=2, timeout_s=30.0)
    joining.result()
    return group


@contextmanager
def running_engine(model: Any, folder: Path) -> Iterator[RawClient]:
    model.save_pretrained(folder)
    (folder / "token").write_text(TOKEN)
    launch = EngineLaunch(
        model_folder=folder,
        engine=engine_config(),
        dtype="float32",
        token_file=folder / "token",
        log_file=folder / "engine.log",
    )
    process = EngineProcess.start(launch)
    client = RawClient(process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=60.0)
    try:
        yield client
    finally:
        client.close()
        process.stop(timeout_s=5.0)


def model_of(megabytes: float) -> Any:
    """A model of about this size in float32."""
    if megabytes < 1.0:
        return demo_model()
    hidden = 256
    per_layer = 2 * hidden * hidden * 4 + hidden * hidden + 3 * hidden * 3 * hidden * 4
    return demo_model(hidden=hidden, layers=max(1, round(megabytes * 1e6 / per_layer)), inter=3 * hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.4, 40.0])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'MB':>6} {'way':>14} {'total ms':>9} {'stall ms':>9}   median of {arguments.rounds} rounds")
    for megabytes in arguments.megabytes:
        model = model_of(megabytes)
        tensors = [(name, value) for name, value in model.state_dict().items() if name != "lm_head.weight"]
        size = sum(value.numel() * value.element_size() for _, value in tensors) / 1e6
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
            tempfile.TemporaryDirectory() as disk,
            ThreadPoolExecutor() as pool,
            running_engine(model, Path(disk)) as client,
        ):
            group = join_group(client, pool)
            ways: dict[str, Callable[[int], float]] = {
                "shared memory": lambda version: by_shared_memory(client, Path(shared), tensors, version),  # noqa: B023
                "gloo": lambda version: by_gloo(client, group, pool, tensors, version),  # noqa: B023
                "disk": lambda version: by_disk(client, Path(disk), tensors, version),  # noqa: B023
            }
            for way, (total, stall) in measure(ways, arguments.rounds).items():
                print(f"{size:>6.1f} {way:>14} {total:>9.2f} {stall:>9.2f}")


def measure(ways: dict[str, Callable[[int], float]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median total and stall in milliseconds of each way; the first round is warm-up."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    version = 0
    for _ in range(rounds + 1):
        for way, update in ways.items():
            start = time.perf_counter()
            stall = update(version)
            found[way].append((1e3 * (time.perf_counter() - start), stall))
            version += 1
    return {
        way: (statistics.median(total for total, _ in values[1:]), statistics.median(stall for _, stall in values[1:]))
        for way, values in found.items()
    }


if __name__ == "__main__":
    main()
