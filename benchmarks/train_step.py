"""Measures the train step: trained response tokens per second against transformers, tree packing against rows, the
memory of log-probs and of a step, and the cost of routing replay.

    python -m benchmarks.train_step [--parts fill tree logprobs replay trees memory] [--models dense moe demo]
    python -m benchmarks.train_step_media                       # prompts with images

A step is forward, backward and optimizer over the same groups, on one thread of one process, timed in CPU seconds. All
ways start from the same weights and take the same steps, so their gradient norms must agree.

- ``fill``: 8 prompts of 32 tokens × 8 responses of at most 224. The fill is the share of real tokens if all sequences
  were padded to 256. At a fill of 24% lengths have a long tail. "HF padded": micro-batches padded to their longest. "HF
  packed": block-diagonal SDPA by position ids, at its fastest budget. "ours, rows": plain packing, every response with
  its own copy of the prompt.
- ``tree``: responses of at most 128 tokens, 64 on average. "tree, masked": attention by one masked matrix.
- ``logprobs``: `benchmarks.logprobs`, 4,096 rows × 151,936 tokens, hidden 256, each way in separate processes.
- ``replay``: routing replay (R3) on a mixture of experts: groups with and without the engine's experts. Here the
  experts come from transformers' model.
- ``trees``: `benchmarks.train_step_trees`, a tree of 16 turns. "sequences": one sequence per segment, including shared
  rows. The last line compares the ratio with the ratio of the counts of rows, pairs and predicted rows.
- ``memory``: one step over 16 answers of 8,192 tokens on a prompt of 1,024, in micro-batches of 8,192 rows, compared
  with the same step over one answer. Each step runs in a separate process; its memory is the peak minus the memory
  before the step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import ONE_THREAD, Comparison, Metrics, command_line, machine, take_turns
from benchmarks.logprobs import in_own_process
from benchmarks.train_step_trees import Counts, deep_tree, step_memory
from benchmarks.train_step_ways import (
    MICRO_BATCH_TOKENS,
    SIZES,
    HuggingFace,
    Ours,
    as_rows,
    make_groups,
    response_lengths,
    with_own_experts,
    write_model,
)

if TYPE_CHECKING:
    from relax_core.contracts.tree import TokenTree

PARTS = ("fill", "tree", "logprobs", "replay", "trees", "memory")
FILLS = (0.24, 0.5, 1.0)
FILL_PROMPT, FILL_LONGEST, FILL_GROUPS, FILL_SAMPLES = 32, 224, 8, 8
TREE_SHAPES = ((32, 8), (32, 16), (512, 8), (512, 16), (4096, 8), (4096, 16))  # prompt tokens, samples per group
TREE_LONGEST, TREE_MEAN = 128, 64
HF_PACKED_TOKENS = 512  # the fastest of 512, 1,024, 2,048 and 4,096
NORM_REACH = 1e-3
REPLAY_ROUNDS = 10  # factor for the number of rounds, because the expected difference is only 1%


def main() -> int:
    os.environ |= ONE_THREAD  # set before torch is imported; also for the processes of `logprobs`
    parser = command_line(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=("dense", "moe"), help="of the part fill")
    given = parser.parse_args()
    print(machine(), flush=True)
    report: dict[str, object] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="relax-train-step-") as scratch:
        folder = Path(scratch)
        if "fill" in given.parts:
            for model in given.models:
                report[f"fill {model}"] = tell(fill(folder, model, rounds=given.rounds))
        if "tree" in given.parts:
            report["tree"] = tell(tree(folder, rounds=given.rounds))
        if "logprobs" in given.parts:
            report["logprobs"] = logprobs(rounds=given.rounds)
        if "replay" in given.parts:
            report["replay"] = tell([replay(folder, rounds=given.rounds * REPLAY_ROUNDS)])
        if "trees" in given.parts:
            report["trees"] = trees(folder, rounds=given.rounds)
        if "memory" in given.parts:
            report["memory"] = memory()
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


# -- the parts --------------------------------------------------------------------------------------------------------
def fill(folder: Path, model: str, *, rounds: int) -> Iterator[Comparison]:
    """Compares our step with transformers' step at several fills. The ways keep their models between fills."""
    size, family = SIZES[model], _family(model)
    path = write_model(folder / model, size)
    padded, packed = HuggingFace(path), HuggingFace(path)
    ours, ours_rows = Ours(path, family=family), Ours(path, family=family)
    for share in FILLS:
        mean = share * (FILL_PROMPT + FILL_LONGEST) - FILL_PROMPT
        lengths = response_lengths(FILL_GROUPS * FILL_SAMPLES, longest=FILL_LONGEST, mean=mean)
        groups = make_groups(lengths.reshape(FILL_GROUPS, FILL_SAMPLES), prompt=FILL_PROMPT, vocabulary=size.vocabulary)
        rows = as_rows(groups)
        ways: dict[str, Callable[[], float]] = {
            "HF padded": lambda rows=rows: padded.padded_step(rows),  # type: ignore[misc]
            "HF packed": lambda rows=rows: packed.packed_step(rows, budget=HF_PACKED_TOKENS),  # type: ignore[misc]
            "ours": lambda groups=groups: ours.step(groups),  # type: ignore[misc]
            "ours, rows": lambda rows=rows: ours_rows.step(rows),  # type: ignore[misc]
        }
        yield measure(f"{model}, fill {share:.0%}", ways, tokens=_tokens(groups), rounds=rounds)


