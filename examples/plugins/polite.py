"""An env of one turn with a system message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.env import EnvConfig, EnvSpec, Message


@dataclass(frozen=True)
class PoliteConfig(EnvConfig):
    name: str = "polite"
    system: str = "Answer with the result alone."  # the system message


def messages(row: Mapping[str, Any], config: PoliteConfig) -> list[Message]:
    return [{"role": "system", "content": config.system}, {"role": "user", "content": row["prompt"]}]


SPEC = EnvSpec(name="polite", summary="one turn after a system message", config=PoliteConfig, messages=messages)
