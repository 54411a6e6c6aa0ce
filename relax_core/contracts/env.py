"""What an environment is: how a data row becomes a conversation, and what follows a response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]

# Why an episode of several turns ended: the env said so; the most turns were played; the context has no room for a
# further turn; a response was cut at rollout.max_new_tokens. The last two carry no reward: the env took too long, or
# raised.
Ended = Literal["env_done", "max_turns", "context_full", "turn_cut", "step_timeout", "env_failed"]


@dataclass(frozen=True)
class EnvConfig:
    name: str


@dataclass(frozen=True)
class InteractionConfig(EnvConfig):
    """The settings of an env with turns. ``max_turns``: responses an episode at most. ``step_timeout_s``: seconds that
    one call of the env may take; an episode whose env takes longer ends without a reward."""

    max_turns: int = 8
    step_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class EpisodeStart:
    """What an episode begins with. ``row``: the data row. ``group_seed`` is the same for all episodes of a group,
    ``episode_seed`` is the episode's own; both are the same in every run with the same seed. ``attempt``: how often the
    group was given to a rollout worker before, since a worker died."""

    row: Mapping[str, Any]
    group_seed: int
    episode_seed: int
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Action:
    """One response of the model. ``text``: without the token or the string that ended it. ``stopped``: False where it
    was cut at rollout.max_new_tokens."""

    text: str
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What follows an action. ``observation``: what `BaseInteractionEnv.format_observation` takes; it is not read where
    ``done``. ``reward``: of this turn, None where the turn has none of its own. ``done``: the episode has ended.
    ``info``: what the env tells beside it."""

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class BaseInteractionEnv(ABC):
    """The environment of one episode; each episode has an object of its own, and no two of its calls overlap.

    Each method may be ``async def``. A plain one runs in a thread, so that it may wait. What a method raises, and a
    call that takes longer than ``config.step_timeout_s``, ends the episode without a reward. Text of the env is encoded
    without the special tokens of the chat template, but for the opening, which is a prompt like any other.
    """

    @abstractmethod
    def reset(self) -> Any:
        """The first observation. It is the same for all episodes of a group."""

    @abstractmethod
    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """What follows the model's response. It is never called again for the same one."""

    def format_observation(self, observation: Any) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """The messages that show an observation to the model. Text becomes one message of the user; a list of messages
        stays as it is."""
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        messages: Sequence[Message] = observation
        return messages

    def close(self) -> Any:
        """The episode is over, however it ended."""
        return None


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """One environment, as exactly one of two functions. ``messages(row, config)``: the conversation that opens an
    episode of one turn, for the chat template; the response ends the episode. ``open(start, config)``: the environment
    of one episode of several turns; ``config`` is a dataclass under `InteractionConfig` then.

    ``row`` has "prompt" (text or messages) and "answer". Raises ValueError where both functions or none is given, and
    for ``open`` with other settings.
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
        return self.open is not None
