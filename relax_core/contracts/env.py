"""What an environment is: how a data row becomes messages, and what follows a response."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class EnvKnobs:
    name: str


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """``messages(row, knobs)``: the conversation that opens a sample, for the chat template.

    Single-turn for now: a response ends its sample. ``row`` has "prompt" (text or messages) and "answer".
    """

    name: str
    summary: str
    knobs: type[EnvKnobs]
    messages: Callable[[Mapping[str, Any], Any], list[Message]]
