"""Measures the prefix cache of the embedded engine: episodes of several turns with and without the cache.

    python -m benchmarks.prefix_cache [--rounds 5] [--episodes 32] [--models "tiny" "4 layers of width 256"]

All episodes of a round share a prompt of 200 tokens. Each of the 8 turns is one request for one response of 16 tokens,
followed by an observation of 32 tokens. Two engine processes, with and without the cache, alternate in every round.
They receive the same HTTP requests as from the rollout. The benchmark measures the tokens computed in prefill, the
engine's time in prefill and decoding, the CPU time of the engine process including HTTP, and the memory of the cache,
compared with the plan.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import numpy as np
import psutil

from benchmarks.harness import (
    VOCAB,
    Comparison,
    Metrics,
    command_line,
    demo_model,
    engine_config,
    machine,
    started_engine,
    take_turns,
    write_report,
)
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.protocol.engine_client import EngineClient

PROMPT, ANSWER, OBSERVATION, TURNS = 200, 16, 32, 8
CONTEXT = PROMPT + TURNS * (ANSWER + OBSERVATION)
MODELS: dict[str, dict[str, Any]] = {"tiny": {}, "4 layers of width 256": {"hidden": 256, "layers": 4, "inter": 768}}
MIB = 1 << 20
WITH, WITHOUT = "with the cache", "without"


async def play(client: EngineClient, *, seed: int, episodes: int) -> list[list[int]]:
    """Runs all episodes of a round and returns their tokens."""
    random = np.random.default_rng(seed)
    opening = random.integers(4, VOCAB, PROMPT).tolist()
    tokens = [list(opening) for _ in range(episodes)]
    params = SamplingParams(max_new_tokens=ANSWER, banned_token_ids=[3])  # so no answer ends early
    for turn in range(TURNS):
        requests = [
            PromptRequest(rid=f"{seed}.{index}.{turn}", input_ids=ids, sampling_seed=seed + 97 * index + turn)
            for index, ids in enumerate(tokens)
        ]
        async for response in client.generate(requests, params):
            tokens[response.prompt] = requests[response.prompt].input_ids + response.output_ids.tolist()
        if turn + 1 < TURNS:
            tokens = [ids + random.integers(4, VOCAB, OBSERVATION).tolist() for ids in tokens]
    return tokens


def measure(name: str, *, rounds: int, episodes: int) -> Comparison:
    """Compares an engine with and without a prefix cache for one model."""
    loop, keeps = asyncio.new_event_loop(), episodes * CONTEXT
    played: dict[tuple[str, int], list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = demo_model(**MODELS[name])
        model.save_pretrained(folder / "model")
        config = model.config
        planned = 8 * keeps * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        settings = {"context_length": CONTEXT, "max_running_samples": max(256, episodes)}
        engines = [
            started_engine(folder, folder / "model", engine=engine_config(**settings, prefix_cache_tokens=tokens))
            for tokens in (keeps, 0)
        ]
        with engines[0] as ours, engines[1] as theirs:

            def way(of: str, pid: int, client: EngineClient, number: int) -> Metrics:
                process, before = psutil.Process(pid), client.loads()
                spent = process.cpu_times()
                played[of, number] = loop.run_until_complete(play(client, seed=1000 * (number + 1), episodes=episodes))
                after, ended = client.loads(), process.cpu_times()
                return {
                    "prefill tokens": after["prefill_tokens"] - before["prefill_tokens"],
                    "engine s": after["busy_s"] - before["busy_s"],
                    "CPU s": ended.user + ended.system - spent.user - spent.system,
                    "cache MiB": after["prefix_cache_bytes"] / MIB,
                    "process MiB": process.memory_info().rss / MIB,
                }

            ways: dict[str, Callable[[int], Metrics]] = {
                of: partial(way, of, process.pid, client)
                for of, (process, client) in zip((WITH, WITHOUT), (ours, theirs), strict=True)
            }
            found = take_turns(name, ways, rounds=rounds)
            for _, client in (ours, theirs):
                loop.run_until_complete(client.aclose())
    pairs = [
        (with_store, without_store)
        for n in range(rounds)
        for with_store, without_store in zip(played[WITH, n], played[WITHOUT, n], strict=True)
    ]
    same = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
    print(f"the plan counts {planned / MIB:.1f} MiB for the cache; {same:.1%} of the episodes have equal tokens")
    return found


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    given = parser.parse_args()
    print(machine(), flush=True)
    found = [measure(name, rounds=given.rounds, episodes=given.episodes) for name in given.models]
    for comparison in found:
        print(comparison.table(base=WITHOUT, ratio_of=["prefill tokens", "engine s", "CPU s"]))
    write_report(given.json, *found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
