"""Measures the decode speed of every engine and the cost of a weight update by each transport.

    python -m benchmarks.engines [--batches 1 16 64 256] [--parameters 0.1e6 5e6 50e6] [--parts decode sync step]
    python -m benchmarks.engines --parts profile --batches 16     # the operators of the embedded decoder

- ``decode``: the embedded engine, SGLang if its environment exists, and transformers' generate on the same weights.
  They alternate, with one thread each. An engine's CPU time covers its HTTP, scheduling and decoding, not the client.
- ``sync``: one weight update of the embedded engine. "written" is the time that the trainer waits for the file and its
  digest. "served" is the time until the engine serves the trainer's tensors. "stall" is the pause of decoding.
- ``step``: a short run of the demo. Prints the engine's pause for new weights as a share of a train step.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import psutil
import torch

from benchmarks.harness import (
    PROMPT_TOKENS,
    QUIET_RUN,
    VOCAB,
    Comparison,
    Metrics,
    command_line,
    demo_model,
    engine_config,
    machine,
    run_relax,
    started_engine,
    take_turns,
    write_report,
)
from relax_core.contracts.engine import PromptRequest, SamplingParams

if TYPE_CHECKING:
    from relax_core.config.schema import EngineConfig
    from relax_core.engines.protocol.engine_client import EngineClient

SGLANG_PYTHON = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"
PARTS = ("decode", "sync", "step", "profile")
TRANSPORTS = ("shared_memory", "gloo", "disk")
BASE = "transformers"
DEMO_STEPS, WARM_STEPS = 60, 10
CPU_REPEATS = 32  # minimum samples per measurement, because CPU time has a resolution of 10 ms


def engine_kinds() -> dict[str, EngineConfig]:
    """Returns the settings of every engine that can run on this machine."""
    kinds = {"embedded": engine_config()}
    if SGLANG_PYTHON.is_file():
        kinds["sglang"] = engine_config(name="sglang", python=str(SGLANG_PYTHON), tp=1, deterministic=False)
    else:
        print("sglang is left out: make sglang-cpu builds its environment")
    return kinds


# -- decode -----------------------------------------------------------------------------------------------------------
def decode(batches: Sequence[int], *, new_tokens: int, rounds: int) -> Iterator[Comparison]:
    """Yields one comparison for each batch size."""
    loop = asyncio.new_event_loop()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = demo_model(endless=True)
        model.save_pretrained(folder / "model")
        engines = {
            name: stack.enter_context(started_engine(folder, folder / "model", engine=settings))
            for name, settings in engine_kinds().items()
        }
        for batch in batches:
            prompts = torch.randint(4, VOCAB, (batch, PROMPT_TOKENS))
            repeats = max(1, CPU_REPEATS // batch)

            def timed(
                generate: Callable[[int], int], cpu_s: Callable[[], float], number: int, repeats: int = repeats
            ) -> Metrics:
                cpu, began = cpu_s(), time.perf_counter()
                tokens = sum(generate(1000 * (number + 1) + repeat) for repeat in range(repeats))
                wall, spent = time.perf_counter() - began, max(0.01, cpu_s() - cpu)
                return {"tokens/s": tokens / wall, "tokens/CPU s": tokens / spent}

            ways = {BASE: partial(timed, partial(transformers_tokens, model, prompts, new_tokens), time.process_time)}
            for name, (process, client) in engines.items():
                generate = partial(engine_tokens, loop, client, prompts, new_tokens)
                ways[name] = partial(timed, generate, partial(_cpu_s, process.pid))
            yield take_turns(f"decode, batch {batch}", ways, rounds=rounds)
        for _, client in engines.values():
            loop.run_until_complete(client.aclose())


def transformers_tokens(model: Any, prompts: torch.Tensor, new_tokens: int, seed: int) -> int:
    """Samples ``new_tokens`` after each row of ``prompts`` with transformers. Returns the number of sampled tokens."""
    torch.manual_seed(seed)
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


def engine_tokens(
    loop: asyncio.AbstractEventLoop, client: EngineClient, prompts: torch.Tensor, new_tokens: int, seed: int
) -> int:
    """Samples ``new_tokens`` after each prompt with an engine. The model must have no end token."""
    requests = [
        PromptRequest(rid=f"{seed}-{place}", input_ids=row, sampling_seed=seed + place)
        for place, row in enumerate(prompts.tolist())
    ]

    async def tokens() -> int:
        params = SamplingParams(max_new_tokens=new_tokens)
        return sum([len(response.output_ids) async for response in client.generate(requests, params)])

    return loop.run_until_complete(tokens())


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process and its children have used so far."""
    process = psutil.Process(pid)
    times = [process_or_child.cpu_times() for process_or_child in (process, *process.children(recursive=True))]
    return sum(cpu_times.user + cpu_times.system for cpu_times in times)


