"""Declares the JSON bodies of the gateway's routes. Types are strict: 0 is no false, and "1" is no 1."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from relax_core.server.order_book import EngineRow, Order, RunRow, State, engine_id

MOST_SECONDS = 86400.0


def _whole(value: object) -> object:
    """Returns a number without a fraction as an integer, as JSON Schema reads it: 2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Replicas = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]
EngineUrl = Annotated[str, Field(min_length=1, max_length=200)]
EngineId = Annotated[str, Field(pattern=r"^engine-[0-9]{1,9}$")]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class ScaleOutTo(_Body):
    """Asks for so many engines in all, those of the start included.

    ``partial`` says what happens to the others if one of the new engines fails.
    """

    num_replicas: Replicas
    model_name: Literal["default"] = "default"
    timeout_secs: Seconds = 600.0
    partial: Literal["rollback_all", "keep_partial"] = "rollback_all"
    dry_run: bool = False


class ScaleOutBy(_Body):
    """Asks servers that somebody else started, named by ``http://HOST:PORT``, to join. Those that are in are left out.

    ``partial`` says what happens to the others if one of them fails.
    """

    engine_urls: Annotated[list[EngineUrl], Field(min_length=1, max_length=64)]
    model_name: Literal["default"] = "default"
    timeout_secs: Seconds = 600.0
    partial: Literal["rollback_all", "keep_partial"] = "rollback_all"
    dry_run: bool = False


class ScaleInTo(_Body):
    """Asks for so few engines in all, those of the start included; the newest ones go.

    With ``force`` samples under way are moved to other engines at once, and otherwise after ``timeout_secs`` seconds,
    by default engine.elastic.drain_timeout_s.
    """

    num_replicas: Replicas
    force: bool = False
    timeout_secs: Seconds | None = None
    dry_run: bool = False


class ScaleInOf(_Body):
    """Asks these engines to go."""

    engine_ids: Annotated[list[EngineId], Field(min_length=1, max_length=64)]
    force: bool = False
    timeout_secs: Seconds | None = None
    dry_run: bool = False


class ScaleInAt(_Body):
    """Asks the servers with these addresses, which joined by them, to go."""

    engine_urls: Annotated[list[EngineUrl], Field(min_length=1, max_length=64)]
    force: bool = False
    timeout_secs: Seconds | None = None
    dry_run: bool = False


TAGS = ("by_number", "by_name", "by_address")  # of the kinds of target, which an error's place then names


def _kind(body: object) -> str:
    """Tells the kinds of target apart by their own key, so that errors are about the right one."""
    keys = body if isinstance(body, dict) else ()
    return TAGS[2] if "engine_urls" in keys else TAGS[1] if "engine_ids" in keys else TAGS[0]


ScaleOut = Annotated[
    Annotated[ScaleOutTo, Tag(TAGS[0])] | Annotated[ScaleOutBy, Tag(TAGS[2])],
    Discriminator(_kind),
]
ScaleIn = Annotated[
    Annotated[ScaleInTo, Tag(TAGS[0])] | Annotated[ScaleInOf, Tag(TAGS[1])] | Annotated[ScaleInAt, Tag(TAGS[2])],
    Discriminator(_kind),
]


class AutoscalerSwitch(_Body):
    """Turns the autoscaler on or off."""

    enabled: bool


class AutoscalerAnswer(BaseModel):
    """Says whether the autoscaler is on."""

    enabled: bool


class DecisionAnswer(BaseModel):
    """Is what the autoscaler saw and decided at one time.

    ``wait_share`` is the share of the train steps' time in which the trainer waited, ``waiting`` the mean number of
    samples that waited in engines, ``idle_share`` the share of the time in which no engine had one, and ``cache_share``
    the mean share of the engines' caches that was taken. They are null while the window is not full. ``request_id`` is
    the order that it placed.
    """

    at: float
    action: Literal["out", "in", "none"]
    reason: str
    engines: int
    target: int
    wait_share: float | None
    waiting: float | None
    idle_share: float | None
    cache_share: float | None
    request_id: str | None


class DecisionList(BaseModel):
    """Is a page of decisions that changed the number of engines, the newest first."""

    decisions: list[DecisionAnswer]
    limit: int
    offset: int


