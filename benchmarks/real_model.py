"""Measures a real pretrained model: decoding, the train step, whole runs against TRL, memory and start, as ratios.

    python -m benchmarks.real_model --trl-path FOLDER [--only decode train trl memory start] [--quick] [--model FOLDER]

    python3.11 -m venv /tmp/trl-venv                        # a separate environment for TRL
    /tmp/trl-venv/bin/pip install torch==2.13.0
    /tmp/trl-venv/bin/pip install -c constraints.txt trl==1.16
    … --trl-path /tmp/trl-venv/lib/python3.11/site-packages

The model is SmolLM2-135M-Instruct, or any dense text model as a Hugging Face folder. ``--quick``: one round, with
shorter runs.

- matrix products: the products of the model's layers and of its head for `MATRIX_ROWS` rows. They alternate with
  ``decode`` and ``train``. The operations per second of ``decode`` and ``train`` are printed as a share of the
  products' operations per second, for the same dtype and threads.
- ``decode``: the embedded engine over HTTP, and transformers' generate, on the same prompts.
- ``train``: forward, backward and AdamW over the same groups. "transformers, padded": micro-batches padded to their
  longest; "packed": concatenated in one row and separated by positions; both with torch's AdamW. "Relax, rows": each
  answer with its own copy of the prompt; "Relax": the prompt once. Relax's optimizer keeps float32 weights also for
  bfloat16. Operations cover the tokens that a way must compute, without padding.
- ``trl``: samples per second of whole runs on sums of two numbers, 8 prompts × 16 answers of at most 24 tokens. TRL and
  colocate use all threads. With async s=1, engine and trainer have half of the threads each. Relax skips groups with
  equal rewards, and TRL does not; the reward of the first three ways (`reward.near`) gives few such groups. "right or
  wrong" is the usual reward: Relax first skips most groups of this model. ``computed`` is the share of computed groups.
- ``memory``: peak memory of the processes of a short run, and the prediction of plan=true.
- ``start``: seconds from the command to the first token and to the first train step.

Operations: a multiplication and an addition count as two. A token costs 2 N in a forward pass. N counts the parameters
without the embedding, and includes the head only for tokens that predict. Attention adds 4 × width for each pair of
tokens in each layer. Backward costs twice as much as forward. All parts compute in ``--dtype``; use float32 if bfloat16
is slower, because the processor lacks AMX and AVX-512 for bfloat16. Numbers are medians over the rounds, followed by
minimum and maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from relax_core.contracts.child_process import OPENMP_WAITS

# Applies to all ways; torch reads the variable on import.
os.environ.update(OPENMP_WAITS, HF_HUB_DISABLE_PROGRESS_BARS="1")

import torch

from benchmarks.engines import engine_tokens, transformers_tokens
from benchmarks.harness import (
    QUIET_RUN,
    Comparison,
    Metrics,
    engine_config,
    machine,
    python,
    run_relax,
    started_engine,
    take_turns,
    write_report,
)
from benchmarks.last_number_reward import __file__ as REWARD_FILE
from benchmarks.memory_plan import compare, measured, predicted
from benchmarks.start_up import measure as measure_start
from benchmarks.throughput import run_metrics, single_metrics
from benchmarks.train_step import check_norms
from benchmarks.train_step_trees import Counts
from benchmarks.train_step_ways import HuggingFace, Ours, Size, as_rows, make_groups, response_lengths
from relax_core.observe.event_log import ROLLOUT

if TYPE_CHECKING:
    from relax_core.contracts.tree import TokenTree

PARTS = ("decode", "train", "trl", "memory", "start")
MATRIX, MATRIX_ROWS, MATRIX_S = "matrix products", 256, 1.0
TRANSFORMERS, RELAX, TRL, COLOCATE, ASYNC = "transformers", "Relax", "TRL", "colocate", "async s=1"
BATCHES, DECODE_PROMPT = (1, 8, 32, 128), 64
TRAIN_PROMPT, TRAIN_LONGEST, TRAIN_MEAN = 64, 192, 64  # tokens
PACKED_TOKENS = 1024
NORM_REACH = {"float32": 2e-3, "bfloat16": 0.1}
RUN_ROWS, ANSWER_TOKENS, CUT_TOKENS, LEARNING_RATE = 2048, 24, 8, 1e-5
DECODED, RATE = "tokens/s", "samples/s, mean"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds a comparison and its columns in the table. Ratios are relative to the way ``base``."""

    found: Comparison
    figures: Sequence[str]
    base: str

    def lines(self) -> Iterator[str]:
        """Yields the table's rows: a way's metric, the ratio to the base way, and the share of the matrix products."""
        for way, rounds in self.found.found.items():
            for figure in self.figures:
                if figure not in rounds[0]:
                    continue
                values = spread([figures[figure] for figures in rounds])
                over = "" if way in (self.base, MATRIX) else self._ratio(way, figure, self.base)
                share = ""
                if MATRIX in self.found.found and way != MATRIX:
                    share = self._ratio(way, "GFLOP/s", MATRIX)
                yield f"| {self.found.title} | {way} | {values} {figure} | {over} | {share} |"

    def _ratio(self, way: str, figure: str, base: str) -> str:
        usable = base in self.found.found and figure in self.found.found[base][0]
        return spread(self.found.ratios(way, figure, base=base)) if usable else ""


