"""Data types of the gateway: orders, engines and decisions as stored and sent to clients, a run's limits, and refusals.

Times are Unix times in seconds.
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
# A removed engine ends; while it still has open samples, its removal can be cancelled.
UNCANCELLABLE: tuple[State, ...] = ("REMOVING", "STOPPING")


def engine_id(number: int) -> str:
    """Returns the id of an engine, which clients use, by its number."""
    return f"engine-{number}"


def engine_number(name: str) -> int:
    """Returns the number of an engine by its id."""
    return int(name.removeprefix("engine-"))


@dataclass(frozen=True, kw_only=True)
class StateAt:
    """Records when an order entered a state."""

    state: State
    at: float


@dataclass(frozen=True, kw_only=True)
class Order:
    """Holds an order.

    ``engine_ids`` are the engines that it adds or removes, and ``failure`` says which of them failed and why.
    ``history`` has all states, oldest first.
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
        """Returns the numbers of its engines."""
        return [engine_number(name) for name in self.engine_ids]

    @property
    def ended(self) -> bool:
        """Returns whether the order is in a final state."""
        return self.status in ENDED


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """Describes an engine that the run has or had.

    ``state`` is joining, serving, leaving, moving (its samples go to other engines), left, or failed, since the time
    ``since``. ``weight_version`` is -1 while it has no weights. ``from_step`` and ``to_step`` are the train steps under
    way when it began to serve and when it left. The running and waiting samples, the tokens per second, and the used
    share of the cache's tokens are null if unknown.
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
        """Returns whether the engine serves or joins."""
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

    ``engines`` is the run's number of engines, and ``target`` the number after the decision. ``wait_share`` is the
    share of the train steps' time in which the trainer waited, ``waiting`` the mean number of samples that waited in
    engines, ``idle_share`` the share of the time in which no engine had a sample, and ``cache_share`` the mean used
    share of the engines' caches. They are null while the window is not full. ``request_id`` is the order that it
    placed.
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
    """Describes the effect of an order: the engines that it would remove, or the number that it would add.

    ``memory_bytes`` and ``cores`` are the peak usage of the added engines; ``free_memory_bytes`` and ``machine_cores``
    are the resources of this machine. ``usable_engines`` is the number of engines that the samples in flight can fill.
    They are null if unknown, or not of this machine. ``warnings`` are reasons against the order.
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

    ``start`` is engine.count and ``most`` is engine.elastic.max_count. ``refusal`` says why this run can neither add
    nor remove engines, ``no_more`` why it starts no engines, and ``no_urls`` why it accepts no external servers; each
    is "" if it can. ``hosts`` is engine.elastic.allowed_hosts.
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

    ``usable`` is the number of engines that the samples in flight can fill. An added engine takes at its peak
    ``engine_bytes`` of memory, with its owner, and ``engine_cores`` cores. ``machine_cores`` is the number of cores of
    this machine, None if the run's engines may be on other machines.
    """

    usable: int
    engine_bytes: int
    engine_cores: int
    machine_cores: int | None


class _PlanFile(msgspec.Struct):
    engine_room: EngineRoom | None = None


def read_room(folder: Path) -> EngineRoom | None:
    """Returns the estimate for further engines in the run's plan; None if it has no estimate, or without a plan."""
    file = folder / PLAN_FILE
    return msgspec.json.decode(file.read_bytes(), type=_PlanFile).engine_room if file.is_file() else None


# -- Refusals ----------------------------------------------------------------------------------------------------------
PROBLEM = "application/problem+json"
TYPE = "urn:relax:problem:"  # the type of a problem is this and its name
STATUS_OF = {
    "malformed": 400,
    "unfit-address": 400,  # an address in engine_urls cannot be used
    "not-in-this-run": 400,  # the run's configuration accepts no such order
    "too-few-engines": 400,
    "too-many-engines": 400,
    "no-token": 401,
    "no-origin": 403,  # an order from a page lacks the Origin header
    "unknown-host": 403,
    "unknown-origin": 403,  # the page of another site sent the request
    "unknown-id": 404,
    "unknown-route": 404,
    "unknown-method": 405,
    "order-under-way": 409,
    "other-body": 409,  # the Idempotency-Key came with another body
    "order-ended": 409,
    "no-autoscaler": 409,  # a run that starts no engines has no autoscaler
    "no-room": 409,  # the run accepts fewer further servers
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

    ``type`` names the problem; docs/elastic.md lists the types. ``key`` and ``value`` are the wrong part of the
    request, ``fix`` is the correction, and ``request_id`` the order that is in the way; each is null if it does not
    apply.
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
    """Ends a request with the problem ``name`` of `STATUS_OF`. ``headers`` are further headers of the answer."""

    def __init__(self, name: str, detail: str, *, headers: dict[str, str] | None = None, **named: str | None) -> None:
        super().__init__(detail)
        self.status = STATUS_OF[name]
        self.headers = headers or {}
        title = HTTPStatus(self.status).phrase
        self.problem = Problem(type=TYPE + name, title=title, status=self.status, detail=detail, **named)
