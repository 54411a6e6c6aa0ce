"""Measures the cost of a checkpoint for the train step: the copy in host memory and the write to disk.

    python -m benchmarks.checkpoint [--width 640] [--layers 16] [--repeats 5]

It uses one float32 rank with a random Qwen3. The train step waits for the copy, and a thread writes it to disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import numpy as np

from benchmarks.one_rank import one_rank_setup
from tests.trees import answers_tree

VOCABULARY = 8192


def make_model(folder: Path, *, width: int, layers: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = width // 64
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def trained(folder: Path) -> Any:
    """Returns a training backend after one step, because the optimizer creates its state in the first step."""
    from relax_core.train.policy_backend import MegatronBackend

    backend = MegatronBackend(one_rank_setup(folder), temperature=1.0)
    tokens = np.ones(8, dtype=np.float32)
    backend.begin_step(0)
    backend.accumulate([answers_tree("g", np.arange(4), [4, 4], np.arange(8), logprobs=-tokens, advantages=tokens)])
    backend.finish_step()
    return backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", width=parsed.width, layers=parsed.layers)
        backend = trained(folder / "model")
        copies, writes = [], []
        for repeat in range(parsed.repeats):
            began = time.perf_counter()
            backend.copy_state()
            copied = time.perf_counter()
            backend.write_copy(folder / str(repeat))
            copies.append(1e3 * (copied - began))
            writes.append(1e3 * (time.perf_counter() - copied))
        began = time.perf_counter()
        backend.load(folder / "0")
        loaded = 1e3 * (time.perf_counter() - began)
        size = sum(file.stat().st_size for file in (folder / "0").iterdir())
    parameters = sum(parameter.numel() for parameter in backend.model.parameters())
    print(f"{parameters / 1e6:.0f} M parameters, {size / 1e9:.2f} GB a checkpoint; medians of {parsed.repeats}")
    print(f"copy   {statistics.median(copies):8.0f} ms   the step waits for this")
    print(f"write  {statistics.median(writes):8.0f} ms   parallel to the steps; digests and fsync are not included")
    print(f"load   {loaded:8.0f} ms")


if __name__ == "__main__":
    main()
