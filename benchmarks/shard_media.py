"""Measures towers over two tensor-parallel ranks: eight unequal images dealt to them against whole towers.

    python -m benchmarks.shard_media [--repeats 5]

Each pass is that of the trainer, forward and backward, with the gather of the features and the sum of the towers'
gradients where images are dealt. The two ways take turns in one run, in changing order. The time of a pass is that of
the slower rank, in seconds of the clock and in CPU seconds, one thread a rank. The model is that of
`benchmarks.random_vision_model`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SIZES = ((4, 4), (4, 8), (8, 8), (8, 12), (12, 12), (12, 16), (16, 16), (16, 20))  # patches of each image
WAYS = ("whole", "dealt")
CLOCKS = ("seconds", "CPU seconds")
REACH = 1.3
RANKS = 2


def rank_main(folder: Path, *, rank: int, port: int, repeats: int) -> None:
    """Measures the passes of one rank and writes them to ``<rank>.json``."""
    import torch

    from benchmarks.one_rank import one_rank_parallel, one_rank_setup
    from benchmarks.parity_media import group
    from relax_core.contracts.media_file import FolderReader
    from relax_core.train.model.media_features import sum_tower_gradients, with_features
    from relax_core.train.policy_backend import MegatronBackend
    from tests.media_items import item_of

    torch.set_num_threads(1)
    setup = one_rank_setup(
        folder / "model",
        family="qwen3_vl",
        parallel=one_rank_parallel(tp=RANKS, shard_media=True),
        rank=rank,
        world_size=RANKS,
        store_address=f"127.0.0.1:{port}",
    )
    backend = MegatronBackend(setup, temperature=1.0, media=FolderReader(folder / f"items{rank}"))
    tower, plan = backend.architecture.vision, backend._media
    assert tower is not None and plan is not None
    random = np.random.default_rng(0)
    items = [
        item_of(tower, random.integers(0, 256, (1, h * tower.patch_size, w * tower.patch_size, 3), dtype=np.uint8),
                folder=folder / f"items{rank}")
        for h, w in SIZES
    ]  # fmt: skip
    tree = group("g", [2, *items, 1], [[4]])
    (chunk,) = backend.models
    batches = {}
    for way in WAYS:
        backend._media = plan if way == "dealt" else replace(plan, group=None)
        batches[way] = backend.pack([tree]).tree
    hidden = torch.zeros(len(batches["whole"].token_ids), 1, backend.architecture.hidden_size, requires_grad=True)

    def one_pass(way: str) -> list[float]:
        torch.distributed.barrier()
        begin = time.perf_counter(), time.process_time()
        embedded, batch = with_features(chunk, hidden, batches[way])
        assert batch.media is not None and batch.media.deepstack is not None
        (embedded.square().sum() + batch.media.deepstack.square().sum()).backward()
        if way == "dealt":
            sum_tower_gradients(backend.models)
        return [time.perf_counter() - begin[0], time.process_time() - begin[1]]

    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(repeats + 1):  # the first turn warms up
        for way in WAYS if number % 2 else WAYS[::-1]:
            found[way].append(one_pass(way))
    (folder / f"{rank}.json").write_text(json.dumps({way: times[1:] for way, times in found.items()}))


def measure(folder: Path, *, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Returns by clock and way the time of each pass, which is that of the slower rank."""
    from benchmarks.random_vision_model import write_model
    from tests.ports import free_port

    for name in ("model", *(f"items{rank}" for rank in range(RANKS))):
        (folder / name).mkdir()
    write_model(folder / "model")
    port, spawn = free_port(), multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=rank_main, args=(folder,), kwargs={"rank": rank, "port": port, "repeats": repeats})
        for rank in range(RANKS)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    seen: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {
        clock: {way: [max(pair) for pair in zip(*([one[place] for one in rank[way]] for rank in seen), strict=True)]
                for way in WAYS}
        for place, clock in enumerate(CLOCKS)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-shard-media-") as name:
        found = measure(Path(name), repeats=arguments.repeats)
    for clock, ways in found.items():
        whole, dealt = (median(ways[way]) for way in WAYS)
        ratios = sorted(one / other for one, other in zip(ways["whole"], ways["dealt"], strict=True))
        print(
            f"{clock}: whole {whole:.3f}, dealt {dealt:.3f}, ratio {whole / dealt:.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}); to reach: {REACH}"
        )


if __name__ == "__main__":
    main()
