"""Episodes that a program plays by itself: it gets a task, and asks Relax's endpoint for the answers of the model."""

from __future__ import annotations

from dataclasses import dataclass

from relax_core.contracts.env import EnvSpec, TurnsConfig


@dataclass(frozen=True)
class AgentEnvConfig(TurnsConfig):
    """Holds the settings of episodes of agents; agent.command and the like say which program plays them."""

    name: str = "agent"
    max_turns: int = 64


SPEC = EnvSpec(
    name="agent",
    summary="a program of yours plays: it asks the endpoint for answers (agent.command)",
    config=AgentEnvConfig,
    agent=lambda config: [],
)
