"""Trained response tokens a second of one train step, against transformers; tree packing against rows; the memory of
log-probs and of a step; what routing replay costs.

    python -m benchmarks.train_step [--parts fill tree logprobs replay trees memory] [--models dense moe demo]
                                    [--repeats 3] [--json FILE]
    python -m benchmarks.train_step --trees       # the part trees alone
    python -m benchmarks.train_step --memory      # the part memory alone
    python -m benchmarks.train_step --media       # benchmarks.train_step_media

A step is forward, backward and optimizer over the same groups, on one thread of one process; its time is CPU seconds.
The ways of a case take turns, so that a ratio holds on any machine; ratios are medians over the repeats, with the least
and the largest behind. All ways start from the same weights and take the same steps, so their gradients' norms must
agree: how far they are apart is the last column.

- ``fill``: 8 prompts of 32 tokens × 8 responses of at most 224. The fill is the share of real tokens were all sequences
  padded to 256; at 24% lengths have a long tail. "HF padded": micro-batches padded to their longest. "HF packed":
  block-diagonal SDPA by position ids, at the budget that is fastest for it. "ours, rows": plain packing, every response
  with a prompt of its own.
- ``tree``: responses of 128 tokens at most, 64 in the mean. "tree, masked": attention by one masked grid.
- ``logprobs``: `benchmarks.logprobs`, 4,096 rows × 151,936 words, hidden 256, each way in processes of its own.
- ``replay``: R3 on a mixture of experts, whose groups come with and without the experts that the engine chose (here:
  those that transformers' model chooses).
- ``trees``: `benchmarks.train_step_trees`, a tree of 16 turns. "sequences": one sequence a segment, its shared rows
  included. The last line says what share of the ratio that the counts allow is reached: they allow the ratio of the
  floating-point operations that rows, pairs and predicted rows need.
- ``memory``: one step over 16 answers of 8,192 tokens on a prompt of 1,024, in micro-batches of 8,192 rows, against the
  same with one answer; each in a process of its own, peak over what the process had before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

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
TREE_SHAPES = ((32, 8), (32, 16), (512, 8), (512, 16), (4096, 8), (4096, 16))  # prompt tokens, samples a group
TREE_LONGEST, TREE_MEAN = 128, 64
HF_PACKED_TOKENS = 512  # of 512, 1,024, 2,048 and 4,096 the fastest
REPLAY_REPEATS = 10  # times as many as of the others: what is looked for is 1%


@dataclass(frozen=True, kw_only=True)
class Result:
    """``tokens_per_second`` and ``grad_norms``: way → one figure a repeat; the first way is the one compared to."""

    case: str
    tokens: int
    tokens_per_second: dict[str, list[float]]
    grad_norms: dict[str, list[float]]

    def ratios(self, way: str) -> list[float]:
        base = next(iter(self.tokens_per_second.values()))
        return [mine / theirs for mine, theirs in zip(self.tokens_per_second[way], base, strict=True)]

    def disagreement(self, way: str) -> float:
        base = next(iter(self.grad_norms.values()))
        return max(abs(mine / theirs - 1) for mine, theirs in zip(self.grad_norms[way], base, strict=True))


def main() -> None:
    if "--media" in sys.argv:
        from benchmarks import train_step_media

        sys.argv.remove("--media")
        train_step_media.main()
        return
    arguments = _parse()
    # Before torch is imported; also for the processes of `logprobs`.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    report: dict[str, object] = {"load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="relax-train-step-") as scratch:
        folder = Path(scratch)
        if "fill" in arguments.parts:
            for model in arguments.models:
                report[f"fill {model}"] = tell(f"fill, {model}", fill(folder, model, repeats=arguments.repeats))
        if "tree" in arguments.parts:
            report["tree"] = tell("tree", tree(folder, repeats=arguments.repeats))
        if "logprobs" in arguments.parts:
            report["logprobs"] = logprobs(repeats=arguments.repeats)
        if "replay" in arguments.parts:
            repeats = arguments.repeats * REPLAY_REPEATS
            report["replay"] = tell("routing replay, moe", [replay(folder, repeats=repeats)])
        if "trees" in arguments.parts:
            report["trees"] = trees(folder, repeats=arguments.repeats)
        if "memory" in arguments.parts:
            report["memory"] = memory()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--trees", action="store_const", const=["trees"], dest="parts", help="--parts trees")
    parser.add_argument("--memory", action="store_const", const=["memory"], dest="parts", help="--parts memory")
    parser.add_argument("--models", nargs="+", choices=tuple(SIZES), default=("dense", "moe"), help="of the part fill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="write all figures here")
    return parser.parse_args()


# -- the parts --------------------------------------------------------------------------------------------------------
def fill(folder: Path, model: str, *, repeats: int) -> Iterator[Result]:
    """Our step against transformers' at several fills; the ways keep their models from one fill to the next."""
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
        yield measure(f"{share:.0%}", ways, tokens=_tokens(groups), repeats=repeats)


