"""Plays episodes with an agent: a program that gets a task and requests the model's responses from an endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.env import EnvSpec, TurnsConfig


@dataclass(frozen=True)
class AgentEnvConfig(TurnsConfig):
    """Holds the settings of episodes of agents; agent.command names the agent's program."""

    name: str = "agent"
    max_turns: int = 64


SPEC = EnvSpec(
    name="agent",
    summary="your own program plays: it requests responses from the endpoint (agent.command)",
    config=AgentEnvConfig,
    agent=lambda config: [],
)