def spread(values: Sequence[float]) -> str:
    """Formats the median, the minimum and the maximum."""
    shown = (median(values), min(values), max(values))
    words = [f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in shown]
    return words[0] if len(values) == 1 else f"{words[0]} ({words[1]} to {words[2]})"


def main() -> int:
    given = parse()
    torch.set_num_threads(given.threads)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="relax-real-model-") as scratch:
        case = Case(given, Path(scratch))
        for result in case.all():
            results.append(result)
            print(*result.lines(), sep="\n", file=sys.stderr, flush=True)
    print(*headline(given), "", sep="\n")
    print("| what | way | figure | over the first way | share of the matrix products |\n|---|---|---|---|---|")
    print(*(line for result in results for line in result.lines()), sep="\n")
    write_report(given.json, *(result.found for result in results))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder; by default SmolLM2-135M-Instruct, made on first use"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="one round, and fewer tokens and steps")
    parser.add_argument("--rounds", type=int, help="how often each way is measured; 3, with --quick 1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="of the part decode")
    parser.add_argument("--trl-path", type=Path, help="folder with TRL, see above")
    parser.add_argument("--json", type=Path, help="file for the metrics of all rounds, as JSON")
    given = parser.parse_args()
    given.rounds = given.rounds or (1 if given.quick else 3)
    if "trl" in given.only:
        importable = importlib.util.find_spec("trl") is not None
        if given.trl_path is not None and not (given.trl_path / "trl").is_dir():
            parser.error(f"--trl-path={given.trl_path}: there is no folder trl in it")
        if given.trl_path is None and not importable:
            parser.error("--trl-path: the part trl needs TRL; --help has the commands that install it")
    if given.model is None:
        from relax_core.families.pretrained import pretrained_folder

        given.model = pretrained_folder("smollm2")
    return given


def headline(given: argparse.Namespace) -> Iterator[str]:
    """Yields the conditions of the measurement: the command, the machine and the versions."""
    with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers")]
    path = [*sys.path, *([] if given.trl_path is None else [str(given.trl_path)])]
    versions += [
        f"TRL {distribution.version}" for distribution in importlib.metadata.distributions(name="trl", path=path)
    ]
    yield f"python -m benchmarks.real_model {' '.join(sys.argv[1:])}"
    yield f"{names[0] if names else platform.machine()}, {machine()}, {given.threads} threads, {given.model}"
    yield ", ".join(versions)


# -- operations -------------------------------------------------------------------------------------------------------
def size_of(folder: Path) -> Size:
    """Returns the sizes of a dense model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    return Size(
        hidden=config.hidden_size,
        feed_forward=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
    )


def layer_products(size: Size) -> list[tuple[int, int]]:
    """Returns the input and output widths of a layer's matrix products."""
    width, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    return [
        (size.hidden, width + 2 * keys),
        (width, size.hidden),
        (size.hidden, 2 * size.feed_forward),
        (size.feed_forward, size.hidden),
    ]


def forward_flops(size: Size, counts: Counts) -> float:
    """Returns the operations of a forward pass; see the module's docstring."""
    weights = size.layers * sum(wide * out for wide, out in layer_products(size))
    attention = 4 * size.layers * size.heads * size.head_dim
    return 2.0 * (counts.rows * weights + counts.predicted * size.hidden * size.vocabulary) + counts.pairs * attention


def decode_counts(samples: int, *, prompt: int, new_tokens: int) -> Counts:
    """Returns rows, pairs and predicted rows of ``samples`` responses to different prompts.

    The last sampled token is not computed by the layers.
    """
    rows = prompt + new_tokens - 1
    return Counts(rows=samples * rows, pairs=samples * rows * (rows + 1) // 2, predicted=samples * new_tokens)


def matrix_metrics(size: Size, dtype: torch.dtype, threads: int, number: int) -> Metrics:
    """Returns the operations per second of the products of all layers and of the head."""
    kept = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds = flops = 0.0
    products = [(shape, size.layers) for shape in layer_products(size)] + [((size.hidden, size.vocabulary), 1)]
    for (wide, out), times in products:
        rows, weight = (torch.randn(shape).to(dtype) for shape in ((MATRIX_ROWS, wide), (out, wide)))
        torch.nn.functional.linear(rows, weight)
        began, calls = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < MATRIX_S / len(products):
            torch.nn.functional.linear(rows, weight)
            calls += 1
        seconds += times * took / calls
        flops += times * 2.0 * MATRIX_ROWS * wide * out
    torch.set_num_threads(kept)
    return {"GFLOP/s": flops / seconds / 1e9}


# -- the parts --------------------------------------------------------------------------------------------------------
class Case:
    """Runs the measurements of the model ``given.model`` with the flags of the command line."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self._given, self._scratch = given, scratch
        self._size = size_of(given.model)
        self._rows = scratch / "sums.jsonl"
        write_sums(self._rows)

    def all(self) -> Iterator[Result]:
        """Yields the results of the selected parts."""
        yield self.matrix()
        for part in self._given.only:
            yield from getattr(self, part)()

    def matrix(self) -> Result:
        """Compares dtypes and numbers of threads."""
        ways = {
            f"{name}, {threads} thread{'s' * (threads > 1)}": partial(
                matrix_metrics, self._size, getattr(torch, name), threads
            )
            for name in ("bfloat16", "float32")
            for threads in sorted({1, self._given.threads})
        }
        found = take_turns(MATRIX, ways, rounds=self._given.rounds, warm_up=False)
        return Result(found=found, figures=["GFLOP/s"], base=next(iter(ways)))

    def decode(self) -> Iterator[Result]:
        """Compares the embedded engine with transformers for each batch size."""
        from transformers import AutoModelForCausalLM

        threads, new_tokens = self._given.threads, 32 if self._given.quick else 256
        folder = endless_copy(self._given.model, self._scratch / "endless")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._given.dtype).eval()
        model.generation_config.eos_token_id = None
        settings = engine_config(threads=threads, context_length=DECODE_PROMPT + new_tokens)
        loop = asyncio.new_event_loop()
        with started_engine(self._scratch, folder, engine=settings, dtype=self._given.dtype) as (_, client):
            for batch in self._given.batches:
                prompts = torch.randint(4, self._size.vocabulary, (batch, DECODE_PROMPT))
                counts = decode_counts(batch, prompt=DECODE_PROMPT, new_tokens=new_tokens)
                flops = forward_flops(self._size, counts)
                generate: dict[str, Callable[[int, int], int]] = {
                    TRANSFORMERS: partial(transformers_tokens, model, prompts),
                    RELAX: partial(engine_tokens, loop, client, prompts),
                }
                for number, measure in enumerate(generate.values()):
                    measure(2, 10**6 + number)  # loads lazily loaded code
                ways = {name: partial(timed_tokens, measure, new_tokens, flops) for name, measure in generate.items()}
                ways[MATRIX] = partial(matrix_metrics, self._size, getattr(torch, self._given.dtype), threads)
                title = f"decode, batch {batch}, {new_tokens} tokens: {flops / 1e12:.3g} TFLOP"
                found = take_turns(title, ways, rounds=self._given.rounds, warm_up=False)
                yield Result(found=found, figures=[DECODED], base=TRANSFORMERS)
            loop.run_until_complete(client.aclose())
        loop.close()

    def train(self) -> Iterator[Result]:
        """Compares train steps."""
        dtype = self._given.dtype
        groups, samples = (2, 4) if self._given.quick else (4, 16)
        lengths = response_lengths(groups * samples, longest=TRAIN_LONGEST, mean=TRAIN_MEAN).reshape(groups, samples)
        trees = make_groups(lengths, prompt=TRAIN_PROMPT, vocabulary=self._size.vocabulary)
        rows = as_rows(trees)
        # With a learning rate of 0 all ways keep the same weights, so two ways can share a model.
        model = self._given.model
        theirs = HuggingFace(model, learning_rate=0.0, dtype=dtype)
        family = json.loads((model / "config.json").read_text(encoding="utf-8"))["model_type"]
        ours = Ours(model, family=family, learning_rate=0.0, dtype=dtype, threads=self._given.threads)
        steps: dict[str, tuple[Callable[[], float], Sequence[TokenTree]]] = {
            f"{TRANSFORMERS}, padded": (partial(theirs.padded_step, rows), rows),
            f"{TRANSFORMERS}, packed": (partial(theirs.packed_step, rows, budget=PACKED_TOKENS), rows),
            f"{RELAX}, rows": (partial(ours.step, rows), rows),
            RELAX: (partial(ours.step, trees), trees),
        }
        tokens = sum(map(int, lengths.flat))
        ways: dict[str, Callable[[int], Metrics]] = {}
        for name, (step, of_step) in steps.items():
            flops = 3 * forward_flops(self._size, Counts.of(of_step))
            ways[name] = partial(timed_step, step, tokens, flops)
        ways[MATRIX] = partial(matrix_metrics, self._size, getattr(torch, dtype), self._given.threads)
        least = 3 * forward_flops(self._size, Counts.of(rows))
        title = f"train step, {dtype}, {tokens} answer tokens: {least / 1e12:.3g} TFLOP as rows"
        found = take_turns(title, ways, rounds=self._given.rounds)
        check_norms(found, steps, reach=NORM_REACH[dtype])
        yield Result(found=found, figures=[DECODED], base=f"{TRANSFORMERS}, padded")

    def trl(self) -> Iterator[Result]:
        """Compares complete runs with TRL."""
        threads = self._given.threads
        modes = {COLOCATE: ("mode=colocate", threads), ASYNC: ("mode=async", max(1, threads // 2))}
        ways: dict[str, Callable[[int], Metrics]] = {TRL: self._trl_metrics}
        for suffix, near in (("", True), (", right or wrong", False)):
            for name, (mode, engine_threads) in modes.items():
                words = (*self._run_overrides(near=near), mode, f"engine.threads={engine_threads}")
                ways[name + suffix] = partial(self._run_metrics, name, words)
        found = take_turns("runs on sums", ways, rounds=self._given.rounds, warm_up=False)
        yield Result(found=found, figures=[RATE, "tokens/s", "computed"], base=TRL)

    def _trl_metrics(self, number: int) -> Metrics:
        threads, steps = self._given.threads, 1 if self._given.quick else 5
        flags = [f"--model={self._given.model}", f"--rows={self._rows}", f"--threads={threads}"]
        flags += [f"--new-tokens={ANSWER_TOKENS}", f"--learning-rate={LEARNING_RATE}", f"--seed={number}"]
        flags += [f"--steps={steps}", f"--dtype={self._given.dtype}", f"--trl-path={self._given.trl_path or ''}"]
        return single_metrics(
            json.loads(python("benchmarks.trl_loop", *flags, OMP_NUM_THREADS=str(threads))), skipped=0
        )

    def _run_metrics(self, name: str, words: Sequence[str], number: int) -> Metrics:
        steps, skipped = (4, 1) if self._given.quick else (14, 3)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            run = run_relax(Path(folder) / "run", *words, f"run.steps={steps}", f"seed={number}")
        figures = run_metrics(name, run.steps(), run.steps(ROLLOUT), skipped=skipped)
        skipped_groups = [step["skipped_groups"] for _, step in sorted(run.steps().items())[skipped:-1]]
        return figures | {"computed": 1.0 - fmean(skipped_groups) / 8}

    def memory(self) -> Iterator[Result]:
        """Compares the measured peak memory with the plan's prediction."""
        overrides = [
            *self._run_overrides(near=True),
            "mode=colocate",
            f"engine.threads={self._given.threads}",
            "run.steps=2",
        ]
        overrides.append(f"rollout.max_new_tokens={CUT_TOKENS}")  # nearly all answers are truncated here
        plan = predicted([*overrides, f"run.dir={self._scratch / 'plan'}"])
        comparisons: dict[str, Comparison] = {}
        for number in range(self._given.rounds):
            truth = measured([*overrides, f"run.dir={self._scratch / f'memory-{number}'}"])
            for name, row in compare(plan, truth).items():
                comparison = comparisons.setdefault(name, Comparison(f"peak memory, {name}"))
                for way in ("measured", "predicted"):
                    comparison.add(way, {"MiB": row[way]})
        for comparison in comparisons.values():
            yield Result(found=comparison, figures=["MiB"], base="measured")

    def start(self) -> Iterator[Result]:
        """Measures the start of runs with mode=colocate and mode=async."""
        modes = {COLOCATE: "mode=colocate", ASYNC: "mode=async"}
        ways = {name: partial(self._start_metrics, mode) for name, mode in modes.items()}
        found = take_turns("start", ways, rounds=self._given.rounds, warm_up=False)
        yield Result(found=found, figures=["s to the first token", "s to the first train step"], base=COLOCATE)

    def _start_metrics(self, mode: str, number: int) -> Metrics:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            begun, _ = measure_start(Path(folder) / "run", kills=0, overrides=[*self._run_overrides(near=True), mode])
        return {"s to the first token": begun.token_s, "s to the first train step": begun.seconds}

    def _run_overrides(self, *, near: bool) -> tuple[str, ...]:
        return (
            *QUIET_RUN,
            "model=folder",
            f"model.path={self._given.model}",
            f"model.dtype={self._given.dtype}",
            "data=file",
            f"data.path={self._rows}",
            "reward=plugin",
            f"reward.name={REWARD_FILE}",
            f"reward.near={str(near).lower()}",
            "rollout.prompts_per_step=8",
            "algo.group_size=16",
            f"rollout.max_new_tokens={ANSWER_TOKENS}",
            f"optimizer.lr={LEARNING_RATE}",
            "optimizer.schedule=constant",
        )


# -- helpers ----------------------------------------------------------------------------------------------------------
def timed_tokens(generate: Callable[[int, int], int], new_tokens: int, flops: float, number: int) -> Metrics:
    """Returns the speed of a call that samples ``new_tokens`` for each prompt."""
    began = time.perf_counter()
    tokens = generate(new_tokens, 1000 * (number + 1))
    took = time.perf_counter() - began
    return {DECODED: tokens / took, "GFLOP/s": flops / took / 1e9}


def timed_step(step: Callable[[], float], tokens: int, flops: float, number: int) -> Metrics:
    """Returns the speed of a train step. ``step`` executes the step and returns the gradient norm."""
    began = time.perf_counter()
    norm = step()
    took = time.perf_counter() - began
    return {DECODED: tokens / took, "GFLOP/s": flops / took / 1e9, "gradient norm": norm}


def write_sums(file: Path) -> None:
    """Writes rows with questions for the sum of two 2-digit numbers."""
    numbers = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(RUN_ROWS):
            augend, addend = numbers.randrange(10, 100), numbers.randrange(10, 100)
            prompt = f"What is {augend} + {addend}? Reply with just the number."
            out.write(json.dumps({"prompt": prompt, "answer": str(augend + addend)}) + "\n")


def endless_copy(model: Path, folder: Path) -> Path:
    """Makes a model in ``folder`` with links to the files of ``model``, but no end token. Returns ``folder``."""
    folder.mkdir()
    for file in model.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) | {"eos_token_id": None}
            (folder / file.name).write_text(json.dumps(values), encoding="utf-8")
        else:
            (folder / file.name).symlink_to(file.resolve())
    return folder


if __name__ == "__main__":
    sys.exit(main())