def tree(folder: Path, *, repeats: int) -> Iterator[Result]:
    """Groups as trees, whose prompt is computed once, against rows; dense model."""
    size = SIZES["dense"]
    path = write_model(folder / "tree", size)
    rows_model, tree_model, masked_model = (Ours(path, family="qwen3") for _ in range(3))
    for prompt, samples in TREE_SHAPES:
        count = max(1, 1024 // (prompt * 2))  # enough for a step of a second or more
        lengths = response_lengths(count * samples, longest=TREE_LONGEST, mean=TREE_MEAN).reshape(count, samples)
        groups = make_groups(lengths, prompt=prompt, vocabulary=size.vocabulary)
        rows = as_rows(groups)

        # A group that is larger than a micro-batch is cut, and its prompt is then computed once for each piece.
        budget = max(MICRO_BATCH_TOKENS, *(group.computed_rows for group in groups))

        def masked(groups: Sequence[TokenTree] = groups, budget: int = budget) -> float:
            with _masked_attention():
                return masked_model.step(groups, budget_rows=budget)

        ways: dict[str, Callable[[], float]] = {
            "rows": lambda rows=rows: rows_model.step(rows),  # type: ignore[misc]
            "tree": lambda groups=groups, budget=budget: tree_model.step(groups, budget_rows=budget),  # type: ignore[misc]
            "tree, masked": masked,
        }
        yield measure(f"prompt {prompt:,} × {samples}", ways, tokens=_tokens(groups), repeats=repeats)


def logprobs(*, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Ours and the plain log_softmax in turns: CPU seconds and peak memory over base, forward and backward."""
    found: dict[str, dict[str, list[float]]] = {"naive": {}, "ours": {}}
    for _ in range(repeats):
        for way, columns in found.items():
            for name, value in in_own_process(way).items():
                columns.setdefault(name, []).append(value)
    print("\nlog-probs, 4,096 rows × 151,936 words, forward + backward")
    for way, columns in found.items():
        ratios = [a / b for a, b in zip(columns["seconds"], found["naive"]["seconds"], strict=True)]
        print(
            f"{way:16}{median(columns['seconds']):8.1f} s {_spread(ratios)} of naive, "
            f"{max(columns['peak_mb']) / 1000:.2f} GB over base"
        )
    return found


def replay(folder: Path, *, repeats: int) -> Result:
    """One set of groups, with the engine's experts and without."""
    size = SIZES["moe"]
    path = write_model(folder / "replay", size)
    # Without learning, so that what the model chose at first stays its choice.
    models = {way: Ours(path, family="qwen3_moe", learning_rate=0.0) for way in ("off", "on")}
    lengths = response_lengths(64, longest=TREE_LONGEST, mean=TREE_MEAN / 2).reshape(8, 8)
    groups = make_groups(lengths, prompt=FILL_PROMPT, vocabulary=size.vocabulary)
    routed = with_own_experts(HuggingFace(path).model, groups)
    ways = {"replay off": lambda: models["off"].step(groups), "replay on": lambda: models["on"].step(routed)}
    return measure("R3", ways, tokens=_tokens(groups), repeats=repeats)


def trees(folder: Path, *, repeats: int) -> dict[str, object]:
    """A deep tree, whose shared rows are computed once, against one sequence a segment; dense model."""
    size = SIZES["dense"]
    path = write_model(folder / "trees", size)
    sequences_model, tree_model = (Ours(path, family="qwen3") for _ in range(2))
    deep = deep_tree(vocabulary=size.vocabulary)
    rows = as_rows([deep])
    ways: dict[str, Callable[[], float]] = {
        "sequences": lambda: sequences_model.step(rows),
        "tree": lambda: tree_model.step([deep], budget_rows=deep.rows),
    }
    result = measure(f"{len(rows)} segments", ways, tokens=_tokens([deep]), repeats=repeats)
    told = tell("deep trees", [result])
    every, once = Counts.of(rows), Counts.of([deep])
    for what in ("rows", "pairs", "predicted"):
        each, one = getattr(every, what), getattr(once, what)
        print(f"{'':20}{what:16}{each:>14,} → {one:>11,}  {each / one:5.2f}×")
    allowed = every.flops(size) / once.flops(size)
    share = median(result.ratios("tree")) / allowed
    print(f"{'':20}the counts allow {allowed:.2f}×, of which {share:.0%} is reached")
    return {**told[0], "counts": [asdict(every), asdict(once)], "allowed": allowed, "share": share}


def memory() -> list[dict[str, float]]:
    """Peaks of a step with one answer and with 16."""
    found = [step_memory(answers) for answers in (1, 16)]
    print("\nmemory of one step")
    for one in found:
        print(f"{one['answers']:5.0f} answers {one['peak_mb']:8,.0f} MiB  {one['peak_mb'] / found[0]['peak_mb']:.3f}×")
    return found


# -- measuring --------------------------------------------------------------------------------------------------------
def measure(case: str, ways: Mapping[str, Callable[[], float]], *, tokens: int, repeats: int) -> Result:
    """Each way once unmeasured, then in turns, every other time in the opposite order. A way returns its gradient's
    norm.
    """
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    norms: dict[str, list[float]] = {name: [step()] for name, step in ways.items()}
    for repeat in range(repeats):
        for name in sorted(ways, reverse=bool(repeat % 2)):
            start = time.process_time()
            norms[name].append(ways[name]())
            speeds[name].append(tokens / (time.process_time() - start))
    return Result(case=case, tokens=tokens, tokens_per_second=speeds, grad_norms=norms)


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


# -- print-out --------------------------------------------------------------------------------------------------------
def tell(title: str, results: Iterator[Result] | Sequence[Result]) -> list[dict[str, object]]:
    """Prints each result as soon as it is there."""
    print(f"\n{title}\n{'case':20}{'way':16}{'tokens/s':>10}  of the first way{'norm off':>16}")
    told = []
    for result in results:
        for way, speeds in result.tokens_per_second.items():
            print(
                f"{result.case:20}{way:16}{median(speeds):10,.0f}  {_spread(result.ratios(way)):22}"
                f"{result.disagreement(way):10.0e}",
                flush=True,
            )
        told.append(asdict(result))
    return told


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):5.3f}× ({min(ratios):.3f} – {max(ratios):.3f})"


if __name__ == "__main__":
    main()
