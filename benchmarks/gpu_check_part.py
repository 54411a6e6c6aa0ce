"""Computes one part of `benchmarks.gpu_check` on the device that ``RELAX_TRAIN_DEVICE`` names, in a separate process.

    python -m benchmarks.gpu_check_part PART FOLDER

Writes FOLDER/PART-DEVICE.json, and larger results beside it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.family_models import make_family_model
from relax_core.config.compose import compose, typed_config
from relax_core.config.schema import RelaxConfig
from relax_core.plan.build_plan import make_plan
from relax_core.plan.gpu_terms import trainer_phases
from relax_core.plan.rehearsed_step import largest_micro_batch, write_short_model
from relax_core.plan.step_time import rows_of_trees
from relax_core.train import process_group
from relax_core.train.context_parallel import WHOLE
from relax_core.train.device import VARIABLE, training_device
from relax_core.train.megatron_rank import rank_setup
from relax_core.train.model import tree_attention
from relax_core.train.model.tree_attention import FlexBlocks, dense_attention
from relax_core.train.policy_backend import MegatronBackend

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "train"))  # scripts of ranks import each other

SIZED = ("qwen3_0_6b_24gb_1gpu", "qwen3_1_7b_24gb_1gpu", "qwen3_4b_80gb_1gpu")
SIZED_MICRO_BATCHES, SIZED_STEPS, WARM_STEPS = 2, 4, 2
SMALL = ("placement=gpu", "placement.gpus_per_node=1", "+placement.roles.actor=1", "engine=embedded")
GAP_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12}


def parity(folder: Path) -> Mapping[str, Any]:
    """Trains three steps of each family in float32 and bfloat16; writes losses, norms and weights to FOLDER/DEVICE."""
    ranks: Any = importlib.import_module("gpu_branch_ranks")

    device = os.environ[VARIABLE]
    for family in ranks.FAMILIES:
        for dtype in ranks.DTYPES:
            ranks.train(folder, f"{family} {dtype}", family, dtype=dtype)
    return {"families": list(ranks.FAMILIES), "dtypes": list(ranks.DTYPES), "device": device}


def models(folder: Path) -> Mapping[str, Any]:
    """Writes the tiny models of the other parts; needs no GPU."""
    ranks: Any = importlib.import_module("gpu_branch_ranks")

    ranks.make_models(folder)
    model = make_family_model(folder / "gap", "qwen3", **GAP_SIZES)
    rounded = model.to(torch.bfloat16).to(torch.float32)
    rounded.save_pretrained(folder / "gap, rounded weights")
    return {}


def attention(folder: Path) -> Mapping[str, Any]:
    """Compares the attention kernel with a dense mask over trees, forward and backward.

    The mask is made from the definition: row q sees row k if k <= q < end[k]; each pad sees itself.
    """
    device = training_device().torch
    random = np.random.default_rng(0)
    ends = _tree_ends(random, groups=6 if training_device().cuda else 1, prompt=150, branches=8, length=90)
    padded = -(-len(ends) // 128) * 128
    blocks = FlexBlocks.of(ends, WHOLE, padded=padded, device=device)
    row = torch.arange(padded)
    end = torch.from_numpy(np.append(ends, np.arange(len(ends), padded) + 1))
    mask = ((row[None] <= row[:, None]) & (row[:, None] < end[None])).to(device)

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return output[0].transpose(0, 1).flatten(1)

    found: dict[str, Any] = {"rows": padded, "compiled": training_device().cuda}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(padded, heads, 128, dtype=dtype, device=device, requires_grad=True) for heads in (16, 8, 8)
        )
        weight = torch.randn(padded, 16 * 128, dtype=dtype, device=device)
        outputs: dict[str, list[torch.Tensor]] = {}
        for way, attend in (("kernel", blocks.attend), ("dense", dense)):
            output = attend(query, key, value, scale=None)
            outputs[way] = [output, *torch.autograd.grad((output * weight).sum(), (query, key, value))]
        for part, ours, right in zip(("output", "query", "key", "value"), *outputs.values(), strict=True):
            found[f"{name} {part}"] = float((ours - right).float().norm() / right.float().norm())
        found[f"{name} ms"] = _attention_ms(blocks, query, key, value)
    return found


def _attention_ms(blocks: FlexBlocks, *inputs: torch.Tensor) -> float:
    for timed in (False, True):
        training_device().synchronize()
        began = time.perf_counter()
        blocks.attend(*inputs, scale=None).sum().backward()
        training_device().synchronize()
        if timed:
            return 1e3 * (time.perf_counter() - began)
    raise AssertionError("the second round returns")


def _tree_ends(random: np.random.Generator, *, groups: int, prompt: int, branches: int, length: int) -> np.ndarray:
    """Returns the row after each row's subtree, int64 ``[rows]``, of groups with branches of random lengths."""
    ends: list[int] = []
    for _ in range(groups):
        lengths = random.integers(1, 2 * length, branches)
        start = len(ends)
        ends += [start + prompt + int(lengths.sum())] * prompt
        for rows in lengths.tolist():
            ends += [len(ends) + rows] * rows
    return np.array(ends, dtype=np.int64)


