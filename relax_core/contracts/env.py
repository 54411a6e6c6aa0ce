"""The contract of an environment, which turns a data row into a conversation and answers the model's responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict

from relax_core.contracts.media import MediaSource
from relax_core.contracts.tool_calls import ToolCall, ToolSchema


class TextPart(TypedDict):
    """Holds text in a list of content parts."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """Holds an image in a list of content parts."""

    type: Literal["image"]
    image: MediaSource


class VideoPart(TypedDict):
    """Holds a video in a list of content parts."""

    type: Literal["video"]
    video: MediaSource


class AudioPart(TypedDict):
    """Holds a sound in a list of content parts."""

    type: Literal["audio"]
    audio: MediaSource


ContentPart = TextPart | ImagePart | VideoPart | AudioPart
# A message. "role" is text; "content" is text, or a list of ContentPart. A message with the role "tool" may have the
# "name" and "tool_call_id" of its tool call. A message with the role "assistant" may have "tool_calls".
Message = dict[str, Any]


def media_sources(messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
    """Returns the images, videos and sounds of a conversation, in order."""
    parts = (part for message in messages if not isinstance(message["content"], str) for part in message["content"])
    return [part[part["type"]] for part in parts if part["type"] != "text"]


# The reasons why an episode ends. The first two are for single-turn episodes: the response ended by itself, or at its
# token limit. With the next five a multi-turn episode has a reward: the env returned done; max_turns turns were played;
# rollout.max_new_tokens tokens were sampled; the context is full; a response was cut at max_turn_tokens. The last seven
# mean an episode without a reward: an env call timed out; the env raised an error; the episode timed out; the group
# finished without the episode; the episode's tokens are too old to be trained; the episode was cancelled; a media item
# of the env cannot be used.
Ended = Literal[
    "stop",
    "length",
    "env_done",
    "max_turns",
    "token_budget",
    "context_full",
    "turn_cut",
    "step_timeout",
    "env_failed",
    "episode_timeout",
    "straggler",
    "stale",
    "cancelled",
    "bad_media",
]
# The reasons that mean a token limit.
CUT_ENDS: frozenset[Ended] = frozenset({"length", "token_budget", "context_full", "turn_cut"})
REWARDED_ENDS: frozenset[Ended] = CUT_ENDS | {"stop", "env_done", "max_turns"}
OBSERVATION_TOKENS = 1024  # token limit of an observation if env.max_observation_tokens is not set


@dataclass(frozen=True)
class EnvConfig:
    """Holds the settings that all envs share."""

    name: str


@dataclass(frozen=True)
class TurnsConfig(EnvConfig):
    """Holds the settings of an env with multi-turn episodes.

    ``max_turns`` is the largest number of responses in an episode. ``max_turn_tokens`` is the largest number of sampled
    tokens in a response; if it is None, only rollout.max_new_tokens limits the whole episode. After a failure of its
    env an episode is restarted, up to ``max_retries`` times. ``tools_as`` "template" shows tools and their results
    through the chat template; "text" shows them as plain text, for models with a chat template that omits them.
    """

    max_turns: int = 8
    max_turn_tokens: int | None = None
    max_retries: int = 1
    tools_as: str = "template"


@dataclass(frozen=True)
class InteractionConfig(TurnsConfig):
    """Holds the settings of an env that answers each response.

    ``max_observation_tokens`` limits the tokens in the texts of an observation; None means `OBSERVATION_TOKENS`. Longer
    texts are cut in the middle.

    ``step_timeout_s`` is the time limit in seconds of one env call. ``episode_timeout_s`` is the time limit in seconds
    of an episode, from its first response on; the wait for the first response does not count, because an engine may
    delay it until new weights arrive. An episode that takes longer ends without a reward.

    ``tool_parser`` is the format of tool calls in a response (`relax_core/data/tool_parsers.py`); "auto" detects the
    format in the chat template. ``on_turn_cut`` sets the handling of a response that reaches ``max_turn_tokens``: the
    episode ends ("end"), or the env gets the response ("continue").
    """

    max_observation_tokens: int | None = None
    step_timeout_s: float = 30.0
    episode_timeout_s: float = 600.0
    tool_parser: str = "auto"
    on_turn_cut: str = "end"

    @property
    def observation_tokens(self) -> int:
        """Returns the largest number of tokens in the texts of an observation."""
        return OBSERVATION_TOKENS if self.max_observation_tokens is None else self.max_observation_tokens

    @property
    def max_observed_tokens(self) -> int:
        """Returns the largest number of tokens in all observations of an episode; the last turn has no observation."""
        return (self.max_turns - 1) * self.observation_tokens


@dataclass(frozen=True)
class IsolatedConfig(InteractionConfig):
    """Holds the settings of an env with episodes in worker processes.

    Each rollout worker has ``workers`` such processes. Each process has at most ``episodes_per_worker`` open episodes.
    If a process and its children use more than ``worker_memory_gib`` GiB, the process is killed and replaced, and its
    episodes are restarted.
    """

    workers: int = 1
    episodes_per_worker: int = 32
    worker_memory_gib: ClassVar[float] = 2.0


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Holds the limits of an episode: number of responses, total sampled tokens, and context tokens."""

    turns: int
    sampled_tokens: int
    context_tokens: int


