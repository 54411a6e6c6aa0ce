"""The contract of a reward: a function of a response and its data row.

It runs in the rollout or in a worker process.
"""

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

AUTO = "auto"  # a value of reward.shadow: use the shadow reward that the reward's SPEC names
WARN, REFUSE, OFF = "warn", "refuse", "off"  # reward.audit
REPORT, MASK, HALT = "report", "mask", "halt"  # reward.on_hack
EVALUATED = "eval/"  # prefix of the uids of evaluation episodes
_SHOWN = 100  # most characters of each of the two texts in a comparison


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """Holds the input of a reward for one response.

    ``response`` is the text of the sampled tokens without the stop token. ``stop_string`` is the string of rollout.stop
    that ended the response, else empty; the response contains this string. ``stopped`` is False if the response was cut
    at the token limit. ``answer`` is the data row's reference answer and ``row`` the whole data row. ``uid`` is the
    episode's uid. ``where`` is the data row's file and line, or its number in an evaluation set.

    In a multi-turn env, ``response`` and ``stopped`` describe the last turn. ``turns`` has the texts of all responses,
    in order. ``turn_rewards`` has the env's reward for each turn, None for a turn without a reward. ``messages`` is the
    whole conversation, including the responses. ``ended`` is the reason why the episode ended
    (`relax_core.contracts.env.Ended`). The last four fields are empty in single-turn episodes.

    ``media`` describes the media items of the conversation, in order; `frames` and `features` return their tensors. No
    field contains the items' bytes: the row and the messages have an item's file name, or its number of bytes if it has
    no file. ``media_folder`` is the folder of the items' files.
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
        """Returns whether the answer belongs to training, and not to an evaluation or a call outside a run."""
        return bool(self.uid) and not self.uid.startswith(EVALUATED)

    @property
    def before_stop(self) -> str:
        """Returns the response up to the stop string, for rewards that compare a whole response."""
        return self.response.partition(self.stop_string)[0] if self.stop_string else self.response

    def frames(self, number: int) -> np.ndarray:
        """Returns the pixels of ``media[number]`` that the model gets.

        The result is read-only uint8 ``[frames, height, width, 3]``, mapped from the item's file, also in worker
        processes. Raises ValueError if the file is missing or the item is a sound.
        """
        return self._tensor(number, "frames")

    def features(self, number: int) -> np.ndarray:
        """Returns the audio features of ``media[number]``, read-only float32 ``[mel bins, frames]``.

        Raises ValueError if the item's file is missing or the item has no sound.
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

    ``reward`` is None if the reward could not be computed; the sample is then dropped, not trained with reward 0.
    ``exact`` is True if the answer is fully correct; accuracy is the share of exact answers. ``reason`` says why the
    reward is None, else it is empty. ``answer`` is the answer that the reward extracted, for majority votes (maj@k) in
    evaluations. It is empty if the reward found no answer, and None if the whole response is the answer. ``why`` is a
    short explanation: the compared texts, or a judge's output. ``cause`` is one lower-case word, such as ``timeout``; a
    metric for each cause counts the answers without a reward.

    If a number is not finite or above 1e15 in absolute value, the answer has no reward. ``why``, ``reason``, ``answer``
    and ``cause`` are cut at `MAX_WHY`, `MAX_REASON`, `MAX_ANSWER` and `MAX_CAUSE` characters. There are at most
    `MAX_PARTS` parts.
    """

    reward: float | None
    exact: bool = False
    parts: Mapping[str, float] | None = None
    reason: str = ""
    answer: str | None = None
    why: str = ""
    cause: str = ""


def with_shadow(output: RewardOutput, shadow: RewardOutput, *, mask: bool) -> RewardOutput:
    """Returns the output with two more parts: whether the shadow reward accepts the answer, and the gap of the rewards.

    The gap is 1 if only this reward accepts the answer, -1 if only the shadow reward accepts it, and 0 if the two
    agree. If either output has no reward, this output is returned unchanged. With ``mask`` an answer with a gap of 1
    has no reward.
    """
    if output.reward is None or shadow.reward is None:
        return output
    if mask and output.exact and not shadow.exact:
        reason = f"reward.shadow rejects the answer ({shadow.why})"
        return RewardOutput(reward=None, reason=reason, why=output.why, cause=UNCONFIRMED)
    gap = float(output.exact) - float(shadow.exact)
    return replace(output, parts={**(output.parts or {}), SHADOW: float(shadow.exact), SHADOW_GAP: gap})


def compared(found: str | None, wanted: str) -> str:
    """Returns a text for `RewardOutput.why` with the response's answer (None: no answer) and the reference answer."""
    return f"{'no answer' if found is None else repr(found[:_SHOWN])} against {wanted[:_SHOWN]!r}"


class RewardUnusable(ValueError):
    """The reward cannot score answers, because its settings or its server are wrong. The run ends with this error."""


