"""Episodes played by an agent, a program that gets a task and requests responses of the model from Relax's endpoint."""

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
    summary="your own program plays: it requests responses from the endpoint (agent.command)",
    config=AgentEnvConfig,
    agent=lambda config: [],
)
