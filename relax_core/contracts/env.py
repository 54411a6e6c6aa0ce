"""The contract of an environment: it turns a data row into a conversation and answers the model's responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict

from relax_core.contracts.media import MediaSource
from relax_core.contracts.tool_calls import ToolCall, ToolSchema


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
# "role" is text; "content" is text, or a list of ContentPart. A message with the role "tool" may have "name" and
# "tool_call_id" of the call whose result it is; one with the role "assistant" may have "tool_calls".
Message = dict[str, Any]


def media_sources(messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
    """Returns the images, videos and sounds of a conversation, in order."""
    parts = (part for message in messages if not isinstance(message["content"], str) for part in message["content"])
    return [part[part["type"]] for part in parts if part["type"] != "text"]


# The reasons why an episode ends. An episode of one turn ends with its response: by itself, or at its limit of tokens.
# The next five are ends of the game: the env said so; it had max_turns turns; rollout.max_new_tokens tokens were
# sampled; the context has no room left; a response was cut at max_turn_tokens. The others give no reward: a call of the
# env took too long; the env raised an error; the episode took too long; the group went on without it; its tokens are
# too old to be trained; it was given up; an item of media of the env cannot be used.
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
# A limit of tokens was reached.
CUT_ENDS: frozenset[Ended] = frozenset({"length", "token_budget", "context_full", "turn_cut"})
REWARDED_ENDS: frozenset[Ended] = CUT_ENDS | {"stop", "env_done", "max_turns"}
OBSERVATION_TOKENS = 1024  # of an observation, where env.max_observation_tokens is not set


@dataclass(frozen=True)
class EnvConfig:
    """Holds the settings that every env has."""

    name: str


@dataclass(frozen=True)
class TurnsConfig(EnvConfig):
    """Holds the settings of an env whose episodes have several turns.

    ``max_turns`` is the largest number of responses in an episode, and ``max_turn_tokens`` that of sampled tokens in a
    response; None leaves that to rollout.max_new_tokens, the limit of an episode. An episode whose env failed starts
    again ``max_retries`` times. ``tools_as`` "text" shows tools and their results as plain text, for models whose
    template leaves them out; the other value is "template".
    """

    max_turns: int = 8
    max_turn_tokens: int | None = None
    max_retries: int = 1
    tools_as: str = "template"


@dataclass(frozen=True)
class InteractionConfig(TurnsConfig):
    """Holds the settings of an env that answers each response.

    The texts of an observation have at most ``max_observation_tokens`` tokens, `OBSERVATION_TOKENS` if that is None;
    longer ones are cut in the middle.

    ``step_timeout_s`` is the time in seconds that one call of the env may take, and ``episode_timeout_s`` that of an
    episode from its first response on, because an engine may hold its first prompt until its weights are there. An
    episode that takes longer ends without a reward.

    ``tool_parser`` names the form of tool calls in a response (`relax_core/data/tool_parsers.py`);
    "auto" finds it in the chat template. ``on_turn_cut`` says whether a response that is cut at ``max_turn_tokens``
    ends the episode ("end") or goes to the env ("continue").
    """

    max_observation_tokens: int | None = None
    step_timeout_s: float = 30.0
    episode_timeout_s: float = 600.0
    tool_parser: str = "auto"
    on_turn_cut: str = "end"

    @property
    def observation_tokens(self) -> int:
        """Returns the most tokens that the texts of an observation have."""
        return OBSERVATION_TOKENS if self.max_observation_tokens is None else self.max_observation_tokens

    @property
    def most_observed_tokens(self) -> int:
        """Returns the most tokens that all observations of an episode have; none follows its last turn."""
        return (self.max_turns - 1) * self.observation_tokens


@dataclass(frozen=True)
class IsolatedConfig(InteractionConfig):
    """Holds the settings of an env whose episodes run in worker processes.

    Each rollout worker has ``workers`` such processes, each with at most ``episodes_per_worker`` open episodes. A
    process that uses more than ``worker_memory_gib`` GiB with its children is killed and replaced; its episodes start
    again.
    """

    workers: int = 1
    episodes_per_worker: int = 32
    worker_memory_gib: ClassVar[float] = 2.0


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Holds the limits of an episode: responses, sampled tokens in all, and tokens of the context."""

    turns: int
    sampled_tokens: int
    context_tokens: int


