"""Tests a new environment plug-in: ``python -m relax_core.tools.check_env my_env.py [key=value …]``.

For a multi-turn environment, the checks open two episodes of one group, send unusual responses, and close episodes at
the beginning, in the middle and at the end. As in a run, an isolated environment runs in a worker process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from relax_core.config.errors import ConfigError
from relax_core.config.plugin_types import plugin_config
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvSpec,
    EpisodeLimits,
    EpisodeStart,
    InteractionConfig,
    IsolatedConfig,
    StepResult,
)
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.tool_calls import ToolCall
from relax_core.observe.standard_streams import unread_streams
from relax_core.registry import PluginError, find_env, is_file_plugin, plugin_error_text
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.rollout.episodes.env_calls import EnvCalls, EnvTooSlow

ROW = {"prompt": "What is 2 + 3?", "answer": "5", "seed": 0}
CHILDREN_END_S = 5.0
_MARKUP = "<|im_end|>\n<|im_start|>system\n"
_SHOWN = 300


class Problem(Exception):
    """Reports that the environment violates its contract. The text describes the problem."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the passed checks. Returns 0, or 1 if the environment has a problem."""
    parser = argparse.ArgumentParser(prog="python -m relax_core.tools.check_env", description=__doc__.splitlines()[0])
    parser.add_argument("env", help="a file with a SPEC, or the name of an environment")
    parser.add_argument("settings", nargs="*", help="settings of the environment: max_turns=4")
    parser.add_argument("--row", help=f"a data row as JSON; without it {json.dumps(ROW)}", default=json.dumps(ROW))
    given = parser.parse_args(arguments)
    try:
        spec, config = env_with(given.env, settings_of(given.settings))
        if spec.agent is not None:
            raise Problem(f"{spec.name}: an agent plays it, and only runs start agents. Check it by a run of one step.")
        row = json.loads(given.row)
        for line in (
            asyncio.run(check_turns(spec, config, row)) if spec.has_turns else check_messages(spec, config, row)
        ):
            print(f"ok: {line}")
    except (PluginError, ConfigError, WrongResult, Problem, ValueError) as error:
        print(f"problem: {error}", file=sys.stderr)
        return 1
    print(f"{spec.name}: nothing is wrong")
    return 0


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """Parses settings ``key=value``, with or without ``env.`` in front. A key may be a dotted path."""
    pairs = [word.removeprefix("env.").partition("=") for word in words]
    if wrong := [key for key, sign, _ in pairs if not sign]:
        raise ValueError(f"{wrong[0]}: settings have the form key=value.")
    found: dict[str, Any] = {}
    for key, _, value in pairs:
        *folders, last = key.split(".")
        inner = found
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                raise ValueError(
                    f"{key}={value}: env.{folder} is {inner!r}, a value without keys. Drop one of these settings."
                )
        inner[last] = yaml.safe_load(value)
    return found


def env_with(name: str, settings: Mapping[str, Any]) -> tuple[EnvSpec, Any]:
    """Finds an environment by name or file. Returns the environment and its checked settings."""
    name = str(Path(name).absolute()) if is_file_plugin(name) else name
    spec = find_env(name)
    config = plugin_config("env", name, settings, section="env")
    spec.check(config)
    return spec, config


@asynccontextmanager
async def playable(spec: EnvSpec, config: InteractionConfig) -> AsyncIterator[EnvSpec]:
    """Yields the environment. As in a run, an isolated env runs in a worker process, which ends after the block."""
    if not spec.isolated:
        yield spec
        return
    assert isinstance(config, IsolatedConfig)
    workers = EnvWorkers(spec, config)
    try:
        yield workers.spec(episodes_per_group=1)
    finally:
        await asyncio.to_thread(workers.close)


def check_messages(spec: EnvSpec, config: Any, row: Mapping[str, Any]) -> list[str]:
    """Returns one line for each passed check of a single-turn environment. Raises `Problem` and `WrongResult`."""
    assert spec.messages is not None
    if spec.messages(row, config) != spec.messages(row, config):
        raise Problem("messages returns different conversations for the same row.")
    return ["the same row has the same messages"]


async def check_turns(spec: EnvSpec, config: InteractionConfig, row: Mapping[str, Any]) -> list[str]:
    """Returns one line for each passed check of a multi-turn environment. Raises `Problem` and `WrongResult`."""
    tools = [] if spec.tools is None else [tool["function"]["name"] for tool in spec.tools(row, config)]  # type: ignore[index]
    before = _children()
    async with playable(spec, config) as played:
        check = _Check(played, config, row, tools)
        lines = [f"tools: {', '.join(tools) or 'none'}", await check.openings(), *await check.plays()]
    _, left = psutil.wait_procs(_children() - before, timeout=CHILDREN_END_S)
    message = ", ".join(map(_output_text, left))
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if left:
        raise Problem(f"after close, child processes are left: {message}.")
    return [*lines, "no child process remains"]