def tree(folder: Path, *, rounds: int) -> Iterator[Comparison]:
    """Compares groups as trees (the prompt is computed once) with groups as rows, on a dense model."""
    size = SIZES["dense"]
    path = write_model(folder / "tree", size)
    rows_model, tree_model, masked_model = (Ours(path, family="qwen3") for _ in range(3))
    for prompt, samples in TREE_SHAPES:
        count = max(1, 1024 // (prompt * 2))  # enough for a step of a second or more
        lengths = response_lengths(count * samples, longest=TREE_LONGEST, mean=TREE_MEAN).reshape(count, samples)
        groups = make_groups(lengths, prompt=prompt, vocabulary=size.vocabulary)
        rows = as_rows(groups)

        # A group larger than a micro-batch is split, and its prompt is then computed again for each part.
        budget = max(MICRO_BATCH_TOKENS, *(group.computed_rows for group in groups))

        def masked(groups: Sequence[TokenTree] = groups, budget: int = budget) -> float:
            with _masked_attention():
                return masked_model.step(groups, budget_rows=budget)

        ways: dict[str, Callable[[], float]] = {
            "rows": lambda rows=rows: rows_model.step(rows),  # type: ignore[misc]
            "tree": lambda groups=groups, budget=budget: tree_model.step(groups, budget_rows=budget),  # type: ignore[misc]
            "tree, masked": masked,
        }
        yield measure(f"prompt {prompt:,} × {samples}", ways, tokens=_tokens(groups), rounds=rounds)


def logprobs(*, rounds: int) -> object:
    """Compares our log-probs with the plain log_softmax: CPU seconds and peak memory of forward and backward."""
    ways = {name: partial(lambda name, number: in_own_process(name), name) for name in ("naive", "ours")}
    found = take_turns("log-probs, 4,096 rows × 151,936 words", ways, rounds=rounds, warm_up=False)
    print(found.table(base="naive", ratio_of=["seconds", "peak_mb"]), flush=True)
    return found.found


def replay(folder: Path, *, rounds: int) -> Comparison:
    """Compares a step on the same groups with and without the engine's experts."""
    size = SIZES["moe"]
    path = write_model(folder / "replay", size)
    # With a learning rate of 0 the model's choice of experts does not change.
    models = {way: Ours(path, family="qwen3_moe", learning_rate=0.0) for way in ("off", "on")}
    lengths = response_lengths(64, longest=TREE_LONGEST, mean=TREE_MEAN / 2).reshape(8, 8)
    groups = make_groups(lengths, prompt=FILL_PROMPT, vocabulary=size.vocabulary)
    routed = with_own_experts(HuggingFace(path).model, groups)
    ways = {"replay off": lambda: models["off"].step(groups), "replay on": lambda: models["on"].step(routed)}
    return measure("routing replay (R3), moe", ways, tokens=_tokens(groups), rounds=rounds)


def trees(folder: Path, *, rounds: int) -> dict[str, object]:
    """Compares a deep tree (shared rows are computed once) with one sequence per segment, on a dense model."""
    size = SIZES["dense"]
    path = write_model(folder / "trees", size)
    sequences_model, tree_model = (Ours(path, family="qwen3") for _ in range(2))
    deep = deep_tree(vocabulary=size.vocabulary)
    rows = as_rows([deep])
    ways: dict[str, Callable[[], float]] = {
        "sequences": lambda: sequences_model.step(rows),
        "tree": lambda: tree_model.step([deep], budget_rows=deep.rows),
    }
    result = measure(f"{len(rows)} segments", ways, tokens=_tokens([deep]), rounds=rounds)
    told = tell([result])
    every, once = Counts.of(rows), Counts.of([deep])
    for name, count in asdict(every).items():
        print(f"{name:16}{count:>14,} → {getattr(once, name):>11,}  {count / getattr(once, name):5.2f}×")
    allowed = every.flops(size) / once.flops(size)
    share = result.ratio("tree", "tokens/s", base="sequences") / allowed
    print(f"the counts allow {allowed:.2f}×, of which {share:.0%} is reached")
    return {"rounds": told, "counts": [asdict(every), asdict(once)], "allowed": allowed, "share": share}


def memory() -> list[dict[str, float]]:
    """Measures the peak memory of a step with one answer, and of a step with 16 answers."""
    found = [step_memory(answers) for answers in (1, 16)]
    print("\nmemory of one step")
    for row in found:
        print(f"{row['answers']:5.0f} answers {row['peak_mb']:8,.0f} MiB  {row['peak_mb'] / found[0]['peak_mb']:.3f}×")
    return found


# -- measuring --------------------------------------------------------------------------------------------------------
def measure(case: str, ways: Mapping[str, Callable[[], float]], *, tokens: int, rounds: int) -> Comparison:
    """Measures trained tokens per CPU second of ways that return their gradient norm.

    All ways start from the same weights and take the same steps. Raises AssertionError if their gradient norms differ
    by `NORM_REACH` or more, because the ways then do different work.
    """

    def timed(step: Callable[[], float], number: int) -> Metrics:
        began = time.process_time()
        norm = step()
        return {"tokens/s": tokens / (time.process_time() - began), "gradient norm": norm}

    found = take_turns(case, {name: partial(timed, step) for name, step in ways.items()}, rounds=rounds)
    check_norms(found, ways)
    return found


def check_norms(found: Comparison, ways: Iterable[str], *, reach: float = NORM_REACH) -> None:
    """Raises AssertionError if the gradient norms of a way and of the first way differ by ``reach`` or more."""
    first, *other_ways = ways
    for way in other_ways:
        off = max(abs(ratio - 1) for ratio in found.ratios(way, "gradient norm", base=first))
        assert off < reach, f"{found.title}: the gradient of {way} differs from that of {first} by {off:.0e}"


@contextmanager
def _masked_attention() -> Iterator[None]:
    from relax_core.train.model import branch_attention

    usual, branch_attention.MASKLESS_SAVES_PAIRS = branch_attention.MASKLESS_SAVES_PAIRS, 10**15
    try:
        yield
    finally:
        branch_attention.MASKLESS_SAVES_PAIRS = usual


def _family(model: str) -> str:
    return "qwen3_moe" if SIZES[model].experts else "qwen3"


def _tokens(groups: Sequence[TokenTree]) -> int:
    return sum(len(group.tokens[1]) for group in groups)


def tell(found: Iterator[Comparison] | Sequence[Comparison]) -> dict[str, object]:
    """Prints each finished comparison at once, and returns the metrics of all rounds."""
    told: dict[str, object] = {}
    for comparison in found:
        print(comparison.table(base=next(iter(comparison.found)), ratio_of=["tokens/s"]), flush=True)
        told[comparison.title] = comparison.found
    return told


if __name__ == "__main__":
    sys.exit(main())
