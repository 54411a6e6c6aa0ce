"""Defines the messages between `EnvWorker` and the worker process of an isolated environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from relax_core.contracts.env import Action, EpisodeStart, Message
from relax_core.contracts.media import MediaSource


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the first message to a worker: the env's name or path, and the env's settings as msgpack."""

    env: str
    config: bytes


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests a new env of episode ``episode`` and its opening messages."""

    episode: int
    start: EpisodeStart


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests a step of an episode's env with a response of the model."""

    episode: int
    action: Action


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests that the env of an episode is closed, if the env is open."""

    episode: int


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers `Open` with the opening messages."""

    messages: list[Message]


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers `Step` with the fields of `StepResult`; the observation is a list of messages, or None."""

    messages: list[Message] | None
    reward: float | None
    done: bool
    info: dict[str, Any]
    state_key: str | None
    context_edit: list[Message] | None


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers `Close`."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers a request if the env raised an exception.

    ``message`` is the error in one line. ``wrong_result`` is True if the env broke its contract.
    """

    message: str
    wrong_result: bool = False


EnvRequest = Open | Step | Close
EnvAnswer = Opened | Stepped | Closed | Failed


def with_sources(value: Any) -> Any:
    """Converts the mappings of media in a received value to `MediaSource`."""
    if isinstance(value, Mapping):
        if value.keys() == {*MediaSource.__struct_fields__}:
            return msgspec.convert(value, MediaSource)
        return {key: with_sources(inner) for key, inner in value.items()}
    return [with_sources(element) for element in value] if isinstance(value, list) else value
