"""Derives the command of a run's agents and the numbers of concurrent episodes from the configuration."""

from __future__ import annotations

from relax_core.config.rollout_checks import agent_command_line
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import EnvSpec


def agent_command_of(config: RelaxConfig, env: EnvSpec) -> list[str]:
    """Returns the words of the command that plays the episodes of ``env``; empty if external agents play them."""
    assert env.agent is not None
    return agent_command_line(config.agent, of_env=env.agent(config.env))


def max_concurrent_agents(config: RelaxConfig) -> int:
    """Returns the largest number of episodes that the agents of one rollout worker play at the same time."""
    most = episodes_in_flight(config)
    return min(most, config.agent.workers) if config.agent.workers else most


def episodes_in_flight(config: RelaxConfig) -> int:
    """Returns the largest number of episodes per rollout worker that have begun and are not trained yet."""
    rollout = config.rollout
    groups = -(-(rollout.prompts_per_step + rollout.spare_prompts) // rollout.workers)
    return config.mode.versions_in_flight * groups * config.algo.group_size