class CancelMany(_Body):
    """Asks for the cancellation of the open orders that add engines, or of those in the state ``status_filter``."""

    status_filter: State | None = None
    dry_run: bool = False


class StateAt(BaseModel):
    """Says when an order came into a state, as a Unix time in seconds."""

    state: State
    at: float


class OrderAnswer(BaseModel):
    """Is an order. ``failure`` says which engine failed and why, "" if none did."""

    request_id: str
    kind: Literal["scale_out", "scale_in", "stop"]
    status: State
    body: dict[str, Any]
    engine_ids: list[str]
    failure: str
    cancel_requested: bool
    history: list[StateAt]


class OrderList(BaseModel):
    """Is a page of orders, the newest first."""

    requests: list[OrderAnswer]
    limit: int
    offset: int


class CancelManyAnswer(BaseModel):
    """Holds the orders whose cancellation was asked for, or with ``dry_run`` would be; their ends follow."""

    dry_run: bool
    requests: list[OrderAnswer]


class DryRun(BaseModel):
    """Says what an order would do: which engines would go, or how many would come.

    ``memory_bytes`` and ``cores`` are what those that would come take at their peaks; ``free_memory_bytes`` and
    ``machine_cores`` are what this machine has. ``usable_engines`` is how many engines the samples in flight can fill.
    They are null where they are not known, or not of this machine. ``warnings`` says what speaks against the order.
    """

    dry_run: Literal[True] = True
    status: Literal["PENDING", "NOOP"]
    engines_now: int
    engines_then: int
    engine_ids: list[str]
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    cores: int | None = None
    machine_cores: int | None = None
    usable_engines: int | None = None
    warnings: list[str] = []


class EngineAnswer(BaseModel):
    """Is an engine that the run has or had.

    ``state`` is joining, serving, leaving, moving (its samples go to other engines), left, or failed. ``since`` is the
    Unix time in seconds from which on it has it. ``weight_version`` is -1 while it has no weights. ``from_step`` and
    ``to_step`` are the train steps under way when it began to serve and when it left. Samples that run and wait,
    tokens a second, and the share of the cache's tokens that is taken are null where they are not known.
    """

    id: str
    kind: str
    url: str
    origin: Literal["start", "added", "external"]
    state: str
    since: float
    weight_version: int
    restarts: int
    last_failure: str
    from_step: int | None
    to_step: int | None
    samples_running: int | None
    samples_waiting: int | None
    tokens_per_s: float | None
    cache_share: float | None


class EngineList(BaseModel):
    """Is the list of the engines in the order of their numbers."""

    engines: list[EngineAnswer]


class RunAnswer(BaseModel):
    """Says where the run stands; ``at`` is the Unix time in seconds of this state."""

    at: float
    step: int
    steps: int
    stopping: bool


class StallAnswer(BaseModel):
    """Says in ``report`` what the run waits for, for whom, and what the workers that others wait for do."""

    report: str


class Health(BaseModel):
    """Says that the gateway answers."""

    status: Literal["ok"] = "ok"


def order_answer(order: Order) -> OrderAnswer:
    """Returns what a client gets of an order."""
    return OrderAnswer(
        request_id=order.id,
        kind=order.kind,
        status=order.state,
        body=order.body,
        engine_ids=[engine_id(number) for number in order.engines],
        failure=order.failure,
        cancel_requested=order.cancel,
        history=[StateAt(state=one.state, at=one.at) for one in order.history],
    )


def engine_answer(row: EngineRow) -> EngineAnswer:
    """Returns what a client gets of an engine."""
    return EngineAnswer(
        id=engine_id(row.number),
        kind=row.kind,
        url=row.url,
        origin=row.origin,
        state=row.state,
        since=row.since,
        weight_version=row.version,
        restarts=row.restarts,
        last_failure=row.failure,
        from_step=row.from_step,
        to_step=row.to_step,
        samples_running=row.running,
        samples_waiting=row.waiting,
        tokens_per_s=row.tokens_per_s,
        cache_share=row.cache_share,
    )


def run_answer(row: RunRow) -> RunAnswer:
    """Returns what a client gets of the run."""
    return RunAnswer(at=row.at, step=row.step, steps=row.steps, stopping=row.stopping)
