"""Decode speed of the embedded engine, over HTTP, against transformers' generate on the same weights and one thread.

    python -m benchmarks.decode [--batches 1 16 64 256] [--new-tokens 64] [--rounds 5] [--profile]

The two take turns in every round, so that a loaded machine slows both; what counts is the ratio, of wall time and of
process CPU time: the engine's covers its HTTP, scheduling and decoding, not the client.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import torch

from benchmarks.tiny_model import PROMPT_TOKENS, VOCAB, demo_model, engine_config
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.client import EngineClient
from relax_core.engines.process import EngineLaunch, EngineProcess

TARGETS = {1: 3.5, 16: 2.5, 64: 2.0, 256: 1.6}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def generate_with_transformers(model: Any, prompts: torch.Tensor, new_tokens: int) -> int:
    with torch.inference_mode():
        out = model.generate(
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


async def generate_with_engine(client: EngineClient, prompts: torch.Tensor, new_tokens: int, seed: int) -> int:
    requests = [
        PromptRequest(rid=f"{seed}-{place}", input_ids=row, sampling_seed=seed + place)
        for place, row in enumerate(prompts.tolist())
    ]
    params = SamplingParams(max_new_tokens=new_tokens)
    return sum([len(one.output_ids) async for one in client.generate(requests, params)])


async def measure(model: Any, process: EngineProcess, token: str, arguments: argparse.Namespace) -> None:
    client = EngineClient(process.url, token, request_timeout_s=120.0, control_timeout_s=30.0)
    print("tokens/s; ratios are embedded over transformers, by wall time and by process CPU time")
    print(f"{'batch':>6} {'transformers':>13} {'embedded':>10} {'ratio':>6} {'CPU ratio':>10} {'target':>7}")
    for batch in arguments.batches:
        repeats = max(1, 32 // batch)  # /proc counts CPU time in hundredths of a second
        prompts = torch.randint(4, VOCAB, (batch, PROMPT_TOKENS))
        rounds = [
            await one_round(model, process.pid, client, prompts, arguments.new_tokens, seed=turn, repeats=repeats)
            for turn in range(arguments.rounds + 1)
        ][1:]  # the first is warm-up
        hf, ours, ratio, cpu = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{batch:>6} {hf:>13.0f} {ours:>10.0f} {ratio:>6.2f} {cpu:>10.2f} {TARGETS.get(batch, 0.0):>7.1f}")
    await client.aclose()


async def one_round(
    model: Any, pid: int, client: EngineClient, prompts: torch.Tensor, new_tokens: int, *, seed: int, repeats: int
) -> tuple[float, float, float, float]:
    """Tokens/s of transformers and of the engine, and the engine's gain in wall time and in CPU time."""
    start, start_cpu = time.perf_counter(), time.process_time()
    tokens = sum(generate_with_transformers(model, prompts, new_tokens) for _ in range(repeats))
    middle, hf_cpu, before = time.perf_counter(), time.process_time() - start_cpu, cpu_seconds(pid)
    found = 0
    for _ in range(repeats):
        found += await generate_with_engine(client, prompts, new_tokens, seed)
    end, engine_cpu = time.perf_counter(), cpu_seconds(pid) - before
    assert found == tokens, (found, tokens)
    hf_wall, wall = middle - start, end - middle
    return tokens / hf_wall, tokens / wall, hf_wall / wall, hf_cpu / max(engine_cpu, 0.01)


def profile(folder: Path, batch: int, new_tokens: int) -> None:
    """Where the decoder's time goes, operator by operator, in this process."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from relax_core.engines.embedded.decoder import Decoder
    from relax_core.engines.embedded.model import Qwen3Model
    from relax_core.engines.embedded.model_config import read_model_config
    from relax_core.engines.embedded.sampler import SamplingSettings, sample_keys
    from relax_core.engines.embedded.slots import Prefix
    from relax_core.engines.embedded.weights import FusedWeights
    from relax_core.weights.model_folder import read_safetensors

    config = read_model_config(folder)
    weights = FusedWeights(config, torch.float32)
    weights.apply(weights.checked(read_safetensors(folder)))
    decoder = Decoder(
        Qwen3Model(config, weights, context_length=512),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=list(TARGETS))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the decoder's operators instead")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = demo_model()
        # no eos: every response has the full length
        model.config.eos_token_id = model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        if arguments.profile:
            for batch in arguments.batches:
                profile(folder, batch, arguments.new_tokens)
            return
        (folder / "token").write_text("benchmark")
        launch = EngineLaunch(
            model_folder=folder,
            engine=engine_config(),
            dtype="float32",
            token_file=folder / "token",
            log_file=folder / "engine.log",
            load_weights=True,
        )
        process = EngineProcess.start(launch)
        try:
            asyncio.run(measure(model, process, "benchmark", arguments))
        finally:
            process.stop(timeout_s=5.0)


if __name__ == "__main__":
    main()
