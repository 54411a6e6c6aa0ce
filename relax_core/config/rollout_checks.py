"""Checks the keys of episodes: turns, environments, environment workers, agents, the agents' command, rewards."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from relax_core.config.reward_choice import choice_problems
from relax_core.config.schema import HISTORIES, MEDIA_TASKS, AgentConfig, RelaxConfig
from relax_core.contracts.env import EnvSpec
from relax_core.contracts.host_network import LOOPBACK
from relax_core.contracts.reward import HALT, MASK, OFF, REFUSE, REPORT, WARN
from relax_core.registry import find_algorithm, find_env, find_reward

EVALUATED_TOGETHER = 256  # maximum number of open episodes of an evaluation (rollout/evaluator.py)


def turn_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of settings for multi-turn environments."""
    env, plugin_config, quorum = find_env(config.env.name), config.env, config.rollout.quorum
    if not env.state_keys and find_algorithm(config.algo.name).requirements(config.algo).state_keys:
        yield (
            f"algo.credit=gigpo with env={env.name}, which gives no state_key, so turns of equal states cannot be "
            "compared. Use algo.credit=episode, or an env with state_keys=True in its SPEC and a key in each step."
        )
    if config.rollout.lockstep:
        yield from lockstep_problems(config, env)
    if not env.has_turns:
        if 0 < quorum < 1:
            yield f"rollout.quorum={quorum:g} with env={env.name}, which has single-turn episodes. Use 1.0."
        return
    if (size := config.algo.group_size) > 1 and 0 < quorum * size <= 1:
        yield (
            f"rollout.quorum={quorum:g} leaves a single episode of algo.group_size={size}, and an advantage "
            f"compares episodes. Use at least {2 / size:.2g}."
        )
    if plugin_config.max_turns < 1:
        yield f"env.max_turns={plugin_config.max_turns}: an episode has at least one turn."
    if plugin_config.max_retries < 0:
        yield f"env.max_retries={plugin_config.max_retries}: must be at least 0 new starts."
    if (limit := plugin_config.max_turn_tokens) is not None and limit < 1:
        yield f"env.max_turn_tokens={limit}: must be at least 1 token."
    if (value := plugin_config.tools_as) not in ("template", "text"):
        yield f"env.tools_as={value}: use template or text."
    if env.open is not None:
        yield from _interaction_problems(config)
    if env.isolated:
        yield from env_worker_problems(config)


def _interaction_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of settings for an environment that returns an observation after each response."""
    env = config.env
    limit, context = env.max_observation_tokens, config.engine.context_length
    if limit is not None and limit < 1:
        yield f"env.max_observation_tokens={limit}: must be at least 1 token."
    if limit is not None and context is not None and limit > context:
        yield (
            f"env.max_observation_tokens={limit} is above engine.context_length={context}, so an observation of "
            f"this length leaves no room for an answer. Use {max(1, context // 4)}, or raise engine.context_length."
        )
    for key in ("step_timeout_s", "episode_timeout_s"):
        if not getattr(env, key) > 0:
            yield f"env.{key}={getattr(env, key)}: must be more than 0 seconds."
    if env.on_turn_cut not in ("end", "continue"):
        yield f"env.on_turn_cut={env.on_turn_cut}: use end or continue."


def env_worker_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of settings for an environment with worker processes."""
    env = config.env
    for key, what in (("workers", "one worker process"), ("episodes_per_worker", "one episode per worker process")):
        if getattr(env, key) < 1:
            yield f"env.{key}={getattr(env, key)}: at least {what}."
    if env.workers < 1 or env.episodes_per_worker < 1:
        return
    for key, size in (("algo.group_size", config.algo.group_size), ("eval.samples", config.eval.samples)):
        if env.workers * env.episodes_per_worker < size:
            yield _too_few_places(env, f"{key}={size} are open together", needed=size)
    if config.rollout.lockstep:
        # the episodes of a step, plus the episodes of the next step or of the evaluation before the step
        step = config.rollout.prompts_per_step * config.algo.group_size
        needed = step + max(step, EVALUATED_TOGETHER if config.eval.every else 0)
        if env.workers * env.episodes_per_worker < needed:
            yield _too_few_places(env, f"with rollout.lockstep=true up to {needed} are open together", needed=needed)


