"""Decode speed of every engine, and what a weight update costs by each transport.

    python -m benchmarks.engines [--batches 1 16 64 256] [--parameters 0.1e6 5e6 50e6] [--parts decode sync step]

Decode: embedded and transformers' generate on the same weights, one thread each, in turns (benchmarks/decode.py); with
SGLang where its environment exists. Sync: benchmarks/weight_sync.py. Step: a short run of the demo, and which part of a
train step its engine stood still for the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from benchmarks.decode import BASE, Contender, Engine, Transformers, decode_rounds, decode_rows, endless_demo_model
from benchmarks.tiny_model import engine_config
from benchmarks.weight_sync import TOKEN, sync_rows
from relax_core.config.schema import EngineConfig
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess

SGLANG_PYTHON = Path(__file__).resolve().parents[1] / ".venv-sglang" / "bin" / "python"
PARTS = ("decode", "sync", "step")
DEMO_STEPS = 60
WARM_STEPS = 10


def engine_kinds() -> dict[str, EngineConfig]:
    """The settings of every engine that can run here."""
    embedded = engine_config()
    kinds = {"embedded": embedded}
    if SGLANG_PYTHON.is_file():
        kinds["sglang"] = replace(
            embedded,
            name="sglang",
            python=str(SGLANG_PYTHON),
            tp=1,
            deterministic=False,
            start_timeout_s=300.0,
        )
    else:
        print("sglang is left out: make sglang-cpu builds its environment")
    return kinds


async def decode(batches: list[int], *, new_tokens: int, rounds: int) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders: dict[str, Contender] = {BASE: Transformers(endless_demo_model(folder))}
        token_file = folder / "token"
        token_file.write_text(TOKEN)
        clients = []
        for name, engine in engine_kinds().items():
            launch = EngineLaunch(
                model_folder=folder,
                engine=engine,
                dtype="float32",
                token_file=token_file,
                log_file=folder / f"{name}.log",
                load_weights=True,
            )
            process = EngineProcess.start(launch)
            stack.callback(process.stop, timeout_s=10.0)
            clients.append(build_client(engine, process.url, model_folder=folder, token_file=token_file))
            contenders[name] = Engine(clients[-1], process.pid)
        print("\nDecode, 102k parameters, prompts of 16 tokens; ratios to transformers: of wall time (least to most of")
        print(f"{rounds} rounds) and of process CPU time")
        print(f"{'batch':>6} {'engine':>13} {'tokens/s':>9} {'ratio':>24} {'CPU ratio':>10}   goal")
        for batch in batches:
            found = await decode_rounds(contenders, batch, new_tokens=new_tokens, rounds=rounds)
            print("\n".join(decode_rows(batch, found)), flush=True)
        for client in clients:
            await client.aclose()


def sync(parameters: list[float], *, rounds: int) -> None:
    print("\nSync of the embedded engine, float32, milliseconds: median (least to most)")
    print(f"{'size':>7} {'transport':>14} {'written':>10} {'served':>26} {'stall':>26}")
    for size in parameters:
        print("\n".join(sync_rows(size, rounds=rounds)))


def step() -> None:
    """The stall as a part of a train step of the demo, by transport, from the run's own metrics."""
    print("\nDemo, staleness 1: milliseconds, medians after the tenth step")
    for transport in ("shared_memory", "gloo", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            overrides = ["run.panel=false", f"run.steps={DEMO_STEPS}", f"run.dir={folder}", "mode=async"]
            command = [sys.executable, "-m", "relax_core", *overrides, f"engine.weight_transport={transport}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
            lines = (Path(folder) / "metrics.jsonl").read_bytes().splitlines()
        records = [msgspec.json.decode(line) for line in lines]
        steps = [one["values"] for one in records if one["source"] == "actor"][WARM_STEPS:]
        stall, push, whole = (
            statistics.median(one[name] for one in steps) for name in ("stall_ms", "push_ms", "step_ms")
        )
        print(f"{transport:>14}: step {whole:.1f}, push {push:.2f}, stall {stall:.3f} = {100 * stall / whole:.2f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--parameters", type=float, nargs="+", default=[0.1e6, 5e6, 50e6])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "decode" in arguments.parts:
        asyncio.run(decode(arguments.batches, new_tokens=arguments.new_tokens, rounds=arguments.rounds))
    if "sync" in arguments.parts:
        sync(arguments.parameters, rounds=arguments.rounds)
    if "step" in arguments.parts:
        step()


if __name__ == "__main__":
    main()
