"""Episodes that an agent plays: a program gets a task, and requests the answers of the model from Relax's endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.env import EnvSpec, TurnsConfig


@dataclass(frozen=True)
class AgentEnvConfig(TurnsConfig):
    """Holds the settings of episodes of agents; agent.command names the program that plays them."""

    name: str = "agent"
    max_turns: int = 64


SPEC = EnvSpec(
    name="agent",
    summary="a program of yours plays: it asks the endpoint for answers (agent.command)",
    config=AgentEnvConfig,
    agent=lambda config: [],
)