def _too_few_places(env: object, why: str, *, needed: int) -> str:
    workers, most = env.workers, env.episodes_per_worker  # type: ignore[attr-defined]
    return (
        f"env.workers={workers} with env.episodes_per_worker={most}: they have room for {workers * most} episodes, and "
        f"{why}. Use env.workers={-(-needed // most)}."
    )


def lockstep_problems(config: RelaxConfig, env: EnvSpec) -> Iterator[str]:
    """Yields the reasons against rollout.lockstep=true.

    With these settings results depend on timing even with lockstep, or lockstep is not needed.
    """
    rollout = config.rollout
    if not env.has_turns:
        yield f"rollout.lockstep=true with env={env.name}, which has single-turn episodes. Use false."
    if env.agent is not None:
        yield f"rollout.lockstep=true with env={env.name}: the agents' requests depend on timing. Use false."
    for key, value, most, what in (
        ("mode.max_staleness", config.mode.max_staleness, 0, "the weights of a turn depend"),
        ("rollout.workers", rollout.workers, 1, "the groups of a worker depend"),
        ("rollout.over_sampling", rollout.over_sampling, 1, "the trained groups depend"),
    ):
        if value > most:
            yield f"rollout.lockstep=true with {key}={value:g}: {what} on timing. Use {key}={most}, or no lockstep."
    if 0 < rollout.quorum < 1:
        yield (
            f"rollout.lockstep=true with rollout.quorum={rollout.quorum:g}: the trained episodes depend on "
            "timing. Use rollout.quorum=1, or no lockstep."
        )