@dataclass(frozen=True, kw_only=True)
class EpisodeStart:
    """Holds the inputs of an episode.

    ``row`` is the data row. ``group_seed`` is the same for all episodes of a group; ``episode_seed`` is unique to the
    episode. Runs with the same seed have the same ``group_seed`` and ``episode_seed``. ``attempt`` is the number of
    earlier starts of the episode that failed because the rollout worker died or the env failed. ``limits`` is None in
    the plug-in trial before a run starts.
    """

    row: Mapping[str, Any]
    group_seed: int
    episode_seed: int
    attempt: int = 0
    limits: EpisodeLimits | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """Holds one response of the model.

    ``text`` is the whole response without its stop token. ``stopped`` is False if the response was cut at a token
    limit. ``tool_calls`` are the response's valid tool calls, in order. ``parse_error`` is a message for the model if
    the response has the markers of a tool call but no call can be parsed, or if all calls name unknown tools; otherwise
    it is empty. ``call_error`` describes the mistakes of the calls that are missing in ``tool_calls``; Relax adds this
    text to the observation, so an env can ignore ``call_error``. ``content`` is the text without thinking and tool
    calls, and ``thinking`` is the text before the tag </think>.
    """

    text: str
    stopped: bool
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""
    call_error: str = ""
    content: str = ""
    thinking: str = ""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Holds the env's answer to an action.

    ``observation`` is the input of `BaseInteractionEnv.format_observation`; Relax ignores it if ``done`` is True.
    ``reward`` is this turn's reward, None for a turn without a reward. ``done``: the episode has ended. ``info`` has
    further JSON values; numbers in it become metrics. ``state_key`` identifies the state before this step, which the
    model saw when it responded; algorithms that compare equal states of a group need it (`EnvSpec.state_keys`).
    ``context_edit`` is a new conversation for the rest of the episode. It replaces all earlier messages and
    ``observation``; its messages must not be empty. Earlier sampled tokens are trained in the old conversation.
    """

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    context_edit: Sequence[Message] | None = None


class BaseInteractionEnv(ABC):
    """Declares the environment of one episode. Each episode has a separate object; calls of one object never overlap.

    Each method may be ``async def``. A plain method runs in a thread, so it may block. If a method raises or takes
    longer than ``config.step_timeout_s``, the env has failed and the episode is restarted with a new object. After
    ``config.max_retries`` restarts the episode ends without a reward. So do not raise for a mistake of the model, such
    as a wrong argument; return an observation that describes the mistake. Relax never repeats a call of `step`, because
    the first call may have had effects. The env's text is encoded without the special tokens of the chat template. A
    message may have a list of content parts with media, each a `MediaSource`; an unusable media item ends the episode
    without a reward. The result of a tool call is a message with the role "tool"; results have the order of the calls.
    """

    @abstractmethod
    def reset(self) -> Any:
        """Returns the first observation, which must be the same for all episodes of a group."""

    @abstractmethod
    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Returns the env's answer to the model's response. Relax calls this method once for each response."""

    def format_observation(self, observation: Any) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Returns the messages that show an observation to the model.

        By default, text becomes one message with the role "user", and a list of messages is returned unchanged.
        """
        if isinstance(observation, str):
            return [{"role": "user", "content": observation}]
        messages: Sequence[Message] = observation
        return messages

    def close(self) -> Any:
        """Frees the episode's resources. Relax calls this method when the episode ends, for any reason."""
        return None


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Describes one environment by exactly one of the three functions ``messages``, ``open`` and ``agent``.

    ``messages(row, config)`` returns the prompt of a single-turn episode as messages for the chat template. The
    response ends the episode. ``open(start, config)`` returns the environment of one multi-turn episode; ``config``
    must then be a subclass of `InteractionConfig`, a dataclass. ``row`` has the keys "prompt" (text or messages) and
    "answer".

    ``agent(config)`` returns the command line of a program that plays a multi-turn episode by itself. The program
    requests the model's responses from Relax's endpoint (docs/agents.md). If the returned list is empty, agent.command
    is the command. ``config`` must then be a subclass of `TurnsConfig`, a dataclass.

    ``tools(row, config)`` returns the tools that the model may call in a multi-turn episode: JSON schemas in the form
    {"type": "function", "function": …}, or typed Python functions, which `tool_schema` converts to schemas.
    ``check(config)`` raises ValueError for invalid settings.

    With ``isolated`` the episodes run in worker processes. A worker process that hangs or dies is replaced. ``config``
    must then be a subclass of `IsolatedConfig`, a dataclass. A worker process makes one env call at a time. Each
    episode has separate global random states of Python and NumPy, even if several episodes run in the worker process.
    They are seeded with ``start.group_seed`` until ``reset`` has returned, and then with ``start.episode_seed``.

    ``state_keys`` means that each result of ``step`` has a ``state_key``; algo.credit=gigpo needs such an env.

    Raises ValueError if not exactly one of the three functions is given; for ``open`` or ``agent`` with a wrong
    ``config`` class; and for tools, ``isolated`` or ``state_keys`` without ``open``.
    """

    name: str
    summary: str
    config: type[EnvConfig]
    messages: Callable[[Mapping[str, Any], Any], list[Message]] | None = None
    open: Callable[[EpisodeStart, Any], BaseInteractionEnv] | None = None
    agent: Callable[[Any], Sequence[str]] | None = None
    tools: Callable[[Mapping[str, Any], Any], Sequence[ToolSchema | Callable[..., Any]]] | None = None
    check: Callable[[Any], None] = lambda config: None
    isolated: bool = False
    state_keys: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "open", "agent") if getattr(self, name) is not None]
        if len(given) != 1:
            has = " and ".join(given) if given else "none of messages, open and agent"
            has = f"both {has}" if len(given) == 2 else has
            raise ValueError(f"env {self.name}: its SPEC has {has}. Give it one of them.")
        if self.open is not None and not issubclass(self.config, InteractionConfig):
            raise ValueError(
                f"env {self.name}: an env with open needs a config that is a subclass of InteractionConfig."
            )
        if self.agent is not None and not issubclass(self.config, TurnsConfig):
            raise ValueError(f"env {self.name}: an env with agent needs a config that is a subclass of TurnsConfig.")
        if self.tools is not None and self.open is None:
            raise ValueError(
                f"env {self.name}: its SPEC has tools, but only an env with open can show tools. Add open."
            )
        if self.state_keys and self.open is None:
            raise ValueError(
                f"env {self.name}: its SPEC has state_keys, but only an env with open gives any. Give it open."
            )
        if self.isolated and (self.open is None or not issubclass(self.config, IsolatedConfig)):
            raise ValueError(
                f"env {self.name}: an isolated env needs open, and a config that is a subclass of IsolatedConfig."
            )

    @property
    def has_turns(self) -> bool:
        """Returns whether episodes may have several turns."""
        return self.open is not None or self.agent is not None
