"""The contract of a reward: a function of a response and its data row that runs in the rollout or a worker process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from relax_core.contracts.media import MediaItem

if TYPE_CHECKING:
    import numpy as np

    from relax_core.contracts.judge import JudgePlan

AUTO = "auto"  # reward.shadow: the shadow reward in the reward's SPEC
WARN, REFUSE, OFF = "warn", "refuse", "off"  # reward.audit
REPORT, MASK, HALT = "report", "mask", "halt"  # reward.on_hack
EVALUATED = "eval/"  # prefix of the uids of evaluation episodes
_SHOWN = 100  # characters of each side of a comparison


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """Holds the input of a reward for one response.

    ``response`` is the text of the sampled tokens without the stop token. ``stop_string`` is the string of rollout.stop
    that ended the response and is part of it, else empty. ``stopped`` is False if the response was cut at the token
    limit. ``answer`` is the data row's reference answer and ``row`` the whole data row. ``uid`` is the episode's uid
    and ``where`` the data row's file and line, or its number in an evaluation set.

    In a multi-turn env, ``response`` and ``stopped`` are those of the last turn. ``turns`` has the texts of all
    responses, in order. ``turn_rewards`` has the env's reward for each turn, None if it gave none. ``messages`` is the
    whole conversation with the responses. ``ended`` is the reason why the episode ended
    (`relax_core.contracts.env.Ended`). These four are empty in single-turn episodes.

    ``media`` describes the items of the conversation, in order; `frames` and `features` return their tensors. No field
    holds their bytes: the row and the messages have a file name, or the number of bytes of an item without a file.
    ``media_folder`` is the folder of the items' files.
    """

    response: str
    stopped: bool
    answer: str
    row: Mapping[str, Any]
    uid: str = ""
    where: str = ""
    turns: Sequence[str] = ()
    turn_rewards: Sequence[float | None] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    ended: str = ""
    media: Sequence[MediaItem] = ()
    media_folder: str = ""
    stop_string: str = ""

    @property
    def is_trained(self) -> bool:
        """Returns whether the answer belongs to training, not to an evaluation or to a call outside of a run."""
        return bool(self.uid) and not self.uid.startswith(EVALUATED)

    @property
    def before_stop(self) -> str:
        """Returns the response up to the stop string, for rewards that compare a whole response."""
        return self.response.partition(self.stop_string)[0] if self.stop_string else self.response

    def frames(self, number: int) -> np.ndarray:
        """Returns the pixels of ``media[number]`` as the model sees them.

        They are read-only uint8 ``[frames, height, width, 3]``, mapped from the item's file, also in worker processes.
        Raises ValueError if the file is missing or if the item is a sound.
        """
        return self._tensor(number, "frames")

    def features(self, number: int) -> np.ndarray:
        """Returns the audio features of ``media[number]``, read-only float32 ``[mel bins, frames]``.

        Raises ValueError if its file is missing or if the item has no sound.
        """
        return self._tensor(number, "features")

    def _tensor(self, number: int, name: str) -> np.ndarray:
        from pathlib import Path

        from relax_core.contracts.media_file import FolderReader

        item = self.media[number]
        tensors = FolderReader(Path(self.media_folder)).tensors(item)
        if name not in tensors:
            raise ValueError(f"media[{number}] is {item.description}, which has no {name}, only {', '.join(tensors)}.")
        return tensors[name]


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """Holds the result of a reward for one response.

    ``reward`` is None if it could not be computed; the sample is then dropped and never trained as 0. ``exact`` is True
    if the answer is fully correct; it determines accuracy. ``reason`` says why there is no reward, else it is empty.
    ``answer`` is the answer that the reward extracted, for majority votes (maj@k) in evaluations; it is empty if the
    reward found no answer, and None if the whole response is the answer. ``why`` is a short explanation: the compared
    texts, or a judge's output. ``cause`` is one lower-case word, such as ``timeout``; metrics count answers without a
    reward by cause.

    Numbers must be finite and at most 1e15 in absolute value, otherwise there is no reward. ``why``, ``reason``,
    ``answer`` and ``cause`` are cut at `MAX_WHY`, `MAX_REASON`, `MAX_ANSWER` and `MAX_CAUSE` characters. There are
    at most `MAX_PARTS` parts.
    """

    reward: float | None
    exact: bool = False
    parts: Mapping[str, float] | None = None
    reason: str = ""
    answer: str | None = None
    why: str = ""
    cause: str = ""


def with_shadow(output: RewardOutput, shadow: RewardOutput, *, mask: bool) -> RewardOutput:
    """Returns the output with two more parts: whether the shadow reward accepts the answer, and the gap.

    The gap is 1 if only the reward accepts the answer, -1 if only the shadow does, and 0 if they agree. If one of the
    two gives no reward, the output is not changed. With ``mask`` an answer with a gap of 1 has no reward.
    """
    if output.reward is None or shadow.reward is None:
        return output
    if mask and output.exact and not shadow.exact:
        reason = f"reward.shadow rejects the answer ({shadow.why})"
        return RewardOutput(reward=None, reason=reason, why=output.why, cause=UNCONFIRMED)
    gap = float(output.exact) - float(shadow.exact)
    return replace(output, parts={**(output.parts or {}), SHADOW: float(shadow.exact), SHADOW_GAP: gap})


def compared(found: str | None, wanted: str) -> str:
    """Returns text for `RewardOutput.why`: the answer in a response (None for no answer) and the reference answer."""
    return f"{'no answer' if found is None else repr(found[:_SHOWN])} against {wanted[:_SHOWN]!r}"


class RewardUnusable(ValueError):
    """The reward cannot score any answer, because its settings or server are wrong; the run ends with this error."""


@dataclass(frozen=True)
class RewardConfig:
    """Holds the settings that all rewards share.

    ``timeout_s`` is the time limit in seconds to score one answer. ``memory_gib`` is the memory limit in GiB of an
    isolated reward's process while it scores. ``max_failed`` is the largest share of answers without a reward, over the
    newest data rows; above it the run ends.

    With ``sandbox`` "auto" the processes of isolated rewards run in the sandbox if the machine has one; "none" is for
    rewards that need this user's files, variables or network.

    ``by`` is the data column that names a row's reward; a row without a value uses the reward ``name``. ``parts``
    describes other rewards (`reward_parts`): the parts of a reward with ``combine``, or, with ``by``, the settings of
    the rewards that rows name.

    ``audit`` is warn, refuse or off: the reaction if the check before the start finds that the reward accepts wrong
    answers. A family of wrong answers is reported if it is accepted in more than the share ``audit_limit`` of the rows.

    ``shadow`` is the name of an independent, stricter reward that scores the same answers and is never trained, or an
    entry as in ``parts``; "auto" uses the reward's `RewardSpec.shadow`, and None uses no shadow. ``shadow_share`` is
    the share of the groups that it scores. ``on_hack`` is report, mask or halt: the reaction to answers that the reward
    accepts and the shadow rejects.
    """

    name: str
    timeout_s: float = 10.0
    memory_gib: float = 1.0
    sandbox: str = "auto"
    max_failed: float = 0.5
    by: str | None = None
    parts: list[dict[str, Any]] = field(default_factory=list)
    audit: str = WARN
    audit_limit: float = 0.02
    shadow: Any = AUTO
    shadow_share: float = 0.25
    on_hack: str = REPORT


SHADOW, SHADOW_GAP = "shadow", "shadow_gap"  # parts of an answer's reward, see `with_shadow`
UNCONFIRMED = "unconfirmed"  # the cause if an answer has no reward because the shadow rejects it
Scored = RewardOutput | float
MAX_WHY = 300  # characters
MAX_REASON = 2000  # characters
MAX_ANSWER = 10_000  # characters
MAX_CAUSE = 100  # characters; also the limit of a part's name
MAX_PARTS = 256


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """Holds one entry of ``reward.parts``: a reward with settings, weight and condition.

    ``label`` is the part's name in metrics. ``reward`` is the name of a reward and ``settings`` are its settings.
    ``weight`` is its factor in a sum. ``when`` maps columns to allowed values and selects the data rows that the part
    scores; empty means all rows. Without ``optional``, an answer without a reward of this part has no reward at all.
    """

    label: str
    reward: str
    settings: Mapping[str, Any]
    weight: float = 1.0
    when: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    optional: bool = False

    def applies(self, row: Mapping[str, Any]) -> bool:
        """Returns whether the part scores answers to this data row."""
        return all(row.get(column) in values for column, values in self.when.items())


_OF_PART = ("reward", "name", "weight", "when", "optional")  # the keys of an entry that are not its reward's settings


def reward_parts(config: RewardConfig) -> list[RewardPart]:
    """Returns the entries of ``config.parts``, in order.

    Raises ValueError (key, value, fix) for an entry without a reward, a weight that is no finite number, a condition
    that is no mapping, two entries with the same name, and an entry with ``by`` or ``parts``.
    """
    found: list[RewardPart] = []
    for number, entry in enumerate(config.parts):
        part = reward_part(entry, where=f"reward.parts[{number}]")
        if part.label in [earlier_part.label for earlier_part in found]:
            raise ValueError(f"reward.parts[{number}]: {part.label} is there twice. Give it a name: name=…")
        found.append(part)
    return found


def reward_part(entry: Mapping[str, Any], *, where: str) -> RewardPart:
    """Returns one entry. Raises ValueError as `reward_parts` does; ``where`` is the entry's key."""
    reward = entry.get("reward")
    if not isinstance(reward, str) or not reward:
        raise ValueError(f"{where}={dict(entry)}: it names no reward. Write {{reward: NAME, weight: 1.0}}.")
    for key in ("by", "parts"):
        if entry.get(key):
            raise ValueError(f"{where}.{key}={entry[key]}: a part is one reward by itself. Drop {key} from the part.")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ValueError(f"{where}.weight={weight}: a weight is a finite number. Use such as 0.5.")
    when = entry.get("when") or {}
    if not isinstance(when, Mapping):
        raise ValueError(f"{where}.when={when}: write columns with their values, such as when={{kind: math}}.")
    optional = entry.get("optional", False)
    if not isinstance(optional, bool):
        raise ValueError(f"{where}.optional={optional}: use true or false.")
    return RewardPart(
        label=str(entry.get("name") or reward),
        reward=reward,
        settings={key: value for key, value in entry.items() if key not in _OF_PART},
        weight=float(weight),
        when={key: list(value) if isinstance(value, list | tuple) else [value] for key, value in when.items()},
        optional=optional,
    )


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """Describes one reward, with exactly one of three functions: ``score``, ``score_group`` or ``combine``.

    ``score`` takes one answer. ``score_group`` takes a list of the answers to one data row and returns a list with one
    entry for each. ``combine`` runs in the rollout's event loop; it takes an answer and the outputs, by label, of all
    ``config.parts`` that apply to its data row and have a reward. A function may return a plain number instead of a
    `RewardOutput`; the answer is then exact if the number is 1.

    An ``async def`` function is awaited in the rollout's event loop and cancelled after ``config.timeout_s`` seconds
    for each answer. Several calls may run at the same time; plain functions run in threads. ``tasks`` lists the
    generated tasks (``data.task``) to which the reward is limited; empty means any task. ``scores_turns``: it reads the
    env's turn rewards, so a single-turn env is refused.

    ``isolated``: the function calls library code that may hang or crash, so it runs in a worker process that is killed
    after ``config.timeout_s`` seconds for each answer. The answers of a cancelled or killed call have no reward. If a
    plain function that is not isolated takes longer, the run ends. ``check`` raises ValueError for invalid settings.
    ``prepare`` does slow imports; a worker process calls it once at its start, without a timeout.
    ``check_row`` raises ValueError for a data row whose answer or other columns the reward cannot read; it runs before
    the start, so it must be fast. ``right_answers`` returns correct responses for a label in the reward's own format;
    before the start the reward scores them, and a label with a response that is not exact is reported.

    ``needs_sandbox``: the library of an isolated reward executes answers as programs. The run does not start without a
    sandbox, and each call gets its own process, which cannot create programs, files or processes. ``reads`` returns the
    files and folders, in addition to the reward's file, that an isolated reward may read in the sandbox.

    ``shadow`` names the reward that checks this reward during a run (``reward.shadow=auto``), empty for none.

    ``judges`` returns the judges that an async reward calls; its inputs are then of the class
    `relax_core.contracts.judge.JudgedInput`.

    Raises ValueError unless exactly one function is given, and for an isolated async function, for ``judges`` without
    an async function, and for ``needs_sandbox`` without ``isolated``.
    """

    name: str
    summary: str
    config: type[RewardConfig]
    score: Callable[[RewardInput, Any], Scored | Awaitable[Scored]] | None = None
    score_group: Callable[[Sequence[RewardInput], Any], Sequence[Scored] | Awaitable[Sequence[Scored]]] | None = None
    combine: Callable[[RewardInput, Mapping[str, RewardOutput], Any], Scored] | None = None
    isolated: bool = False
    needs_sandbox: bool = False
    reads: Callable[[Any], Sequence[str]] = lambda config: ()
    check: Callable[[Any], None] = lambda config: None
    check_row: Callable[[Mapping[str, Any], Any], None] | None = None
    right_answers: Callable[[str, Any], Sequence[str]] | None = None
    prepare: Callable[[], None] = lambda: None
    tasks: tuple[str, ...] = ()
    scores_turns: bool = False
    judges: Callable[[Any], JudgePlan] | None = None
    shadow: str = ""

    def __post_init__(self) -> None:
        given = [name for name in ("score", "score_group", "combine") if getattr(self, name) is not None]
        if len(given) != 1:
            has = " and ".join(given) if given else "none of score, score_group and combine"
            has = f"both {has}" if len(given) == 2 else has
            raise ValueError(f"reward {self.name}: its SPEC has {has}. Give it one of them.")
        if self.isolated and self.is_async:
            raise ValueError(
                f"reward {self.name}: its SPEC has isolated=True and an async function, but a worker process runs one "
                "call at a time. Make it a plain function, or drop isolated=True."
            )
        if self.needs_sandbox and not self.isolated:
            raise ValueError(
                f"reward {self.name}: its SPEC has needs_sandbox=True without isolated=True, but only a worker process "
                "runs in the sandbox. Set isolated=True."
            )
        if self.judges is not None and not self.is_async:
            raise ValueError(
                f"reward {self.name}: its SPEC has judges and a function that is not async, but a verdict is awaited. "
                "Make it an async function."
            )

    @property
    def is_async(self) -> bool:
        """Returns whether the function must be awaited; it may be an object with an ``async def __call__``."""
        if self.combine is not None:
            return False
        function = inspect.unwrap(self.score or self.score_group)  # type: ignore[arg-type]  # one of them is there
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