@dataclass(frozen=True, kw_only=True)
class EpisodeStart:
    """Holds the inputs of an episode.

    ``row`` is the data row. ``group_seed`` is the same for all episodes of a group, ``episode_seed`` is the episode's
    own; every run with the same seed has the same ones. ``attempt`` is the number of times that the episode began
    before: its rollout worker died, or its env failed. ``limits`` is None in the trial before a start.
    """

    row: Mapping[str, Any]
    group_seed: int
    episode_seed: int
    attempt: int = 0
    limits: EpisodeLimits | None = None


@dataclass(frozen=True, kw_only=True)
class Action:
    """Is one response of the model.

    ``text`` is the whole response without its stop token. ``stopped`` is False if it was cut at a limit of tokens.
    ``tool_calls`` are the calls in it, in order. ``parse_error`` says what is wrong if the response has the marks of a
    tool call but none can be read from it, or if all calls name tools that the env does not have; it is empty
    otherwise, and meant to be shown to the model. ``call_error`` says what is wrong with the calls beside those in
    ``tool_calls``; the player adds it to the observation, so an env can leave it out. ``content`` is the text without
    thinking and tool calls, and ``thinking`` what stands in front of the tag </think>.
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
    """Is the env's answer to an action.

    ``observation`` is the input of `BaseInteractionEnv.format_observation`; it is not read if ``done``. ``reward`` is
    this turn's, None if the turn has none of its own. ``done``: the episode has ended. ``info`` holds further values
    that JSON can hold; its numbers become metrics. ``state_key`` names the state in which the response was given, that
    is the state before this step, for algorithms that compare equal states of a group (`EnvSpec.state_keys`).
    ``context_edit`` is the conversation from which the episode goes on, in place of everything so far and of
    ``observation``; its messages must not be empty. What was sampled before is trained in the old conversation.
    """

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    state_key: str | None = None
    context_edit: Sequence[Message] | None = None


class BaseInteractionEnv(ABC):
    """Is the environment of one episode. Each episode has an object of its own, and no two of its calls overlap.

    Each method may be ``async def``. A plain method runs in a thread, so it may wait. An error in a method, or a call
    that takes longer than ``config.step_timeout_s``, is for what should not happen: the episode starts again with a new
    object, and ends without a reward after ``config.max_retries`` new starts. A mistake of the model, such as a wrong
    argument, is an observation. No call of `step` is repeated, because it may have acted. Text of the env is encoded
    without the special tokens of the chat template. A message may have a list of content parts with media, each a
    `MediaSource`; an item that cannot be used ends the episode without a reward. The result of a tool call is a message
    with the role "tool", in the order of the calls.
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
    """Is the record of one environment, with exactly one of three functions: ``messages``, ``open`` or ``agent``.

    ``messages(row, config)`` returns the conversation that opens an episode of one turn, for the chat template; the
    response ends the episode. ``open(start, config)`` returns the environment of one episode of several turns;
    ``config`` must then be a dataclass under `InteractionConfig`. ``row`` has "prompt" (text or messages) and "answer".

    ``agent(config)`` returns the words of the command of a program that plays an episode of several turns by itself: it
    asks Relax's endpoint for the answers of the model (docs/agents.md). Without words, agent.command is that command.
    ``config`` must then be a dataclass under `TurnsConfig`.

    ``tools(row, config)`` returns the tools that the model may call in an episode of several turns: JSON schemas in the
    form {"type": "function", "function": …}, or typed Python functions, of which `tool_schema` makes schemas.
    ``check(config)`` raises ValueError for settings that make no sense.

    With ``isolated`` the episodes run in worker processes, which are killed and replaced if they hang or die;
    ``config`` must then be a dataclass under `IsolatedConfig`. A worker makes one call at a time. Python's and NumPy's
    global random states belong to the episode: they come from ``start.group_seed`` until ``reset`` has returned, and
    from ``start.episode_seed`` after it, whatever else runs in the worker.

    ``state_keys`` says that each result of ``step`` has a ``state_key``; algo.credit=gigpo needs it.

    Raises ValueError if not exactly one function is given, for ``open`` or ``agent`` with another class of settings,
    and for tools, ``isolated`` or ``state_keys`` without ``open``.
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
        """Is True if episodes may have several turns."""
        return self.open is not None or self.agent is not None
