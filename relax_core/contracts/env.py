"""The contract of an environment: it turns a data row into a conversation and answers the model's responses."""

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
# "role" is text; "content" is text, or a list of ContentPart. A message with the role "tool" may have the "name" and
# "tool_call_id" of its call; a message with the role "assistant" may have "tool_calls".
Message = dict[str, Any]


def media_sources(messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
    """Returns the images, videos and sounds of a conversation, in order."""
    parts = (part for message in messages if not isinstance(message["content"], str) for part in message["content"])
    return [part[part["type"]] for part in parts if part["type"] != "text"]


# The reasons why an episode ends. A single-turn episode ends with its response: by itself, or at its token limit.
# The next five end a multi-turn episode with a reward: the env returned done; max_turns turns were played;
# rollout.max_new_tokens tokens were sampled; the context is full; a response was cut at max_turn_tokens. The others
# give no reward: an env call timed out; the env raised an error; the episode timed out; the group finished without it;
# its tokens are too old to be trained; it was cancelled; a media item of the env cannot be used.
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
# Ends at a token limit.
CUT_ENDS: frozenset[Ended] = frozenset({"length", "token_budget", "context_full", "turn_cut"})
REWARDED_ENDS: frozenset[Ended] = CUT_ENDS | {"stop", "env_done", "max_turns"}
OBSERVATION_TOKENS = 1024  # token limit of an observation if env.max_observation_tokens is not set


@dataclass(frozen=True)
class EnvConfig:
    """Holds the settings that all envs share."""

    name: str


@dataclass(frozen=True)
class TurnsConfig(EnvConfig):
    """Holds the settings of an env whose episodes have several turns.

    ``max_turns`` is the largest number of responses in an episode, and ``max_turn_tokens`` the largest number of
    sampled tokens in a response; with None only rollout.max_new_tokens, the limit of an episode, applies. An episode
    whose env failed is restarted up to ``max_retries`` times. ``tools_as`` "text" shows tools and their results as
    plain text, for models whose chat template omits them; the other value is "template".
    """

    max_turns: int = 8
    max_turn_tokens: int | None = None
    max_retries: int = 1
    tools_as: str = "template"


@dataclass(frozen=True)
class InteractionConfig(TurnsConfig):
    """Holds the settings of an env that answers each response.

    The texts of an observation have at most ``max_observation_tokens`` tokens, `OBSERVATION_TOKENS` if that is None;
    longer texts are cut in the middle.

    ``step_timeout_s`` is the time limit in seconds of one env call. ``episode_timeout_s`` is the time limit of an
    episode, counted from its first response, because an engine may hold the first prompt until new weights arrive. An
    episode that takes longer ends without a reward.

    ``tool_parser`` is the format of tool calls in a response (`relax_core/data/tool_parsers.py`); "auto" detects it in
    the chat template. ``on_turn_cut`` says whether a response that is cut at ``max_turn_tokens`` ends the episode
    ("end") or is passed to the env ("continue").
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
        """Returns the largest number of tokens in all observations of an episode; none follows the last turn."""
        return (self.max_turns - 1) * self.observation_tokens


@dataclass(frozen=True)
class IsolatedConfig(InteractionConfig):
    """Holds the settings of an env whose episodes run in worker processes.

    Each rollout worker has ``workers`` such processes, each with at most ``episodes_per_worker`` open episodes. A
    process that uses more than ``worker_memory_gib`` GiB with its children is killed and replaced; its episodes are
    restarted.
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

    ``row`` is the data row. ``group_seed`` is the same for all episodes of a group, ``episode_seed`` is unique to the
    episode; runs with the same seed have the same values. ``attempt`` counts earlier starts of the episode, after which
    its rollout worker died or its env failed. ``limits`` is None in the plug-in trial before a run starts.
    """

    row: Mapping[str, Any]
    group_seed: int
    episode_seed: int
    attempt: int = 0
    limits: EpisodeLimits | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """Holds one response of the model.

    ``text`` is the whole response without its stop token. ``stopped`` is False if it was cut at a token limit.
    ``tool_calls`` are its valid calls, in order. ``parse_error`` describes the mistake if the response has the markers
    of a tool call but no call can be parsed, or if all calls name unknown tools; it is empty otherwise, and meant to be
    shown to the model. ``call_error`` describes the mistakes of the calls that are not in ``tool_calls``; the player
    adds it to the observation, so an env can ignore it. ``content`` is the text without thinking and tool calls, and
    ``thinking`` is the text before the tag </think>.
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

    ``observation`` is the input of `BaseInteractionEnv.format_observation`; it is not read if ``done``. ``reward`` is
    this turn's reward, None if the turn has none. ``done``: the episode has ended. ``info`` holds further JSON values;
    its numbers become metrics. ``state_key`` identifies the state before this step, in which the model responded, for
    algorithms that compare equal states of a group (`EnvSpec.state_keys`). ``context_edit`` is a new conversation for
    the rest of the episode, which replaces all earlier messages and ``observation``; its messages must not be empty.
    Tokens that were sampled before are trained in the old conversation.
    """

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    context_edit: Sequence[Message] | None = None


class BaseInteractionEnv(ABC):
    """Declares the environment of one episode. Each episode has its own object, whose calls never overlap.

    Each method may be ``async def``. A plain method runs in a thread, so it may block. If a method raises or takes
    longer than ``config.step_timeout_s``, the env has failed: the episode is restarted with a new object, and ends
    without a reward after ``config.max_retries`` restarts. Report a mistake of the model, such as a wrong argument, as
    an observation instead. A call of `step` is never repeated, because it may have had effects. The env's text is
    encoded without the special tokens of the chat template. A message may have a list of content parts with media, each
    a `MediaSource`; an unusable item ends the episode without a reward. The result of a tool call is a message with the
    role "tool", in the order of the calls.
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
        """Frees the episode's resources. It is called when the episode ends, for any reason."""
        return None


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Describes one environment, with exactly one of three functions: ``messages``, ``open`` or ``agent``.

    ``messages(row, config)`` returns the prompt of a single-turn episode as messages for the chat template; the
    response ends the episode. ``open(start, config)`` returns the environment of one multi-turn episode; ``config``
    must then be a dataclass under `InteractionConfig`. ``row`` has "prompt" (text or messages) and "answer".

    ``agent(config)`` returns the command of a program that plays a multi-turn episode by itself: it requests the
    model's answers from Relax's endpoint (docs/agents.md). If the list is empty, agent.command is the command.
    ``config`` must then be a dataclass under `TurnsConfig`.

    ``tools(row, config)`` returns the tools that the model may call in a multi-turn episode: JSON schemas in the form
    {"type": "function", "function": …}, or typed Python functions, which `tool_schema` converts to schemas.
    ``check(config)`` raises ValueError for invalid settings.

    With ``isolated`` the episodes run in worker processes, which are killed and replaced if they hang or die;
    ``config`` must then be a dataclass under `IsolatedConfig`. A worker makes one call at a time. Python's and NumPy's
    global random states belong to the episode, even if other episodes run in the worker: they are seeded with
    ``start.group_seed`` until ``reset`` has returned, and with ``start.episode_seed`` after it.

    ``state_keys`` means that each result of ``step`` has a ``state_key``; algo.credit=gigpo needs it.

    Raises ValueError unless exactly one function is given, for ``open`` or ``agent`` with a wrong ``config`` class, and
    for tools, ``isolated`` or ``state_keys`` without ``open``.
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
                f"env {self.name}: an env with open needs settings that are a dataclass under InteractionConfig."
            )
        if self.agent is not None and not issubclass(self.config, TurnsConfig):
            raise ValueError(
                f"env {self.name}: an env with agent needs settings that are a dataclass under TurnsConfig."
            )
        if self.tools is not None and self.open is None:
            raise ValueError(f"env {self.name}: its SPEC has tools, but only an env with open shows any. Give it open.")
        if self.state_keys and self.open is None:
            raise ValueError(
                f"env {self.name}: its SPEC has state_keys, but only an env with open gives any. Give it open."
            )
        if self.isolated and (self.open is None or not issubclass(self.config, IsolatedConfig)):
            raise ValueError(
                f"env {self.name}: an isolated env needs open, and settings that are a dataclass under IsolatedConfig."
            )

    @property
    def has_turns(self) -> bool:
        """Returns whether episodes may have several turns."""
        return self.open is not None or self.agent is not None
