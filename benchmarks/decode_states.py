"""Measures decoding of a model whose layers keep states: over transformers' generate, and its memory against the plan.

`python -m benchmarks.decode --states` prints both. The model is tiny_qwen3_5 with random weights. All take turns in
every round, so that a loaded machine slows all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import BASE, Contender, Engine, Transformers, Turn, decode_rounds
from benchmarks.tiny_model import engine_config
from relax_core.config.compose import load_config
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.families.tiny_configs import HYBRID
from relax_core.plan.build_plan import Plan, make_plan
from tests.seeing import make_seeing_model, text

REACH = {16: 2.0, 64: 1.5}  # of the embedded engine over transformers' generate, by samples
REACH_BYTES = 0.1
GROUPS, SAMPLES = 8, 8
RUN = (
    f"model={HYBRID}",
    "data=see",
    f"algo.group_size={SAMPLES}",
    f"rollout.prompts_per_step={GROUPS}",
    "mode.max_staleness=0",
    "eval.every=0",
)


def endless_hybrid(folder: Path) -> Any:
    """Makes the model, saves it to ``folder`` and returns it; no token ends a response."""
    model = make_seeing_model(folder, name=HYBRID)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    model.generation_config.eos_token_id = None
    return model


def start(folder: Path, *, context: int) -> tuple[EngineProcess, EngineClient]:
    (folder / "token").write_text("token")
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=folder / "model",
            engine=replace(engine_config(), context_length=context),
            dtype="float32",
            token_file=folder / "token",
            log_file=folder / "engine.log",
            load_weights=True,
        )
    )
    return process, EngineClient(process.url, "token", request_timeout_s=120.0, control_timeout_s=30.0)


async def speeds(folder: Path, model: Any, *, new_tokens: int, rounds: int) -> Mapping[int, Mapping[str, list[Turn]]]:
    """Returns the turns of the embedded engine and of transformers, by the number of samples."""
    process, client = start(folder, context=256)
    contenders: dict[str, Contender] = {BASE: Transformers(model), "embedded": Engine(client, process.pid)}
    try:
        return {batch: await decode_rounds(contenders, batch, new_tokens=new_tokens, rounds=rounds) for batch in REACH}
    finally:
        await client.aclose()
        process.stop(timeout_s=5.0)


def planned_bytes(plan: Plan) -> dict[str, int]:
    """Returns what the plan counts for keys and values, and for states, of one engine while it generates."""
    (engine,) = [holder for holder in plan.memory if holder.name == "engine"]
    (terms,) = [phase.terms for phase in engine.phases if phase.name == "rollout"]
    return {name: size for name, size in terms.items() if name.startswith(("KV cache", "linear-attention states"))}


async def held_bytes(folder: Path, plan: Plan) -> int:
    """Returns what an engine holds of keys, values and states after a step's prompts, as long as the plan says."""
    work = plan.work
    process, client = start(folder, context=work.sample_tokens)
    prompts = [
        PromptRequest(rid=str(index), input_ids=text(work.prompt_tokens, seed=index), sampling_seed=index)
        for index in range(GROUPS)
    ]
    try:
        params = SamplingParams(n=SAMPLES, max_new_tokens=work.new_tokens)
        found = [one async for one in client.generate(prompts, params)]
        assert len(found) == GROUPS * SAMPLES == work.samples_in_flight
        return int(client.loads()["kv_cache_bytes"])
    finally:
        await client.aclose()
        process.stop(timeout_s=5.0)


def print_state_figures(*, new_tokens: int, rounds: int) -> None:
    """Measures and prints the speeds and the memory, and writes them as JSON in the last line."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = endless_hybrid(folder / "model")
        for batch, turns in asyncio.run(speeds(folder, model, new_tokens=new_tokens, rounds=rounds)).items():
            pairs = list(zip(turns["embedded"], turns[BASE], strict=True))
            wall = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
            cpu = statistics.median(other.cpu_s / one.cpu_s for one, other in pairs)
            words = f"{batch} samples over transformers' generate (reach {REACH[batch]})"
            found[words] = statistics.median(wall)
            print(f"{words:<60} {found[words]:>6.2f} ({min(wall):.2f} to {max(wall):.2f}), by CPU time {cpu:.2f}")
        torch.set_num_threads(1)
        plan = make_plan(load_config(list(RUN)))
        terms, held = planned_bytes(plan), asyncio.run(held_bytes(folder, plan))
    words = f"plan over measured, cache and states of {GROUPS * SAMPLES} samples (reach 1 ± {REACH_BYTES})"
    found[words] = sum(terms.values()) / held
    told = ", ".join(f"{name} {size / 2**20:.2f} MiB" for name, size in terms.items())
    print(f"{words:<60} {found[words]:>6.3f} (plan: {told}; measured: {held / 2**20:.2f} MiB)")
    print(json.dumps(found))
