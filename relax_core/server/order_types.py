"""Defines the data types of the gateway: orders, engines, autoscaler decisions, limits of a run, and refusals.

Orders, engines and decisions are stored and sent to clients in this form. Times are Unix times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import msgspec

PLAN_FILE = "plan.json"  # in the run's folder
Kind = Literal["scale_out", "scale_in", "stop"]
State = Literal[
    "PENDING",
    "CREATING",
    "CONNECTING",
    "HEALTH_CHECKING",
    "WEIGHT_SYNCING",
    "READY",
    "ACTIVE",
    "DRAINING",
    "REMOVING",
    "STOPPING",
    "COMPLETED",
    "NOOP",
    "FAILED",
    "CANCELLED",
]
ENDED: tuple[State, ...] = ("ACTIVE", "COMPLETED", "NOOP", "FAILED", "CANCELLED")
# A removed engine ends. The removal can be cancelled while the engine still has open samples.
UNCANCELLABLE: tuple[State, ...] = ("REMOVING", "STOPPING")


def engine_id(number: int) -> str:
    """Converts the number of an engine to the id that clients use."""
    return f"engine-{number}"


def engine_number(name: str) -> int:
    """Converts the id of an engine to its number."""
    return int(name.removeprefix("engine-"))


@dataclass(frozen=True, kw_only=True)
class StateAt:
    """Records when an order entered a state."""

    state: State
    at: float


@dataclass(frozen=True, kw_only=True)
class Order:
    """Holds an order.

    ``engine_ids`` are the engines that the order adds or removes. ``failure`` lists failed engines and reasons.
    ``history`` has all states of the order, oldest first.
    """

    request_id: str
    kind: Kind
    status: State
    body: dict[str, Any]
    engine_ids: list[str] = field(default_factory=list)
    failure: str = ""
    cancel_requested: bool = False
    history: list[StateAt] = field(default_factory=list)

    @property
    def engines(self) -> list[int]:
        """Returns the numbers of the order's engines."""
        return [engine_number(name) for name in self.engine_ids]

    @property
    def ended(self) -> bool:
        """Returns whether the order is in a final state."""
        return self.status in ENDED


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """Describes a present or earlier engine of the run.

    ``state`` is joining, serving, leaving, moving (its samples go to other engines), left, or failed. ``since`` is the
    time of the last change of state. ``weight_version`` is -1 before the engine has weights. ``from_step`` is the
    current train step when the engine began to serve, and ``to_step`` the current train step when it left. The running
    and waiting samples, the tokens per second, and the used share of the cache are null if unknown.
    """

    id: str
    origin: Literal["start", "added", "external"]
    state: str
    since: float
    kind: str = ""
    url: str = ""
    weight_version: int = -1
    restarts: int = 0
    last_failure: str = ""
    from_step: int | None = None
    to_step: int | None = None
    samples_running: int | None = None
    samples_waiting: int | None = None
    tokens_per_s: float | None = None
    cache_share: float | None = None

    @property
    def number(self) -> int:
        """Returns its number."""
        return engine_number(self.id)

    @property
    def present(self) -> bool:
        """Returns whether the engine is serving or joining."""
        return self.state in ("joining", "serving")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """Holds the progress of the run at the time ``at``."""

    at: float
    step: int
    steps: int
    stopping: bool


