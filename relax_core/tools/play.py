"""Plays an episode of an environment in the terminal: ``python -m relax_core.tools.play env=number_guess``.

You act as the model: the program shows the model's input, and your input is the response. With ``checkpoint=RUN`` the
run's newest checkpoint plays in the environment of its run. A checkpoint's folder can be given, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.config.errors import ConfigError
from relax_core.contracts.child_process import module_command
from relax_core.contracts.env import EnvSpec, EpisodeStart, InteractionConfig, Message, StepResult
from relax_core.data.tool_parsers import read_action
from relax_core.observe.standard_streams import unread_streams
from relax_core.registry import PluginError
from relax_core.rollout.episodes.env_calls import EnvCalls
from relax_core.rollout.episodes.tool_use import with_call_error
from relax_core.tools.check_env import ROW, env_with, playable, settings_of

CHECKPOINT = "checkpoint="
CHECKPOINT_S = 1800.0  # time limit for evaluating a checkpoint in seconds, with the start of engines
PARSER = "hermes"  # form of tool calls for env.tool_parser=auto, because "auto" needs a chat template


def main(arguments: Sequence[str] | None = None, *, ask: Callable[[str], str] = input) -> int:
    """Plays one episode. Returns 1 if the environment does not exist or a setting is wrong."""
    parser = argparse.ArgumentParser(prog="python -m relax_core.tools.play", description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "settings", nargs="+", help="env=NAME, env.name=FILE or checkpoint=RUN, and keys: env.max_turns=4"
    )
    parser.add_argument("--row", help="a data row as JSON")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the group and of the episode")
    parser.add_argument("--episodes", type=int, default=1, help="number of held-out rows that a checkpoint plays")
    given = parser.parse_intermixed_args(arguments)
    named = [word.removeprefix(CHECKPOINT) for word in given.settings if word.startswith(CHECKPOINT)]
    if named:
        if len(named) > 1 or given.row is not None:
            parser.error("give one checkpoint=, and no --row: a checkpoint plays its held-out rows")
        keys = [word for word in given.settings if not word.startswith(CHECKPOINT)]
        return play_checkpoint(named[0], keys, episodes=given.episodes)
    try:
        values = settings_of([word.replace("env=", "env.name=", 1) for word in given.settings])
        if not isinstance(name := values.pop("name", None), str):
            raise ValueError("env has no value: add env=number_guess, or env.name=/path/my_env.py.")
        spec, config = env_with(name, values)
        row = json.loads(given.row) if given.row else {**ROW, "seed": given.seed}
        if spec.agent is not None:
            raise ValueError(f"env={name}: agents play it, and this command starts no agents. Start a run of one step.")
        if spec.messages is not None:
            _show(spec.messages(row, config))
            print("[a single-turn environment: your response ends the episode]")
            return 0
        asyncio.run(_play(spec, config, EpisodeStart(row=row, group_seed=given.seed, episode_seed=given.seed), ask))
    except (PluginError, ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def play_checkpoint(checkpoint: str, keys: Sequence[str], *, episodes: int) -> int:
    """Evaluates a checkpoint on the first held-out rows with greedy sampling, and prints the episodes.

    ``keys`` change the run's settings. Returns the exit code of the evaluation. Prints its output only if it failed.
    """
    with tempfile.TemporaryDirectory(prefix="rlx-play-") as folder:
        own = [f"eval.rows={episodes}", "eval.samples=1", f"run.dir={folder}/played"]
        command = module_command("relax_core", "eval", checkpoint, *keys, *own)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHECKPOINT_S, check=False
        )
        if done.returncode != 0:
            print(done.stdout, file=sys.stderr, end="")
            return done.returncode
        lines = (Path(folder) / "played" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(map(json.loads, lines)):
        print(f"{'' if number == 0 else chr(10)}[held-out row {number}]")
        if not line["turns"][0]:
            print(f"user: {line['prompt']}")
        print(line["responses"][0])
        print("[a reward could not be computed]" if line["rewards"][0] is None else f"[reward {line['rewards'][0]:g}]")
    return 0


async def _play(spec: EnvSpec, config: InteractionConfig, start: EpisodeStart, ask: Callable[[str], str]) -> None:
    """Plays until the env ends the episode, ``config.max_turns`` is reached, or the input ends."""
    tools: list[Any] = [] if spec.tools is None else list(spec.tools(start.row, config))
    rewards: list[float] = []
    calls = EnvCalls(timeout_s=config.step_timeout_s)
    async with playable(spec, config) as played:
        assert played.open is not None
        env = await calls(played.open, start, config)
        try:
            _show(await calls(env.format_observation, await calls(env.reset)))
            _show_tools(tools)
            for turn in range(config.max_turns):
                try:
                    text = ask(f"turn {turn + 1} of {config.max_turns} > ")
                except EOFError:
                    return
                parser = PARSER if config.tool_parser == "auto" else config.tool_parser
                action = read_action(text, stopped=True, parser=parser, tools=tools)
                step: StepResult = await calls(env.step, action)
                rewards += [] if step.reward is None else [step.reward]
                if step.done:
                    break
                following = step.context_edit or await calls(env.format_observation, step.observation)
                _show(with_call_error(following, action))
            print(f"[the end; reward {sum(rewards):g}]" if rewards else "[the end; a reward plug-in scores it]")
        finally:
            await calls.close(env.close)


def _show(messages: Sequence[Message]) -> None:
    for message in messages:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text", f"<{part['type']}>") for part in content]
        print(f"{message['role']}: {' '.join(map(str, parts))}")


def _show_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    for tool in tools:
        function = tool["function"]
        print(f"tool {function['name']}: {function.get('description', '')}")
        named = ", ".join(f'"{name}": …' for name in function.get("parameters", {}).get("properties", {}))
        print(f'  <tool_call>{{"name": "{function["name"]}", "arguments": {{{named}}}}}</tool_call>')


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
