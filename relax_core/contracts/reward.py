"""What a reward is: a function of the answer's text and the data row, scored in-process or in a killable worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RewardInput:
    """``response``: text without the stop token or stop string. ``stopped``: False when the response ran into the token
    limit. ``answer``: the data row's reference. ``row``: the whole data row."""

    response: str
    stopped: bool
    answer: str
    row: Mapping[str, Any]


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
class RewardKnobs:
    """``timeout_s``: seconds that the scoring of one answer may take. ``max_failed``: the share of answers that may
    have no reward, over the newest data rows; beyond it the run ends."""

    name: str
    timeout_s: float = 5.0
    max_failed: float = 0.5


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One reward. ``score`` may return a plain number instead of a `RewardOutput`; 1 is exact then.

    ``isolated``: it runs library code that may hang or crash, so it runs in a worker process that is killed after
    ``knobs.timeout_s`` seconds, and the answer has no reward. Where one that is not isolated takes longer than that,
    the run ends. ``check`` raises ValueError for knobs that make no sense. ``prepare`` does
    slow imports; a worker process calls it once at its start, outside of any timeout."""

    name: str
    summary: str
    knobs: type[RewardKnobs]
    score: Callable[[RewardInput, Any], RewardOutput | float]
    isolated: bool = False
    check: Callable[[Any], None] = lambda knobs: None
    prepare: Callable[[], None] = lambda: None