@dataclass(frozen=True)
class RewardConfig:
    """Holds the settings that all rewards share.

    ``timeout_s`` is the time limit in seconds to score one answer. ``memory_gib`` is the memory limit in GiB of an
    isolated reward's process while it scores. ``max_failed``: the run ends if a larger share of the answers to the
    newest data rows has no reward.

    With ``sandbox`` "auto" the processes of isolated rewards run in the sandbox if the machine has a sandbox; "none" is
    for rewards that need this user's files, environment variables or network.

    ``by`` is the data column that names a row's reward; for a row without a value the reward is ``name``. ``parts``
    describes further rewards (`reward_parts`): the parts of a reward with ``combine``; or, with ``by``, the settings of
    the rewards that rows name.

    Before the start Relax checks whether the reward accepts wrong answers of several families. ``audit`` (warn, refuse
    or off) is the reaction. A family of wrong answers is reported if the reward accepts it in more than the share
    ``audit_limit`` of the rows.

    ``shadow`` is the shadow reward: an independent, stricter reward that scores the same answers and is never trained.
    The value is its name or an entry as in ``parts``; "auto" means the reward's `RewardSpec.shadow`, and None means no
    shadow reward. ``shadow_share`` is the share of the groups that the shadow reward scores. ``on_hack`` (report, mask
    or halt) is the reaction to answers that the reward accepts and the shadow reward rejects.
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


SHADOW, SHADOW_GAP = "shadow", "shadow_gap"  # names of the parts that `with_shadow` adds to an answer's reward
UNCONFIRMED = "unconfirmed"  # the cause of an answer that has no reward because the shadow reward rejects the answer
Scored = RewardOutput | float
MAX_WHY = 300  # characters
MAX_REASON = 2000  # characters
MAX_ANSWER = 10_000  # characters
MAX_CAUSE = 100  # characters; also the limit of a part's name
MAX_PARTS = 256


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """Holds one entry of ``reward.parts``: a reward with settings, weight and condition.

    ``label`` is the part's name in metrics. ``reward`` is the name of a reward, and ``settings`` are the settings of
    this reward. ``weight`` is the part's factor in the weighted sum. ``when`` selects the data rows that the part
    scores: it maps columns to allowed values; empty means all rows. If ``optional`` is False and this part has no
    reward, the answer has no reward.
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


_OF_PART = ("reward", "name", "weight", "when", "optional")  # the keys of an entry that are not settings of its reward


def reward_parts(config: RewardConfig) -> list[RewardPart]:
    """Returns the entries of ``config.parts``, in order.

    Raises ValueError (key, value, fix) for an entry without a reward, a weight that is not finite, a condition that is
    no mapping, two entries with the same name, and an entry with ``by`` or ``parts``.
    """
    found: list[RewardPart] = []
    for number, entry in enumerate(config.parts):
        part = reward_part(entry, where=f"reward.parts[{number}]")
        if part.label in [earlier_part.label for earlier_part in found]:
            raise ValueError(f"reward.parts[{number}]: {part.label} occurs twice. Give it a name: name=…")
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
        raise ValueError(f"{where}.weight={weight}: a weight is a finite number, such as 0.5.")
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
    """Describes one reward by exactly one of the three functions ``score``, ``score_group`` and ``combine``.

    ``score`` scores one answer. ``score_group`` scores a list of answers to the same data row and returns a list with
    one entry for each answer. ``combine`` runs in the rollout's event loop. Its arguments are an answer and the outputs
    of parts, by label: the parts of ``config.parts`` that apply to the data row and have a reward. A function may
    return a `RewardOutput` or a plain number; with a plain number, the answer is exact if the number is 1.

    An ``async def`` function is awaited in the rollout's event loop and cancelled after ``config.timeout_s`` seconds
    for each answer. A plain function runs in a thread. Several calls may run at the same time. ``tasks`` lists the
    generated tasks (``data.task``) that the reward can score; empty means any task. ``scores_turns``: the reward reads
    the env's turn rewards, so the run refuses a single-turn env.

    ``isolated``: the function calls library code that may hang or crash, so it runs in a worker process that is killed
    after ``config.timeout_s`` seconds for each answer. The answers of a cancelled or killed call have no reward. If a
    plain function that is not isolated takes longer, the run ends. ``check`` raises ValueError for invalid settings.
    ``prepare`` does slow imports; a worker process calls it once at its start, without a timeout. ``check_row`` raises
    ValueError if the reward cannot read the answer or another column of a data row; it runs before the start, so it
    must be fast. ``right_answers`` returns correct responses for a reference answer, in the format that the reward
    expects. Before the start the reward scores these responses; a reference answer with a response that is not exact is
    reported.

    ``needs_sandbox``: the library of an isolated reward executes answers as programs. The run does not start without a
    sandbox. Each call runs in a new process, which cannot create programs, files or processes. ``reads`` returns files
    and folders that an isolated reward may read in the sandbox, in addition to the reward's file.

    ``shadow`` names the shadow reward of this reward (``reward.shadow=auto``); empty means no shadow reward.

    ``judges`` returns the judges that an async reward calls; the reward's inputs are then of the class
    `relax_core.contracts.judge.JudgedInput`.

    Raises ValueError if not exactly one of the three functions is given, for an isolated async function, for ``judges``
    without an async function, and for ``needs_sandbox`` without ``isolated``.
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
        """Returns whether the reward's function must be awaited, also for an object with an ``async def __call__``."""
        if self.combine is not None:
            return False
        function = inspect.unwrap(self.score or self.score_group)  # type: ignore[arg-type]  # one of the two exists
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
