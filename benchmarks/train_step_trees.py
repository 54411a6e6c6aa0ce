"""Makes deep trees for ``benchmarks.train_step --parts trees``, and measures the memory of a step.

    python -m benchmarks.train_step_trees --answers 16       # the memory of one step in this process, as JSON

The trees resemble the traces of tool-use benchmarks: a long system prompt, then turns of 30 to 300 tokens. The first
half of a turn is a tool's result, and the second half is sampled. Late turns fork, as if an answer were sampled again
from the same state. So more than nine tenths of the segments' rows are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.logprobs import memory_mb
from benchmarks.train_step_ways import SIZES, Ours, Size, make_groups, write_model
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree

DEPTH, SHORTEST, LONGEST = 16, 30, 300  # turns of a path, tokens of a turn
SYSTEM = 3000  # tokens
FORKS = {13: 2, 14: 3, 15: 4}  # turn → number of branches after it
MEMORY_TRUNK, MEMORY_ANSWER, MEMORY_BUDGET = 1024, 8192, 8192
DEADLINE_S = 1800


def deep_tree(*, vocabulary: int, seed: int = 1) -> TokenTree:
    """Returns a tree of `DEPTH` turns with one episode per segment. Turn lengths are log-uniform."""
    random = np.random.default_rng(seed)
    versions = [NOT_SAMPLED] * SYSTEM
    end = [0] * SYSTEM
    leaves: list[int] = []

    def grow(turn: int) -> None:
        first = len(end)
        length = round(float(np.exp(random.uniform(np.log(SHORTEST), np.log(LONGEST)))))
        versions.extend([NOT_SAMPLED] * (length // 2) + [0] * (length - length // 2))
        end.extend([0] * length)
        behind = len(end)
        for _ in range(FORKS.get(turn, 1) if turn < DEPTH else 0):
            grow(turn + 1)
        if turn == DEPTH:
            leaves.append(behind - 1)
        end[first:behind] = [len(end)] * length

    grow(1)
    rows = len(end)
    end[:SYSTEM] = [rows] * SYSTEM
    own = np.array(versions, dtype=np.int32)
    tree = TokenTree(
        group_uid="g0",
        token_ids=random.integers(0, vocabulary, rows, dtype=np.int32),
        end=np.array(end, dtype=np.int32),
        loss_mask=own >= 0,
        logprobs=np.where(own >= 0, -1.0, 0.0).astype(np.float32),
        versions=own,
        episodes=[Episode(f"g0.{place}", [leaf], 0.0, {}, [], "stop") for place, leaf in enumerate(leaves)],
    )
    advantages = random.standard_normal(len(leaves)).astype(np.float32)
    return tree.with_extras(advantages=np.repeat(advantages, tree.lengths))


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts computed ``rows``, ``pairs`` of rows in attention, and rows ``predicted`` by the output layer."""

    rows: int
    pairs: int
    predicted: int

    @staticmethod
    def of(trees: Sequence[TokenTree]) -> Counts:
        seen = 0
        for tree in trees:
            inner = tree.end > np.arange(1, tree.rows + 1)
            seen += int((tree.runs.positions()[inner] + 1).sum())
        return Counts(
            rows=sum(tree.computed_rows for tree in trees),
            pairs=seen,
            predicted=sum(len(tree.sampled) for tree in trees),
        )

    def flops(self, size: Size) -> float:
        """Returns the operations of a step of a dense model: three passes over each weight, and in attention two
        products per pair forward and five products per pair backward. The output layer's logits are computed twice.
        """
        width, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
        weights = 2 * size.hidden * (width + keys) + 3 * size.hidden * size.feed_forward
        of_row, of_pair = 6 * size.layers * weights, 7 * 2 * size.layers * width
        return self.rows * of_row + self.pairs * of_pair + self.predicted * 8 * size.hidden * size.vocabulary


# -- memory ---------------------------------------------------------------------------------------------------------
def step_memory(answers: int) -> dict[str, float]:
    """Runs one step over a prompt with ``answers`` in a separate process. ``peak_mb`` is above the memory before."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.train_step_trees", f"--answers={answers}"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, required=True)
    answers = parser.parse_args().answers
    size = SIZES["dense"]
    with tempfile.TemporaryDirectory(prefix="relax-step-memory-") as scratch:
        model = Ours(write_model(Path(scratch) / "model", size), family="qwen3")
    few, many = (
        make_groups(np.full((1, count), length), prompt=MEMORY_TRUNK, vocabulary=size.vocabulary)
        for count, length in ((2, 8), (answers, MEMORY_ANSWER))
    )
    model.step(few, budget_rows=MEMORY_BUDGET)  # loads lazily loaded code
    base = memory_mb("VmRSS")
    model.step(many, budget_rows=MEMORY_BUDGET)
    print(json.dumps({"answers": answers, "peak_mb": memory_mb("VmHWM") - base}))


if __name__ == "__main__":
    main()