class _Check:
    """Checks one environment with one data row. Each call may take ``config.step_timeout_s`` seconds."""

    def __init__(self, spec: EnvSpec, config: InteractionConfig, row: Mapping[str, Any], tools: Sequence[str]) -> None:
        self._spec = spec
        self._config = config
        self._row = row
        self._responses = _responses(tools)
        self._calls = EnvCalls(timeout_s=config.step_timeout_s)

    async def _call(self, what: str, function: Any, *given: Any) -> Any:
        try:
            return await self._calls(function, *given)
        except EnvTooSlow as error:
            raise Problem(f"{what}: {error}. Make it faster, or raise env.step_timeout_s.") from error
        except WrongResult:
            raise
        except Exception as error:  # plug-in code: each error is a problem
            raise Problem(f"{what}: {plugin_error_text(error)}") from error

    async def _opened(self, episode_seed: int) -> tuple[BaseInteractionEnv, Any]:
        """Draws from the global random states, then opens an episode of the group. Returns the env and its messages."""
        limits = EpisodeLimits(turns=self._config.max_turns, sampled_tokens=256, context_tokens=1024)
        start = EpisodeStart(row=self._row, group_seed=1, episode_seed=episode_seed, limits=limits)
        random.random()
        np.random.random()
        env = await self._call("open", self._spec.open, start, self._config)
        observation = await self._call("reset", env.reset)
        return env, await self._call("format_observation of reset", env.format_observation, observation)

    async def openings(self) -> str:
        """Opens two episodes of a group, compares their first messages, and closes both episodes at once."""
        envs = [await self._opened(seed) for seed in (2, 3)]
        for env, _ in envs:
            await self._call("close after reset", env.close)
        if envs[0][1] != envs[1][1]:
            raise Problem(
                f"two episodes of a group open differently: {str(envs[0][1])[:_SHOWN]} and {str(envs[1][1])[:_SHOWN]}. "
                "Draw random values for it from start.group_seed, not from start.episode_seed or a global state."
            )
        return "episodes of a group have one opening, and close after reset"

    async def plays(self) -> list[str]:
        """Plays one episode per unusual response, beginning with this response, to its end or ``max_turns``."""
        ends: dict[str, int] = {}
        for first in range(len(self._responses)):
            env, _ = await self._opened(episode_seed=4)
            end = await self._play(env, first)
            ends[end] = ends.get(end, 0) + 1
            await self._call(f"close after {end}", env.close)
        message = ", ".join(f"{count} by {end}" for end, count in ends.items())
        turns = "1 turn" if self._config.max_turns == 1 else f"at most {self._config.max_turns} turns"
        return [
            f"{len(self._responses)} episodes of {turns} with odd responses ended: {message}",
            "close works after these ends",
        ]

    async def _play(self, env: BaseInteractionEnv, first: int) -> str:
        for turn in range(self._config.max_turns):
            what, action = self._responses[(first + turn) % len(self._responses)]
            step: StepResult = await self._call(f"step with {what}", env.step, action)
            if step.done:
                return "env_done"
            if step.context_edit is None:
                await self._call(f"format_observation after {what}", env.format_observation, step.observation)
        return "max_turns"


def _responses(tools: Sequence[str]) -> list[tuple[str, Action]]:
    """Returns pairs of description and response: typical and unusual responses of models."""
    texts = {
        "an empty response": "",
        "a number": "42",
        "a long response": "and so on " * 10_000,
        "special tokens in the response": f"42{_MARKUP}",
        "other scripts and a NUL": "答え \u202e 🦜 \x00",
    }
    plain = [(what, Action(text=text, stopped=True, content=text)) for what, text in texts.items()]
    calls = [
        ("a call of a tool that does not exist", ToolCall(name="rm -rf /; $(x)", arguments={})),
        *((f"a call of {name} without arguments", ToolCall(name=name, arguments={})) for name in tools),
        *(
            (f"a call of {name} with wrong arguments", ToolCall(name=name, arguments={"no such": [None]}))
            for name in tools
        ),
    ]
    return [
        *plain,
        ("a response that was cut", Action(text="I wi", content="I wi", stopped=False)),
        ("a call that cannot be read", Action(text="<tool_call>{", stopped=True, parse_error="the call is not JSON")),
        *((what, Action(text=what, stopped=True, tool_calls=(call,))) for what, call in calls),
        ("two calls at once", Action(text="two", stopped=True, tool_calls=(calls[-1][1], calls[0][1]))),
    ]


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _output_text(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return f"{process.pid} ({process.name()})"
    return str(process.pid)


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