@contextmanager
def _kernel_is(kernel: Callable[..., Any]) -> Iterator[None]:
    name = "_kernel"
    before = getattr(tree_attention, name)
    setattr(tree_attention, name, lambda: kernel)
    try:
        yield
    finally:
        setattr(tree_attention, name, before)


def gap(folder: Path) -> Mapping[str, Any]:
    """Writes the log-probs of one model in float32, in bfloat16, and with single causes of rounding taken away."""
    tiny: Any = importlib.import_module("tiny_trainer")

    groups = tiny.make_groups([[60, 40, 80], [90, 30]], prompt_lengths=[50, 40])

    def logprobs(model: str, dtype: str) -> np.ndarray:
        backend = tiny.make_backend(folder / model, dtype=dtype, trainable=False)
        found = np.concatenate(backend.logprobs(groups))
        process_group.leave()
        return found

    arrays = {
        "float32": logprobs("gap", "float32"),
        "rounded weights": logprobs("gap, rounded weights", "float32"),
        "bfloat16": logprobs("gap", "bfloat16"),
    }
    if training_device().gpu:
        with _kernel_is(dense_attention):
            arrays["bfloat16, dense attention"] = logprobs("gap", "bfloat16")
        with _kernel_is(_wide_attention):
            arrays["bfloat16, attention in float32"] = logprobs("gap", "bfloat16")
    if training_device().cuda:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        arrays["bfloat16, sums of products in float32"] = logprobs("gap", "bfloat16")
    np.savez(folder / f"gap-{os.environ[VARIABLE]}.npz", allow_pickle=False, **arrays)
    return {"tokens": int(np.count_nonzero(arrays["float32"]))}


def _wide_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
    return dense_attention(query.float(), key.float(), value.float(), **settings).to(query.dtype)


def offload(folder: Path) -> Mapping[str, Any]:
    """Trains layouts of one rank with and without offloads; returns the values that must be equal, and the bytes that
    remain."""
    ranks: Any = importlib.import_module("offload_ranks")

    ranks.make_models(folder)
    found = {}
    for name in ranks.ON_ONE:
        plain, *others = ranks.three(folder, name)
        for what, moved in zip((name, f"{name}, optimizer.states=host"), others, strict=True):
            equal = all(plain[key] == moved[key] for key in ("metrics", "export", "files"))
            found[what] = {"equal": equal, "left": moved["offloaded"]["left"], "bytes": moved["offloaded"]["bytes"]}
    return found


class _RandomRank(MegatronBackend):
    """A policy with random weights, because no folder has any."""

    def load_weights(self, tensors: Iterable[Any]) -> None:
        """Sets matrices to small random numbers and vectors to 1."""
        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.02)
                    else:
                        parameter.fill_(1.0)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def _load_main_weights(self, *args: Any, **kwargs: Any) -> None: ...


def sizes(folder: Path) -> Mapping[str, Any]:
    """Trains steps of models of real sizes on one GPU; returns measured and planned memory, seconds and rows."""
    cuda = training_device().cuda
    found = {}
    for preset in SIZED if cuda else ("tiny",):
        config = typed_config(compose([f"experiment={preset}"] if cuda else list(SMALL)))
        found[preset] = _sized(config, folder / preset)
    return found


def _sized(config: RelaxConfig, folder: Path) -> Mapping[str, Any]:
    folder.mkdir()
    plan = make_plan(config)
    write_short_model(config, folder, layers=plan.model.layers)
    groups = largest_micro_batch(config, plan.work, None)
    setup = rank_setup(config, model_folder=folder, rank=0, store_address="")
    rank = _RandomRank(replace(setup, threads=1, total_steps=SIZED_STEPS), temperature=config.rollout.temperature)
    seconds = []
    for step in range(SIZED_STEPS):
        if step == WARM_STEPS and training_device().cuda:
            torch.cuda.reset_peak_memory_stats()
        training_device().synchronize()
        began = time.perf_counter()
        rank.begin_step(step)
        for _ in range(SIZED_MICRO_BATCHES):
            rank.accumulate(groups)
        rank.finish_step()
        training_device().synchronize()
        seconds.append(time.perf_counter() - began)
    phases = trainer_phases(config, plan.model, plan.work, stage=0)
    planned = max(sum(terms.values()) for terms in phases.values())
    work = rows_of_trees(groups, micro_batches=SIZED_MICRO_BATCHES)
    found = {"seconds": seconds, "work": asdict(work), "planned": planned}
    if training_device().cuda:
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        found["process"] = total - free - torch.cuda.memory_reserved()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        rank.offload()
        found["offload_s"], found["left"] = time.perf_counter() - began, torch.cuda.memory_allocated()
        began = time.perf_counter()
        rank.onload()
        found["onload_s"] = time.perf_counter() - began
        assert torch.cuda.memory_allocated() <= before
    process_group.leave()
    del rank
    if training_device().cuda:
        torch.cuda.empty_cache()
    return found


PARTS: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    "models": models,
    "parity": parity,
    "attention": attention,
    "gap": gap,
    "offload": offload,
    "sizes": sizes,
}


def main() -> None:
    """Runs the part that the command line names."""
    torch.set_num_threads(1)
    part, folder = sys.argv[1], Path(sys.argv[2])
    found = PARTS[part](folder)
    (folder / f"{part}-{os.environ[VARIABLE]}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