_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Agents inherit these variables for programs, files and the user's language. Other variables may contain secrets.
_KEPT = (
    *("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "XDG_CACHE_HOME", "LD_LIBRARY_PATH"),
)


def agent_command_line(agent: AgentConfig, *, of_env: Sequence[str] = ()) -> list[str]:
    """Returns the words of the agent's command: ``of_env`` or, without it, agent.command; empty without a command.

    If the first word is "python", it is replaced by agent.python or the run's interpreter. Raises ValueError for an
    empty command and for an unclosed quote.
    """
    words = list(of_env)
    if not words and agent.command is not None:
        try:
            words = shlex.split(agent.command)
        except ValueError as error:
            raise ValueError(f"agent.command={agent.command}: {error}. Close the quote, or escape it.") from error
        if not words:
            raise ValueError('agent.command is empty. Give a command, such as agent.command="python my_agent.py".')
    if words and _PYTHON.fullmatch(words[0]):
        words[0] = agent.python or sys.executable
    return words


def agent_environment(agent: AgentConfig, more: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of an agent: a few variables of the run, agent.env, and ``more``.

    The folder of agent.python is first on PATH. Requests to this machine use no proxy.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    python = str(Path(agent.python or sys.executable).parent)
    path = os.pathsep.join([python, agent.env.get("PATH", os.environ.get("PATH", os.defpath))])
    defaults = {"PYTHONUNBUFFERED": "1", "NO_PROXY": ",".join(LOOPBACK), "no_proxy": ",".join(LOOPBACK)}
    return {**kept, **defaults, **agent.env, "PATH": path, **more}


def command_problem(agent: AgentConfig, words: Sequence[str]) -> str | None:
    """Returns the problem of a command if its program, script or folder is missing; otherwise None."""
    folder = Path(agent.cwd or Path.cwd())
    if not folder.is_dir():
        return f"agent.cwd={folder}: no such folder. Give the agent's working folder."
    if agent.python is not None and not os.access(agent.python, os.X_OK):
        return f"agent.python={agent.python}: no such program. Give the interpreter, such as .venv-agents/bin/python."
    program = words[0]
    found = folder / program if os.sep in program else shutil.which(program, path=agent_environment(agent, {})["PATH"])
    if found is None or not os.access(found, os.X_OK) or Path(found).is_dir():
        return f"agent.command: there is no program {program} (agent.cwd={folder}). Give its path, or install it."
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    if Path(program).name.startswith("python") and script.endswith(".py") and not (folder / script).is_file():
        return f"agent.command: there is no file {script} in agent.cwd={folder}. Give its path, or set agent.cwd."
    return None


def agent_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of `agent` and `endpoint` that can be found without reading files."""
    env, agent, endpoint = find_env(config.env.name), config.agent, config.endpoint
    if agent.history not in HISTORIES:
        yield f"agent.history={agent.history}: use {' or '.join(HISTORIES)}."
    if env.agent is None:
        for key, value in (("command", agent.command), ("python", agent.python), ("cwd", agent.cwd)):
            if value is not None:
                yield f"agent.{key}={value} with env={env.name}, which no agent plays. Drop it, or use env=agent."
        return
    if endpoint.port and endpoint.port + config.rollout.workers - 1 > 65535:
        yield (
            f"endpoint.port={endpoint.port} with rollout.workers={config.rollout.workers} exceeds port 65535. Use "
            "endpoint.port=0."
        )
    if config.data.media_keys.columns or config.data.task in MEDIA_TASKS:
        yield f"env={env.name} with images, videos or sounds in the data: the endpoint takes only text. Use text rows."
    try:
        words = agent_command_line(agent, of_env=env.agent(config.env))
    except ValueError as error:
        yield str(error)
        return
    if not words and agent.workers:
        yield (
            f"agent.workers={agent.workers} without agent.command: external agents play. Give the command, or "
            "use agent.workers=0."
        )
    if words and endpoint.host not in LOOPBACK:
        yield (
            f"endpoint.host={endpoint.host} with agents that Relax starts on this machine. Use 127.0.0.1; another "
            "address is for agents elsewhere, without agent.command."
        )


def agent_file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem if the program, script or folder of the agent's command is missing."""
    env = find_env(config.env.name)
    if env.agent is None:
        return
    try:
        words = agent_command_line(config.agent, of_env=env.agent(config.env))
    except ValueError:
        return  # `agent_problems` has reported the error
    if words and (problem := command_problem(config.agent, words)) is not None:
        yield problem


SANDBOXES = ("auto", "none")


def reward_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields the problems of the reward's settings, and of the combination of reward, data and env."""
    reward, spec = config.reward, find_reward(config.reward.name)
    if not reward.timeout_s > 0:
        yield f"reward.timeout_s={reward.timeout_s}: must be more than 0 seconds."
    if not reward.memory_gib > 0:
        yield f"reward.memory_gib={reward.memory_gib}: must be more than 0 GiB."
    if reward.sandbox not in SANDBOXES:
        yield f"reward.sandbox={reward.sandbox}: use {' or '.join(SANDBOXES)}."
    if not 0 <= reward.max_failed <= 1:
        yield f"reward.max_failed={reward.max_failed}: a share, from 0 (none may fail) to 1 (all may)."
    for key, choices in (("audit", (WARN, REFUSE, OFF)), ("on_hack", (REPORT, MASK, HALT))):
        if (value := getattr(reward, key)) not in choices:
            quotes = ' In a YAML file write "off" in quotes.' if value == "False" else ""
            yield f"reward.{key}={value}: use {', '.join(choices[:-1])} or {choices[-1]}.{quotes}"
    if not 0 <= reward.audit_limit < 1:
        yield f"reward.audit_limit={reward.audit_limit}: a share of the rows, from 0 to below 1. Use e.g. 0.02."
    if not 0 < reward.shadow_share <= 1:
        yield f"reward.shadow_share={reward.shadow_share}: a share above 0, to 1. Use reward.shadow=null for none."
    yield from choice_problems(spec, reward)
    task, tasks = config.data.task, spec.tasks
    if tasks and task is not None and task not in tasks:
        yield (
            f"reward={reward.name} does not score data={config.data.name}: it scores only {', '.join(tasks)}. "
            f"Choose another reward (relax list has them), or data.task={tasks[0]}."
        )
    if spec.scores_turns and find_env(config.env.name).messages is not None:
        yield (
            f"reward={reward.name} scores the rewards of an env's turns, but env={config.env.name} gives none. "
            "Choose an env with turns, or a reward for the answer, such as reward=math."
        )
    if reward.by is not None and task is not None:
        yield (
            f"reward.by={reward.by} with data.task={task}: its rows have no such column. Drop reward.by, or give "
            "rows that name their reward: data=file data.path=ROWS.jsonl."
        )
