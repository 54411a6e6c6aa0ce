"""Defines the environment of one prompt and one response."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.env import EnvConfig, EnvSpec, Message


@dataclass(frozen=True)
class SingleTurnConfig(EnvConfig):
    """Defines the settings of the env, which has no settings except its name."""

    name: str = "single_turn"


def messages(row: Mapping[str, Any], config: SingleTurnConfig) -> list[Message]:
    """Returns a text prompt as one user message; a list of messages is returned unchanged."""
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


SPEC = EnvSpec(
    name="single_turn",
    summary="one prompt, one response",
    config=SingleTurnConfig,
    messages=messages,
)
