"""Measures episodes of several turns with the prefix cache of the embedded engine over those without it.

    python -m benchmarks.prefix_cache [--rounds 5] [--episodes 32] [--models "tiny" "4 layers of width 256"]

All episodes of a round have one opening of 200 tokens. Each of their 8 turns is one request of one response of 16
tokens; an observation of 32 tokens follows it. Two engines, one with and one without the cache, take turns in every
round, each as a process that is asked over HTTP as the rollout asks it. Counted are the tokens that prefills compute
and the engine's own time in prefill and decoding, the CPU time of its process with its HTTP, and the memory that the
cache takes beside what the plan says. The last line has the figures as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import numpy as np
import psutil

from benchmarks.tiny_model import VOCAB, demo_model, engine_config
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient

PROMPT, ANSWER, OBSERVATION, TURNS = 200, 16, 32, 8
CONTEXT = PROMPT + TURNS * (ANSWER + OBSERVATION)
# By model: sizes of `demo_model`, and how many times faster the engine shall be with the cache.
MODELS = {"tiny": ({}, 2.0), "4 layers of width 256": ({"hidden": 256, "layers": 4, "inter": 768}, 2.5)}
REACH_TOKENS = 8.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Is what the episodes of one round took of an engine.

    ``busy_s`` is the time of prefill and decoding, ``cpu_s`` the CPU time of the whole process, in seconds.
    """

    busy_s: float
    cpu_s: float
    prefill_tokens: int
    cached_tokens: int


class Server:
    """An engine process with or without a prefix cache of ``keeps`` tokens."""

    def __init__(self, folder: Path, *, keeps: int, episodes: int) -> None:
        engine = replace(
            engine_config(),
            context_length=CONTEXT,
            max_running_samples=max(256, episodes),
            prefix_cache_tokens=keeps,
        )
        self._process = EngineProcess.start(
            EngineLaunch(
                model_folder=folder,
                engine=engine,
                dtype="float32",
                token_file=folder / "token",
                log_file=folder / "engine.log",
                load_weights=True,
            )
        )
        self._client = EngineClient(self._process.url, "token", request_timeout_s=300.0, control_timeout_s=60.0)
        self._episodes = episodes

    def loads(self) -> dict[str, float]:
        return dict(self._client.loads())

    def cpu_s(self) -> float:
        """Returns the CPU seconds of the engine's process so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def rss(self) -> int:
        """Returns the resident memory of the engine's process, in bytes."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    async def round(self, seed: int) -> tuple[Cost, list[list[int]]]:
        """Plays all episodes of a round; returns what they took, and their tokens."""
        before, cpu_s = self.loads(), self.cpu_s()
        random = np.random.default_rng(seed)
        opening = random.integers(4, VOCAB, PROMPT).tolist()
        episodes = [list(opening) for _ in range(self._episodes)]
        params = SamplingParams(max_new_tokens=ANSWER, banned_token_ids=[3])  # no answer ends early
        for turn in range(TURNS):
            requests = [
                PromptRequest(rid=f"{seed}.{index}.{turn}", input_ids=ids, sampling_seed=seed + 97 * index + turn)
                for index, ids in enumerate(episodes)
            ]
            async for one in self._client.generate(requests, params):
                episodes[one.prompt] = requests[one.prompt].input_ids + one.output_ids.tolist()
            if turn + 1 < TURNS:
                episodes = [ids + random.integers(4, VOCAB, OBSERVATION).tolist() for ids in episodes]
        after = self.loads()
        cost = Cost(
            busy_s=after["busy_s"] - before["busy_s"],
            cpu_s=self.cpu_s() - cpu_s,
            prefill_tokens=int(after["prefill_tokens"] - before["prefill_tokens"]),
            cached_tokens=int(after["cached_tokens"] - before["cached_tokens"]),
        )
        return cost, episodes

    async def aclose(self) -> None:
        await self._client.aclose()
        self._process.stop(timeout_s=5.0)


async def measure(folder: Path, *, rounds: int, episodes: int, token_bytes: int) -> dict[str, float]:
    """Returns the figures of one model, with ratios by round and their median."""
    keeps = episodes * CONTEXT
    with_it = Server(folder, keeps=keeps, episodes=episodes)
    without = Server(folder, keeps=0, episodes=episodes)
    times, cpu, tokens, same = [], [], [], []
    try:
        for seed in range(rounds + 1):
            ours, our_tokens = await with_it.round(1000 * seed)
            theirs, their_tokens = await without.round(1000 * seed)
            if seed:  # the first round is warm-up
                times.append(theirs.busy_s / ours.busy_s)
                cpu.append(theirs.cpu_s / ours.cpu_s)
                tokens.append(theirs.prefill_tokens / ours.prefill_tokens)
                same.append(sum(a == b for a, b in zip(our_tokens, their_tokens, strict=True)) / episodes)
                assert ours.prefill_tokens + ours.cached_tokens == theirs.prefill_tokens
        held = with_it.loads()["prefix_cache_bytes"]
        more = with_it.rss() - without.rss()
    finally:
        await with_it.aclose()
        await without.aclose()
    return {
        "prefill tokens": statistics.median(tokens),
        "engine time": statistics.median(times),
        "CPU time": statistics.median(cpu),
        "least": min(times),
        "most": max(times),
        "episodes of equal tokens": statistics.mean(same),
        "cache MiB by the plan": keeps * token_bytes / MIB,
        "cache MiB held": held / MIB,
        "MiB more in the process": more / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.models:
        sizes, reach = MODELS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            model = demo_model(**sizes)
            model.save_pretrained(folder)
            (folder / "token").write_text("token")
            config = model.config
            token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
            found = asyncio.run(
                measure(folder, rounds=arguments.rounds, episodes=arguments.episodes, token_bytes=token_bytes)
            )
        figures[name] = found
        print(f"{name}: prefill tokens without over with {found['prefill tokens']:.1f} (reach {REACH_TOKENS})")
        print(
            f"{name}: engine time without over with {found['engine time']:.2f} "
            f"({found['least']:.2f} to {found['most']:.2f}, reach {reach}), by CPU time {found['CPU time']:.2f}"
        )
        print(
            f"{name}: the cache holds {found['cache MiB held']:.1f} MiB of the plan's "
            f"{found['cache MiB by the plan']:.1f}; its process has {found['MiB more in the process']:.1f} MiB more"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