@dataclass(frozen=True, kw_only=True)
class ScaleDecision:
    """Holds one decision of the autoscaler and its inputs.

    ``engines`` is the number of engines, and ``target`` the number after the decision. The inputs are means over a
    window, and null before the window is full. ``wait_share``: share of train step time that the trainer waited.
    ``waiting``: number of samples that waited in engines. ``idle_share``: share of time when no engine had a sample.
    ``cache_share``: used share of the engines' caches. ``request_id`` is the order that the decision placed.
    """

    at: float
    action: Literal["out", "in", "none"]
    reason: str
    engines: int
    target: int
    wait_share: float | None = None
    waiting: float | None = None
    idle_share: float | None = None
    cache_share: float | None = None
    request_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Describes the effect of an order: the engines that it would remove, or the number of engines that it would add.

    ``memory_bytes`` and ``cores`` are the peak usage of the added engines. ``free_memory_bytes`` and ``machine_cores``
    are the resources of this machine. ``usable_engines`` is the number of engines that the samples in flight can fill.
    These values are null if they are unknown or if the engines run on other machines. ``warnings`` are reasons against
    the order.
    """

    status: Literal["PENDING", "NOOP"]
    engines_now: int
    engines_then: int
    engine_ids: list[str]
    dry_run: Literal[True] = True
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    cores: int | None = None
    machine_cores: int | None = None
    usable_engines: int | None = None
    warnings: list[str] = field(default_factory=list)


# -- limits of a run --------------------------------------------------------------------------------------------------
class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the configured limits on adding and removing engines.

    ``start`` is engine.count, ``most`` is engine.elastic.max_count, and ``hosts`` is engine.elastic.allowed_hosts.
    ``refusal`` is the reason why this run cannot add or remove engines. ``no_more`` is the reason why it cannot start
    engines, and ``no_urls`` the reason why it cannot accept external servers. A reason is "" if there is no such limit.
    """

    start: int
    most: int
    refusal: str = ""
    no_more: str = ""
    no_urls: str = ""
    hosts: list[str] = []


@dataclass(frozen=True, kw_only=True)
class EngineRoom:
    """Holds the plan's estimate for engines that are added while the run trains.

    ``usable`` is the number of engines that the samples in flight can fill. ``engine_bytes`` is the peak memory of an
    added engine and its engine owner process. ``engine_cores`` is the peak number of CPU cores. ``machine_cores`` is
    the number of cores of this machine, or None if the run's engines may be on other machines.
    """

    usable: int
    engine_bytes: int
    engine_cores: int
    machine_cores: int | None


class _PlanFile(msgspec.Struct):
    engine_room: EngineRoom | None = None


def read_room(folder: Path) -> EngineRoom | None:
    """Reads the estimate for further engines from the run's plan.

    Returns None if the plan or the estimate is missing.
    """
    file = folder / PLAN_FILE
    return msgspec.json.decode(file.read_bytes(), type=_PlanFile).engine_room if file.is_file() else None


# -- Refusals ----------------------------------------------------------------------------------------------------------
PROBLEM = "application/problem+json"
TYPE = "urn:relax:problem:"  # prefix of a problem's type, before its name
STATUS_OF = {
    "malformed": 400,
    "unfit-address": 400,  # an address in engine_urls cannot be used
    "not-in-this-run": 400,  # the run's configuration excludes such an order
    "too-few-engines": 400,
    "too-many-engines": 400,
    "no-token": 401,
    "no-origin": 403,  # an order from a page lacks the Origin header
    "unknown-host": 403,
    "unknown-origin": 403,  # a page of another site sent the request
    "unknown-id": 404,
    "unknown-route": 404,
    "unknown-method": 405,
    "order-under-way": 409,
    "other-body": 409,  # an earlier order had the same Idempotency-Key and another body
    "order-ended": 409,
    "no-autoscaler": 409,  # a run that starts no engines has no autoscaler
    "no-room": 409,  # the run accepts fewer further external servers
    "engine-of-the-start": 409,  # an engine that the run started with cannot be removed
    "too-large": 413,
    "no-json": 415,
    "unreadable": 422,  # a file of the run cannot be read
    "too-many-requests": 429,
    "busy": 503,  # other requests of the page are still being answered
    "no-report": 503,  # no stall report is available
    "run-starts": 503,
    "run-ends": 503,
    "order-unwritten": 503,
    "too-many-connections": 503,
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Holds the body of every refusal.

    ``type`` names the problem. docs/elastic.md lists the types. ``key`` and ``value`` are the wrong part of the
    request, ``fix`` is the correction, and ``request_id`` is the order that blocks the request. Each is null if it does
    not apply.
    """

    type: str
    title: str
    status: int
    detail: str
    key: str | None = None
    value: str | None = None
    fix: str | None = None
    request_id: str | None = None


class Refusal(Exception):
    """Ends a request with the problem ``name``, a key of `STATUS_OF`. ``headers`` are further response headers."""

    def __init__(self, name: str, detail: str, *, headers: dict[str, str] | None = None, **named: str | None) -> None:
        super().__init__(detail)
        self.status = STATUS_OF[name]
        self.headers = headers or {}
        title = HTTPStatus(self.status).phrase
        self.problem = Problem(type=TYPE + name, title=title, status=self.status, detail=detail, **named)
