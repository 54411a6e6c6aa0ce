"""What a reward is: a function of the answer's text and the data row, scored in-process or in a killable worker."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """``response``: text without the stop token or stop string. ``stopped``: False when the response ran into the token
    limit. ``answer``: the data row's reference. ``row``: the whole data row. ``uid``: the episode's, and ``where``: the
    row's file and line; both are empty outside of training.

    Of an env with turns ``response`` and ``stopped`` are the last turn's. ``turns``: the texts of all responses, in
    order. ``turn_rewards``: what the env gave for each, None where it gave none. ``messages``: the whole conversation,
    responses included. ``ended``: why the episode ended (`relax_core.contracts.env.Ended`). All four are empty where
    one response answers a row."""

    response: str
    stopped: bool
    answer: str
    row: Mapping[str, Any]
    uid: str = ""
    where: str = ""
    turns: Sequence[str] = ()
    turn_rewards: Sequence[float | None] = ()
    messages: Sequence[Mapping[str, str]] = ()
    ended: str = ""


@dataclass(frozen=True, kw_only=True)
class RewardOutput:
    """``reward`` None: it could not be computed (the sample is dropped, never trained as 0).
    ``exact``: the answer is fully right; what accuracy counts. ``reason``: why there is no reward, else empty.
    ``answer``: what the reward took for the answer, by which an evaluation counts votes for maj@k; empty where it found
    none, None where the whole response is the answer."""

    reward: float | None
    exact: bool = False
    parts: Mapping[str, float] | None = None
    reason: str = ""
    answer: str | None = None


@dataclass(frozen=True)
class RewardConfig:
    """``timeout_s``: seconds that the scoring of one answer may take. ``max_failed``: the share of answers that may
    have no reward, over the newest data rows; beyond it the run ends."""

    name: str
    timeout_s: float = 5.0
    max_failed: float = 0.5


Scored = RewardOutput | float


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One reward, as exactly one of two functions. ``score`` takes one answer; ``score_group`` takes a list of the
    answers to one data row and returns a list with one entry for each of them. An entry may be a plain number instead
    of a `RewardOutput`; 1 is exact then. Either may be ``async def``: then it is awaited in the rollout's event loop,
    and cancelled after ``config.timeout_s`` seconds an answer. Several calls may be under way at the same time, those
    of plain functions in threads.

    ``isolated``: it runs library code that may hang or crash, so it runs in a worker process that is killed after
    ``config.timeout_s`` seconds an answer. The answers of a call that was cancelled or killed have no reward. Where a
    plain function that is not isolated takes longer than that, the run ends. ``check`` raises ValueError for settings
    that make no sense. ``prepare`` does slow imports; a worker process calls it once at its start, outside of any
    timeout.

    Raises ValueError where both functions or none is given, and for one that is async and isolated."""

    name: str
    summary: str
    config: type[RewardConfig]
    score: Callable[[RewardInput, Any], Scored | Awaitable[Scored]] | None = None
    score_group: Callable[[Sequence[RewardInput], Any], Sequence[Scored] | Awaitable[Sequence[Scored]]] | None = None
    isolated: bool = False
    check: Callable[[Any], None] = lambda config: None
    prepare: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if (self.score is None) == (self.score_group is None):
            has = "neither score nor score_group" if self.score is None else "both score and score_group"
            raise ValueError(f"reward {self.name}: its SPEC has {has}. Give it one of them.")
        if self.isolated and self.is_async:
            raise ValueError(
                f"reward {self.name}: its SPEC has isolated=True and an async function, but a worker process runs one "
                "call at a time. Make it a plain function, or drop isolated=True."
            )

    @property
    def is_async(self) -> bool:
        """Whether its function has to be awaited; it may be an object with an ``async def __call__``."""
        function = inspect.unwrap(self.score or self.score_group)  # type: ignore[arg-type]  # one of them is there
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
