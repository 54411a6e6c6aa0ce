"""Checks the keys of agents and of the endpoint that answers them."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.checks.agent_command import command_problem, command_words
from relax_core.config.media_schema import MEDIA_TASKS
from relax_core.config.schema import RelaxConfig
from relax_core.config.sections.agent_schema import HISTORIES
from relax_core.registry import find_env

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def agent_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields what is wrong with the keys of `agent` and `endpoint`, without a look at files."""
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
            f"endpoint.port={endpoint.port} with rollout.workers={config.rollout.workers} passes port 65535. Use "
            "endpoint.port=0."
        )
    if config.data.media_keys.columns or config.data.task in MEDIA_TASKS:
        yield f"env={env.name} with images, videos or sounds in the data: the endpoint takes text alone. Use text rows."
    try:
        words = command_words(agent, of_env=env.agent(config.env))
    except ValueError as error:
        yield str(error)
        return
    if not words and agent.workers:
        yield (
            f"agent.workers={agent.workers} without agent.command, so that agents elsewhere play. Give the command, or "
            "use agent.workers=0."
        )
    if words and endpoint.host not in LOOPBACK:
        yield (
            f"endpoint.host={endpoint.host} with agents that Relax starts on this machine. Use 127.0.0.1; another "
            "address is for agents elsewhere, without agent.command."
        )


def agent_file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a command of the agent that is not there."""
    env = find_env(config.env.name)
    if env.agent is None:
        return
    try:
        words = command_words(config.agent, of_env=env.agent(config.env))
    except ValueError:
        return  # `agent_problems` has reported it
    if words and (problem := command_problem(config.agent, words)) is not None:
        yield problem
