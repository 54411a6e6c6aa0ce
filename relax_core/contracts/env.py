"""The contract of an environment: it turns a data row into a conversation and answers the model's responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from relax_core.contracts.media import MediaSource


class TextPart(TypedDict):
    """Is the text in a list of content parts."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """Is an image in a list of content parts."""

    type: Literal["image"]
    image: MediaSource


class VideoPart(TypedDict):
    """Is a video in a list of content parts."""

    type: Literal["video"]
    video: MediaSource


class AudioPart(TypedDict):
    """Is a sound in a list of content parts."""

    type: Literal["audio"]
    audio: MediaSource


ContentPart = TextPart | ImagePart | VideoPart | AudioPart
Message = dict[str, Any]  # "role" is text; "content" is text, or a list of ContentPart


def media_sources(messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
    """Returns the images, videos and sounds of a conversation, in order."""
    parts = (part for message in messages if not isinstance(message["content"], str) for part in message["content"])
    return [part[part["type"]] for part in parts if part["type"] != "text"]


# The reasons why an episode of several turns ends: the env said so; it had max_turns turns; the context has no room for
# another turn; a response was cut at rollout.max_new_tokens; a call of the env took too long; the env raised an error;
# an item of media of the env cannot be used. The last three give no reward.
Ended = Literal["env_done", "max_turns", "context_full", "turn_cut", "step_timeout", "env_failed", "bad_media"]


@dataclass(frozen=True)
class EnvConfig:
    """Holds the settings that every env has."""

    name: str


@dataclass(frozen=True)
class InteractionConfig(EnvConfig):
    """Holds the settings of an env with turns.

    ``max_turns`` is the largest number of responses in an episode. ``step_timeout_s`` is the time in seconds that one
    call of the env may take; an episode whose env takes longer ends without a reward.
    """

    max_turns: int = 8
    step_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class EpisodeStart:
    """Holds the inputs of an episode.

    ``row`` is the data row. ``group_seed`` is the same for all episodes of a group, ``episode_seed`` is the episode's
    own; every run with the same seed has the same ones. ``attempt`` is the number of rollout workers that had the group
    before and died.
    """

    row: Mapping[str, Any]
    group_seed: int
    episode_seed: int
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Action:
    """Is one response of the model.

    ``text`` is without the token or the string that ended it. ``stopped`` is False if it was cut at
    rollout.max_new_tokens.
    """

    text: str
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Is the env's answer to an action.

    ``observation`` is the input of `BaseInteractionEnv.format_observation`; it is not read if ``done``. ``reward`` is
    this turn's, None if the turn has none of its own. ``done``: the episode has ended. ``info`` holds further values
    for logs.
    """

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class BaseInteractionEnv(ABC):
    """Is the environment of one episode. Each episode has an object of its own, and no two of its calls overlap.

    Each method may be ``async def``. A plain method runs in a thread, so it may wait. An error in a method, or a call
    that takes longer than ``config.step_timeout_s``, ends the episode without a reward. Text of the env is encoded
    without the special tokens of the chat template; only the opening messages are a prompt like any other. A message
    may have a list of content parts with media, each a `MediaSource`; an item that cannot be used ends the
    episode as an error of the env does.
    """

    @abstractmethod
    def reset(self) -> Any:
        """Returns the first observation. It must be the same for all episodes of a group."""

    @abstractmethod
    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Returns the env's answer to the model's response. It is called once for each response."""

    def format_observation(self, observation: Any) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Returns the messages that show an observation to the model.

        By default, text becomes one message of the user, and a list of messages stays as it is.
        """
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        messages: Sequence[Message] = observation
        return messages

    def close(self) -> Any:
        """Frees the episode's resources. It is called when the episode is over, for whatever reason."""
        return None


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Is the record of one environment, with exactly one of two functions.

    ``messages(row, config)`` returns the conversation that opens an episode of one turn, for the chat template; the
    response ends the episode. ``open(start, config)`` returns the environment of one episode of several turns;
    ``config`` must then be a dataclass under `InteractionConfig`. ``row`` has "prompt" (text or messages) and "answer".

    Raises ValueError if both functions or none is given, and for ``open`` with another class of settings.
    """

    name: str
    summary: str
    config: type[EnvConfig]
    messages: Callable[[Mapping[str, Any], Any], list[Message]] | None = None
    open: Callable[[EpisodeStart, Any], BaseInteractionEnv] | None = None

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.open is None):
            has = "neither messages nor open" if self.messages is None else "both messages and open"
            raise ValueError(f"env {self.name}: its SPEC has {has}. Give it one of them.")
        if self.open is not None and not issubclass(self.config, InteractionConfig):
            raise ValueError(
                f"env {self.name}: an env with open needs settings that are a dataclass under InteractionConfig."
            )

    @property
    def has_turns(self) -> bool:
        """Is True if episodes may have several turns."""
        return self.open is not None
