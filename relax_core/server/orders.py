"""Declares which orders a run takes, and orders, engines and decisions as the controller keeps and clients read them.

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
# An engine that is taken out ends; until it has no open samples any more its leaving can be taken back.
UNCANCELLABLE: tuple[State, ...] = ("REMOVING", "STOPPING")


def engine_id(number: int) -> str:
    """Returns the id of an engine, which clients use, by its number."""
    return f"engine-{number}"


def engine_number(name: str) -> int:
    """Returns the number of an engine by its id."""
    return int(name.removeprefix("engine-"))


@dataclass(frozen=True, kw_only=True)
class StateAt:
    """Says when an order came into a state."""

    state: State
    at: float


@dataclass(frozen=True, kw_only=True)
class Order:
    """Is an order.

    ``engine_ids`` are the engines that it brings in or takes out, and ``failure`` says which of them failed and why.
    ``history`` has all states, the oldest first.
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
        """Is True if the order changes no more."""
        return self.status in ENDED


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """Is an engine that the run has or had.

    ``state`` is joining, serving, leaving, moving (its samples go to other engines), left, or failed; ``since`` is when
    it began. ``weight_version`` is -1 while it has no weights. ``from_step`` and ``to_step`` are the train steps under
    way when it began to serve and when it left. Samples that run and wait, tokens a second, and the share of the
    cache's tokens that is taken are null where they are not known.
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
        """Is True for an engine that serves or joins."""
        return self.state in ("joining", "serving")


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """Says where the run stands at the time ``at``."""

    at: float
    step: int
    steps: int
    stopping: bool


@dataclass(frozen=True, kw_only=True)
class ScaleDecision:
    """Is what the autoscaler saw and decided at one time.

    ``engines`` is how many the run had, and ``target`` how many it is to have. ``wait_share`` is the share of the train
    steps' time in which the trainer waited, ``waiting`` the mean number of samples that waited in engines,
    ``idle_share`` the share of the time in which no engine had one, and ``cache_share`` the mean share of the engines'
    caches that was taken. They are null while the window is not full. ``request_id`` is the order that it placed.
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
    """Says what an order would do: which engines would go, or how many would come.

    ``memory_bytes`` and ``cores`` are what those that would come take at their peaks; ``free_memory_bytes`` and
    ``machine_cores`` are what this machine has. ``usable_engines`` is how many engines the samples in flight can fill.
    They are null where they are not known, or not of this machine. ``warnings`` says what speaks against the order.
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


# -- what a run takes --------------------------------------------------------------------------------------------------
class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the configuration says of engines that come and go.

    ``start`` is engine.count and ``most`` is engine.elastic.max_count. ``refusal`` says why this run can neither add
    nor take out engines, ``no_more`` why it starts no engines, and ``no_urls`` why it takes no servers of somebody
    else; each is "" if it can. ``hosts`` is engine.elastic.allowed_hosts.
    """

    start: int
    most: int
    refusal: str = ""
    no_more: str = ""
    no_urls: str = ""
    hosts: list[str] = []


@dataclass(frozen=True, kw_only=True)
class EngineRoom:
    """Is what the plan of a run says of engines that come while it trains.

    ``usable`` is how many engines the samples in flight can fill. An engine that comes takes ``engine_bytes`` of memory
    with its owner at their peaks, and ``engine_cores`` cores. ``machine_cores`` is what this machine has, None if the
    run's engines may be on others.
    """

    usable: int
    engine_bytes: int
    engine_cores: int
    machine_cores: int | None


class _PlanFile(msgspec.Struct):
    engine_room: EngineRoom | None = None


def read_room(folder: Path) -> EngineRoom | None:
    """Returns what the plan of the run in ``folder`` says of further engines, None if it can have none, or no plan."""
    file = folder / PLAN_FILE
    return msgspec.json.decode(file.read_bytes(), type=_PlanFile).engine_room if file.is_file() else None


# -- Refusals ----------------------------------------------------------------------------------------------------------
PROBLEM = "application/problem+json"
TYPE = "urn:relax:problem:"  # the type of a problem is this and its name
STATUS_OF = {
    "malformed": 400,
    "unfit-address": 400,  # one of engine_urls
    "not-in-this-run": 400,  # the run's configuration takes no such order
    "too-few-engines": 400,
    "too-many-engines": 400,
    "no-token": 401,
    "no-origin": 403,  # of an order that a page gives
    "unknown-host": 403,
    "unknown-origin": 403,  # of another site's page
    "unknown-id": 404,
    "unknown-route": 404,
    "unknown-method": 405,
    "order-under-way": 409,
    "other-body": 409,  # of an Idempotency-Key
    "order-ended": 409,
    "no-autoscaler": 409,  # in a run that starts no engines
    "no-room": 409,  # for so many servers more
    "engine-of-the-start": 409,  # it stays
    "too-large": 413,
    "no-json": 415,
    "unreadable": 422,  # a file of a run, which the page cannot show
    "too-many-requests": 429,
    "busy": 503,  # with other questions of the page
    "no-report": 503,  # of what the run waits for
    "run-starts": 503,
    "run-ends": 503,
    "order-unwritten": 503,
    "too-many-connections": 503,
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Is the body of every refusal.

    ``type`` names what is wrong and is one of those in docs/elastic.md. ``key`` and ``value`` name the part of the
    request that is wrong, ``fix`` what to send instead, and ``request_id`` the order that is in the way; each is null
    where it says nothing.
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
