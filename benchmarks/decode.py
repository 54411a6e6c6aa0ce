"""Decode speed of engines over HTTP, against transformers' generate on the same weights and one thread.

    python -m benchmarks.decode --profile [--batches 1 16] [--hybrid]     the embedded decoder's operators
    python -m benchmarks.decode --media [--rounds 5]           prompts with pictures (benchmarks/decode_media.py)
    python -m benchmarks.decode --states [--rounds 5]          tiny_qwen3_5 (benchmarks/decode_states.py)

`python -m benchmarks.engines` prints the speeds. All take turns in every round, so that a loaded machine slows all.
What counts is the ratio, of wall time and of process CPU time: an engine's covers its HTTP, scheduling and decoding,
not the client.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import psutil
import torch

from benchmarks.tiny_model import PROMPT_TOKENS, VOCAB, demo_model
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.protocol.engine_client import EngineClient

TARGETS = {1: 3.5, 16: 2.5, 64: 2.0, 256: 1.6}  # what embedded reaches for, over transformers
BASE = "transformers"


class Contender(Protocol):
    async def generate(self, prompts: torch.Tensor, new_tokens: int, *, seed: int) -> int:
        """Tokens made from ``prompts`` int64 ``[batch, tokens]``."""

    def cpu_seconds(self) -> float:
        """Of its process and the processes below it, so far."""


class Transformers:
    """In this process."""

    def __init__(self, model: Any) -> None:
        self._model = model

    async def generate(self, prompts: torch.Tensor, new_tokens: int, *, seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        return int(out.shape[0] * (out.shape[1] - prompts.shape[1]))

    def cpu_seconds(self) -> float:
        return time.process_time()


class Engine:
    """Another process, over its client."""

    def __init__(self, client: EngineClient, pid: int) -> None:
        self._client = client
        self._process = psutil.Process(pid)

    async def generate(self, prompts: torch.Tensor, new_tokens: int, *, seed: int) -> int:
        requests = [
            PromptRequest(rid=f"{seed}-{place}", input_ids=row, sampling_seed=seed + place)
            for place, row in enumerate(prompts.tolist())
        ]
        params = SamplingParams(max_new_tokens=new_tokens)
        return sum([len(one.output_ids) async for one in self._client.generate(requests, params)])

    def cpu_seconds(self) -> float:
        times = [one.cpu_times() for one in (self._process, *self._process.children(recursive=True))]
        return sum(one.user + one.system for one in times)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One contender's part of a round."""

    tokens_per_s: float
    cpu_s: float


async def one_turn(contender: Contender, prompts: torch.Tensor, new_tokens: int, *, seed: int, repeats: int) -> Turn:
    cpu, start = contender.cpu_seconds(), time.perf_counter()
    tokens = 0
    for repeat in range(repeats):
        tokens += await contender.generate(prompts, new_tokens, seed=1000 * seed + repeat)
    wall, spent = time.perf_counter() - start, contender.cpu_seconds() - cpu
    assert tokens == repeats * prompts.shape[0] * new_tokens, tokens
    return Turn(tokens_per_s=tokens / wall, cpu_s=max(spent, 0.01))


async def decode_rounds(
    contenders: Mapping[str, Contender], batch: int, *, new_tokens: int, rounds: int
) -> dict[str, list[Turn]]:
    """The first round is warm-up."""
    repeats = max(1, 32 // batch)  # CPU time is counted in hundredths of a second
    prompts = torch.randint(4, VOCAB, (batch, PROMPT_TOKENS))
    found: dict[str, list[Turn]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            found[name].append(await one_turn(contender, prompts, new_tokens, seed=turn, repeats=repeats))
    return {name: turns[1:] for name, turns in found.items()}


def decode_rows(batch: int, found: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """One row a contender: tokens/s, and the ratio to transformers round by round: median, least and most."""
    for name, turns in found.items():
        base = found[BASE]
        speed = statistics.median(turn.tokens_per_s for turn in turns)
        ratios = [turn.tokens_per_s / other.tokens_per_s for turn, other in zip(turns, base, strict=True)]
        cpu = statistics.median(other.cpu_s / turn.cpu_s for turn, other in zip(turns, base, strict=True))
        spread = f"{statistics.median(ratios):>6.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        goal = f"{TARGETS[batch]:>6.1f}" if name == "embedded" and batch in TARGETS else ""
        yield f"{batch:>6} {name:>13} {speed:>9.0f} {spread:>24} {cpu:>10.2f} {goal}"


def profile(folder: Path, batch: int, new_tokens: int) -> None:
    """Where the embedded decoder's time goes, operator by operator, in this process."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from relax_core.engines.embedded.model.decoder_model import LanguageModel
    from relax_core.engines.embedded.model.fused_weights import FusedWeights
    from relax_core.engines.embedded.model.model_config import read_model_config
    from relax_core.engines.embedded.scheduler.decoder import Decoder
    from relax_core.engines.embedded.scheduler.slots import Prefix
    from relax_core.engines.embedded.scheduler.token_sampler import SamplingSettings, sample_keys
    from relax_core.weights.folder_stream import read_safetensors

    config = read_model_config(folder)
    weights = FusedWeights(config, torch.float32)
    weights.apply(weights.checked(read_safetensors(folder)))
    decoder = Decoder(
        LanguageModel(config, weights, context_length=512),
        dtype=torch.float32,
        max_samples=batch,
        max_tokens=batch * 512,
        context_length=512,
    )
    settings = SamplingSettings(
        max_new_tokens=new_tokens, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=()
    )
    prompt = list(range(4, 4 + PROMPT_TOKENS))
    with torch.inference_mode(), torch_profile(activities=[ProfilerActivity.CPU]) as found:
        decoder.admit([Prefix(token_ids=prompt, settings=settings, keys=sample_keys([0], batch)[0])])
        for _ in range(new_tokens - 2):
            decoder.step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=32))


def endless_demo_model(folder: Path) -> Any:
    """The demo-size model, saved to ``folder``; no token ends a response, so that every one has the full length."""
    model = demo_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--profile", action="store_true")
    what.add_argument("--media", action="store_true")
    what.add_argument("--states", action="store_true")
    parser.add_argument("--hybrid", action="store_true", help="with --profile: tiny_qwen3_5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.media:
        from benchmarks.decode_media import print_media_speeds

        print_media_speeds(new_tokens=arguments.new_tokens, rounds=arguments.rounds)
        return
    from benchmarks.decode_states import endless_hybrid, print_state_figures

    if arguments.states:
        print_state_figures(new_tokens=arguments.new_tokens, rounds=arguments.rounds)
        return
    with tempfile.TemporaryDirectory() as name:
        (endless_hybrid if arguments.hybrid else endless_demo_model)(Path(name))
        for batch in arguments.batches:
            profile(Path(name), batch, arguments.new_tokens)


if __name__ == "__main__":
    main()
