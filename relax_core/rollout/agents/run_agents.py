"""Says which agents play the episodes of a run, and how many at one time."""

from __future__ import annotations

from relax_core.config.rollout_checks import command_words
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import EnvSpec


def agent_words(config: RelaxConfig, env: EnvSpec) -> list[str]:
    """Returns the words of the command that plays the episodes of ``env``; none if agents elsewhere do."""
    assert env.agent is not None
    return command_words(config.agent, of_env=env.agent(config.env))


def agents_at_one_time(config: RelaxConfig) -> int:
    """Returns how many episodes the agents of one rollout worker play at one time, at most."""
    most = episodes_in_flight(config)
    return min(most, config.agent.workers) if config.agent.workers else most


def episodes_in_flight(config: RelaxConfig) -> int:
    """Returns how many episodes of one rollout worker may have begun and not been trained."""
    rollout = config.rollout
    groups = -(-(rollout.prompts_per_step + rollout.spare_prompts) // rollout.workers)
    return config.mode.versions_in_flight * groups * config.algo.group_size
