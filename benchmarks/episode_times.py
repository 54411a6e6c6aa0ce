"""Measures the cost of slow tools, env workers and the sandbox: ``python -m benchmarks.episode_times [--rounds 3]``.

It executes complete asynchronous runs with staleness 2. A train step has 8 groups of 16 episodes, and an episode has 8
turns of at most 4 tokens. This file is also the environment of the runs: its tool takes 20 ms, and with a long tail 1%
of the calls take 2 s. Runs with different settings against the tail alternate. ``samples/s`` counts trained samples.
The ratio is relative to a run without a tail.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import QUIET_RUN, Metrics, command_line, machine, run_relax, take_turns, write_report
from benchmarks.isolated_number_guess import SPEC as ISOLATED
from benchmarks.isolated_number_guess import IsolatedNumberGuessConfig
from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult

TURNS, TURN_TOKENS = 8, 4
TOOL_S, SLOW_S, SLOW_SHARE = 0.02, 2.0, 0.01
RUN = (
    *("mode=async", "mode.max_staleness=2", "rollout.prompts_per_step=8", "algo.group_size=16", "reward=env"),
    *("env=plugin", f"env.name={Path(__file__)}", f"env.max_turns={TURNS}", f"env.max_turn_tokens={TURN_TOKENS}"),
    *("env.on_turn_cut=continue", f"rollout.max_new_tokens={TURNS * TURN_TOKENS}", *QUIET_RUN),
)
NO_TAIL = "no tail"
WAYS = {
    NO_TAIL: ("env.tail=false",),
    "quorum 1.0": (),
    "quorum 0.75": ("rollout.quorum=0.75",),
    "over-sampling 1.5": ("rollout.over_sampling=1.5",),
}
SKIPPED_STEPS = 6


@dataclass(frozen=True)
class SlowToolConfig(InteractionConfig):
    """Holds the settings of the environment."""

    name: str = "slow_tool"
    tail: bool = True


class SlowTool(BaseInteractionEnv):
    """Answers each turn after the delay of the tool."""

    def __init__(self, start: EpisodeStart, config: SlowToolConfig) -> None:
        self._prompt, self._tail = str(start.row["prompt"]), config.tail
        self._draw, self._left = random.Random(start.episode_seed), TURNS

    async def reset(self) -> str:
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        slow = self._tail and self._draw.random() < SLOW_SHARE
        await asyncio.sleep(SLOW_S if slow else TOOL_S)
        self._left -= 1
        return StepResult(observation="go on", reward=float(len(action.text)), done=not self._left)


SPEC = EnvSpec(name="slow_tool", summary="a tool that may be slow", config=SlowToolConfig, open=SlowTool)


def rate(words: tuple[str, ...], number: int, *, steps: int) -> Metrics:
    """Returns the trained samples per second of one run."""
    with tempfile.TemporaryDirectory(prefix="relax-episodes-") as folder:
        run = run_relax(Path(folder) / "run", *RUN, *words, f"run.steps={steps}", f"seed={number}")
    measured = [values for _, values in sorted(run.steps().items())][SKIPPED_STEPS:-1]
    return {
        "samples/s": 1e3 * sum(record["samples"] for record in measured) / sum(record["step_ms"] for record in measured)
    }


def env_worker_ms(*, steps: int = 500) -> float:
    """Returns the extra milliseconds of a step in an env worker over a step in this process (medians)."""
    from relax_core.rollout.env_workers.env_workers import EnvWorkers

    config = IsolatedNumberGuessConfig(name=str(Path(__file__).with_name("isolated_number_guess.py")), max_turns=10**6)

    async def scene() -> float:
        workers = EnvWorkers(ISOLATED, config)
        try:
            opened = workers.spec(episodes_per_group=1).open
            assert opened is not None and ISOLATED.open is not None
            start = EpisodeStart(row={"prompt": ""}, group_seed=1, episode_seed=1)
            away: Any = await opened(start, config)  # type: ignore[misc]
            envs, times = [ISOLATED.open(start, config), away], ([], [])  # type: tuple[Any, tuple[list[float], ...]]
            for env in envs:
                await env.reset()
            for _ in range(steps):
                for env, own in zip(envs, times, strict=True):
                    began = time.perf_counter()
                    await env.step(Action(text="0", stopped=True))
                    own.append(time.perf_counter() - began)
            return 1e3 * (median(times[1]) - median(times[0]))
        finally:
            await asyncio.to_thread(workers.close)

    return asyncio.run(scene())


def sandbox_ms(*, runs: int = 20) -> tuple[float, float]:
    """Returns the extra time of print(1) in the sandbox and its time in a plain process, as medians in milliseconds."""
    from relax_core.sandbox import run_code as sandbox

    python = sandbox._interpreter(None if os.getuid() else sandbox._unused_uid())  # the sandbox uses this interpreter
    inside, plain = [], []
    for _ in range(runs):
        began = time.perf_counter()
        sandbox.run_code("print(1)", sandbox.CodeLimits())
        inside.append(time.perf_counter() - began)
        began = time.perf_counter()
        subprocess.run([python, "-I", "-B", "-c", "print(1)"], stdout=subprocess.PIPE, check=True, timeout=60.0)
        plain.append(time.perf_counter() - began)
    return 1e3 * (median(inside) - median(plain)), 1e3 * median(plain)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=24, help="train steps of a run")
    given = parser.parse_args()
    print(machine(), flush=True)
    more, plain = sandbox_ms()
    print(f"print(1) in the sandbox: {more:+.1f} ms over a plain process ({plain:.1f} ms)", flush=True)
    print(f"a step through an env worker: {env_worker_ms():+.2f} ms over a step in this process", flush=True)
    ways = {name: partial(rate, words, steps=given.steps) for name, words in WAYS.items()}
    found = take_turns("slow tools", ways, rounds=given.rounds, warm_up=False)
    print(found.table(base=NO_TAIL, ratio_of=["samples/s"]))
    write_report(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