def profile(batch: int, *, new_tokens: int) -> None:
    """Runs the embedded decoder in this process and prints the time of each operator."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from relax_core.engines.embedded.decoder import Decoder, Prefix
    from relax_core.engines.embedded.decoder_model import LanguageModel
    from relax_core.engines.embedded.fused_weights import FusedWeights
    from relax_core.engines.embedded.model_config import read_model_config
    from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys
    from relax_core.weights.folder_stream import read_safetensors

    with tempfile.TemporaryDirectory() as name:
        demo_model(endless=True).save_pretrained(name)
        config = read_model_config(Path(name))
        weights = FusedWeights(config, torch.float32)
        weights.apply(weights.checked(read_safetensors(Path(name))))
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


# -- sync -------------------------------------------------------------------------------------------------------------
def sync(parameters: float, *, rounds: int) -> Comparison:
    """Compares the weight transports at one model size, in milliseconds."""
    from relax_core.config.choices import WeightTransportName
    from relax_core.weights.publisher import WeightPublisher
    from relax_core.weights.transport_choice import build_transport

    hidden = 256 if parameters < 20e6 else 512
    layers = max(1, round(parameters / (12 * hidden * hidden)))
    model = demo_model() if parameters < 1e6 else demo_model(hidden=hidden, layers=layers, inter=3 * hidden)
    tensors = [(name, value) for name, value in model.state_dict().items() if name != "lm_head.weight"]
    versions = iter(range(10**6))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model.save_pretrained(folder / "model")
        _, client = stack.enter_context(started_engine(folder, folder / "model", load_weights=False))

        def publisher_of(name: str) -> WeightPublisher:
            """Returns a publisher. As in a run, its files are on disk for the transport disk, and in shared memory
            otherwise.
            """
            where = None if name == "disk" else "/dev/shm"
            own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where)))
            transport = build_transport(WeightTransportName(name), host="127.0.0.1", timeout_s=60.0)
            publisher = WeightPublisher(own, lambda: [client], transport=transport, model_folder=folder / "model")
            stack.callback(publisher.close)
            return publisher

        def way(publisher: WeightPublisher, number: int) -> Metrics:
            began = time.perf_counter()
            report = publisher.publish(next(versions), tensors).result(timeout=120.0)
            assert not report.refused, report.refused
            served_ms = 1e3 * (time.perf_counter() - began)
            return {"written": report.write_ms, "served": served_ms, "stall": report.stall_ms}

        ways = {name: partial(way, publisher_of(name)) for name in TRANSPORTS}
        return take_turns(f"sync, {sum(value.numel() for _, value in tensors) / 1e6:.1f}M", ways, rounds=rounds)


def step(transport: str, number: int) -> Metrics:
    """Runs the demo and returns the stall as a share of a train step, from the run's metrics."""
    overrides = ("mode=async", f"run.steps={DEMO_STEPS}", f"engine.weight_transport={transport}", *QUIET_RUN)
    with tempfile.TemporaryDirectory() as folder:
        run = run_relax(Path(folder) / "run", *overrides)
    steps = [values for _, values in sorted(run.steps().items())][WARM_STEPS:]
    found = {
        name: statistics.median(step_values[name] for step_values in steps)
        for name in ("step_ms", "push_ms", "stall_ms")
    }
    return found | {"stall, share": found["stall_ms"] / found["step_ms"]}


def main() -> int:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--parameters", type=float, nargs="+", default=[0.1e6, 5e6, 50e6])
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS[:3]))
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), flush=True)
    found: list[Comparison] = []
    if "decode" in given.parts:
        for comparison in decode(given.batches, new_tokens=given.new_tokens, rounds=given.rounds):
            print(comparison.table(base=BASE, ratio_of=["tokens/s", "tokens/CPU s"]), flush=True)
            found.append(comparison)
    if "sync" in given.parts:
        for size in given.parameters:
            found.append(sync(size, rounds=given.rounds))
            print(found[-1].table(), flush=True)
    if "step" in given.parts:
        ways = {name: partial(step, name) for name in TRANSPORTS}
        found.append(take_turns("step", ways, rounds=1, warm_up=False))
        print(found[-1].table())
    if "profile" in given.parts:
        for batch in given.batches:
            profile(batch, new_tokens=given.new_tokens)
    write_report(given.json, *found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
