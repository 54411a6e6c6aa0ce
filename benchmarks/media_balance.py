"""Measures how evenly the work of groups with media is divided among data-parallel ranks.

    python -m benchmarks.media_balance [--draws 5] [--repeats 5] [--json FILE]

64 groups of images, videos, sounds, videos with their sound and text are dealt to four ranks: by rows and the work of
the towers in rows, as the trainer does, and by rows alone. What one rank computes for the groups of each share, forward
and backward through the towers and the language model of tiny_qwen3_omni, is measured in CPU seconds of one thread, the
shares of both deals in turns. The figure is the busiest rank's time over the mean. Groups have 1 to 8 items or text of
up to 800 tokens; each draw has other groups in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from benchmarks.parity_omni import OmniItems
    from relax_core.contracts.media import MediaItem
    from relax_core.contracts.tree import TokenTree
    from relax_core.train.policy_backend import MegatronBackend

GROUPS, RANKS, ANSWERS = 64, 4, 4
KINDS = ("image", "video", "sound", "video with its sound", "text")
REACH = 1.10


def make_model(folder: Path) -> None:
    """Writes tiny_qwen3_omni with random weights."""
    import torch

    from relax_core.families.tiny_omni import tiny_omni_config, tiny_omni_files
    from relax_core.tools.tiny_hearing import build_omni_model, write_published_omni
    from relax_core.tools.tiny_vision import write_settings

    torch.manual_seed(0)
    folder.mkdir()
    write_settings(folder, tiny_omni_config(), tiny_omni_files())
    write_published_omni(build_omni_model(tiny_omni_config()), folder)


def make_backend(folder: Path, items: Path) -> MegatronBackend:
    """Returns a trainer of one rank; its optimizer is never used."""
    from algorithms import grpo
    from benchmarks.one_rank import one_rank_parallel, one_rank_setup
    from relax_core.config.choices import Schedule
    from relax_core.config.schema import OptimizerConfig
    from relax_core.contracts.media_file import FolderReader
    from relax_core.train.policy_backend import MegatronBackend

    optimizer = OptimizerConfig(
        lr=1e-5,
        min_lr_ratio=0.0,
        schedule=Schedule.constant,
        warmup_steps=0,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.0,
        clip_grad=1.0,
    )
    setup = one_rank_setup(
        folder,
        family="qwen3_omni_moe",
        parallel=one_rank_parallel(micro_batch_tokens=1 << 20),
        optimizer=optimizer,
        total_steps=1000,
        algorithm=grpo.SPEC,
        config=grpo.GrpoConfig(old_logprobs="current", correction="none", routing_replay=False),
    )
    return MegatronBackend(setup, temperature=1.0, media=FolderReader(items))


def make_groups(items: OmniItems, *, seed: int) -> list[TokenTree]:
    """Returns groups of all kinds in an order of chance: items of many sizes, prompts and answers of many lengths."""
    from relax_core.contracts.media import Media
    from tests.trees import answers_tree

    random = np.random.default_rng(seed)

    def side(most: int) -> int:
        return 2 * int(random.integers(2, most // 2 + 1))

    def item(kind: str) -> MediaItem:
        frames = int(np.exp(random.uniform(np.log(30), np.log(3000))))  # 0.3 to 30 seconds
        if kind == "image":
            return items.image(side(16), side(16))
        if kind == "video":
            return items.video(int(random.integers(2, 9)), side(8), side(8))
        if kind == "sound":
            return items.clip(frames)
        return items.heard_video(int(random.integers(2, 9)), side(8), side(8), frames=frames)

    made = []
    for place in range(GROUPS):
        kind = KINDS[random.integers(len(KINDS))]
        ids = random.integers(0, 40, int(random.integers(8, 64))).tolist()
        media = []
        for _ in range(0 if kind == "text" else int(random.integers(1, 9))):
            one = item(kind)
            media.append(Media(one, len(ids), len(ids) + one.rows))
            ids += [*one.ids.tolist(), *random.integers(0, 40, 4).tolist()]
        if kind == "text":
            ids += random.integers(0, 40, int(random.integers(0, 800))).tolist()
        lengths = random.integers(4, 48, ANSWERS)
        tree = answers_tree(
            f"{place} {kind}",
            np.array(ids, dtype=np.int32),
            lengths,
            random.integers(0, 40, int(lengths.sum()), dtype=np.int32),
            logprobs=-1.0,
            advantages=np.repeat(random.standard_normal(ANSWERS).astype(np.float32), lengths),
        )
        made.append(replace(tree, media=media))
    return made


def measure(folder: Path, *, draws: int, repeats: int) -> list[dict[str, float]]:
    """Prints and returns the figure of each deal, draw by draw."""
    from benchmarks.parity_omni import OmniItems

    make_model(folder / "model")
    backend = make_backend(folder / "model", folder / "items")
    items = OmniItems(folder / "model", folder / "items")
    print(f"{'deal':18}{'busiest over mean':>18}   groups and median seconds of each rank")
    figures = [_of_draw(backend, make_groups(items, seed=draw), repeats=repeats) for draw in range(draws)]
    for name in figures[0]:
        found = [one[name] for one in figures]
        print(f"{name:18}{median(found):18.3f}   median of {draws} draws, {min(found):.3f} to {max(found):.3f}")
    print(f"to reach: at most {REACH:.2f}")
    return figures


def _of_draw(backend: MegatronBackend, groups: Sequence[TokenTree], *, repeats: int) -> dict[str, float]:
    from relax_core.train.micro_batches import NO_TOWER, split_over_ranks

    deals = {
        "rows and towers": split_over_ranks(groups, RANKS, tower=backend.tower_work),
        "rows alone": split_over_ranks(groups, RANKS, tower=NO_TOWER),
    }
    shares = [(name, rank) for name in deals for rank in range(RANKS)]
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(RANKS)] for name in deals}
    for repeat in range(1 + repeats):
        for name, rank in shares if repeat % 2 else shares[::-1]:
            taken = _seconds(backend, deals[name][rank])
            if repeat:  # the first is not measured
                seconds[name][rank].append(taken)
    figures = {}
    for name, ranks in seconds.items():
        each = [median(one) for one in ranks]
        figures[name] = max(each) * RANKS / sum(each)
        told = ", ".join(f"{len(share)}: {own:.2f}" for share, own in zip(deals[name], each, strict=True))
        print(f"{name:18}{figures[name]:18.3f}   {told}", flush=True)
    return figures


def _seconds(backend: MegatronBackend, groups: Sequence[TokenTree]) -> float:
    backend.begin_step(0)
    start = time.process_time()
    backend.accumulate(groups)
    return time.process_time() - start


def main() -> None:
    """Measures and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    arguments = parser.parse_args()
    # Before torch is imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryDirectory(prefix="relax-media-balance-") as scratch:
        figures = measure(Path(scratch), draws=arguments.draws, repeats=arguments.repeats)
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"busiest over mean": figures, "load": os.getloadavg()[0]}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
