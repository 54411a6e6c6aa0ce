"""Declares the HTTP routes of a run's gateway: run, engines, orders that scale engines, and autoscaler.

Each route checks the request and forwards it to `relax_core.server.engine_order_service` in the run's controller.
Bodies are typed strictly: 0 is not false, and "1" is not 1. Engine addresses are checked before the run connects to
them.
"""

from __future__ import annotations

import asyncio
import ipaddress
import pathlib
import re
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from fastapi import Body, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter
from starlette.routing import BaseRoute

from relax_core.observe.stall_requests import POLL_S, TIMEOUT_S, StallRequest
from relax_core.server import engine_order_service
from relax_core.server.engine_order_store import RETRY_S
from relax_core.server.order_types import (
    PROBLEM,
    DryRun,
    EngineRow,
    Limits,
    Order,
    Problem,
    Refusal,
    RunRow,
    ScaleDecision,
    State,
)
from relax_core.server.page_routes import REFUSALS
from relax_core.server.request_guard import OPEN, refusal_answer

# -- Bodies -----------------------------------------------------------------------------------------------------------
MAX_SECONDS = 86400.0
RESOLVE_S = 5.0  # time limit for resolving a host name
_KEY = "engine_urls"


def _whole(value: object) -> object:
    """Returns a number without a fraction as an integer, as in JSON Schema: 2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Replicas = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
EngineUrls = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=64)]
EngineIds = Annotated[list[Annotated[str, Field(pattern=r"^engine-[0-9]{1,9}$")]], Field(min_length=1, max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dry_run: bool = False


class _Out(_Body):
    """Adds engines. ``partial`` says whether the remaining new engines stay if one new engine fails."""

    model_name: Literal["default"] = "default"
    timeout_secs: Seconds = 600.0
    partial: Literal["rollback_all", "keep_partial"] = "rollback_all"


class _In(_Body):
    """Removes engines.

    With ``force``, open samples of the removed engines move to other engines at once, otherwise after ``timeout_secs``
    seconds (default 30).
    """

    force: bool = False
    timeout_secs: Seconds | None = None


class ScaleOutTo(_Out):
    """Requests a total number of engines, including the engines that the run started with."""

    num_replicas: Replicas


class ScaleOutBy(_Out):
    """Requests that external servers ``http://HOST:PORT`` join. Ignores servers that have already joined."""

    engine_urls: EngineUrls


class ScaleInTo(_In):
    """Requests a smaller total number of engines, including the engines of the start.

    The newest engines are removed.
    """

    num_replicas: Replicas


class ScaleInOf(_In):
    """Requests the removal of these engines."""

    engine_ids: EngineIds


class ScaleInAt(_In):
    """Requests the removal of the external servers with these addresses."""

    engine_urls: EngineUrls


TAGS = ("by_number", "by_name", "by_address")  # names of the body classes in the location of a validation error


def _kind(body: object) -> str:
    """Returns the tag of the class that fits the body. Validation errors then refer to this class."""
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


class CancelMany(_Body):
    """Requests the cancellation of open orders that add engines. ``status_filter`` restricts it to one state."""

    status_filter: State | None = None


class AutoscalerSwitch(BaseModel):
    """Turns the autoscaler on or off."""

    model_config = ConfigDict(strict=True, extra="forbid")
    enabled: bool


# -- addresses ---------------------------------------------------------------------------------------------------------
async def engine_address(url: str, *, allowed_hosts: Collection[str]) -> str:
    """Resolves the host of an engine's address. Returns ``http://ADDRESS:PORT`` with the IPv4 address.

    The run uses only the returned address, so a later change in DNS has no effect. Raises `Refusal` for a malformed
    address, for a host that is not in ``allowed_hosts``, and for impossible addresses such as multicast.
    """
    host, port = _host_and_port(url)
    address = await _resolved(url, host)
    if address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
        raise _refusal(url, f"{address} is not an address of an engine")
    if not {host, str(address)} & {name.lower() for name in allowed_hosts}:
        raise _refusal(url, f"engine.elastic.allowed_hosts does not name {host}", fix="name the host there")
    return f"http://{address}:{port}"


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise _refusal(url, "it is not an address of a server") from error
    plain = parts.scheme == "http" and parts.path in ("", "/") and not parts.query and not parts.fragment
    if not plain or not host or not port or parts.username is not None or parts.password is not None:
        raise _refusal(url, "it is not an address of a server")
    return host, port


async def _resolved(url: str, host: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(host)
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a TimeoutError, too
        raise _refusal(url, f"{host} has no IPv4 address") from error
    return ipaddress.IPv4Address(found[0][4][0])


def _refusal(url: str, why: str, *, fix: str = "send http://HOST:PORT") -> Refusal:
    return Refusal("unfit-address", why, key=_KEY, value=url[:200], fix=fix)


# -- Routes -----------------------------------------------------------------------------------------------------------
ANSWER_S = 5.0  # timeout for the controller's answer; a call takes milliseconds
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]
OrderId = Annotated[str, Path(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]
PLACES = ("body", "query", "path", "header", *TAGS)  # parts of an error's location that are not keys of the request
WAYS: tuple[Literal["scale_out", "scale_in"], ...] = ("scale_out", "scale_in")


@dataclass(frozen=True, kw_only=True)
class Health:
    """Says that the gateway is alive."""

    status: Literal["ok"] = "ok"


@dataclass(frozen=True, kw_only=True)
class StallAnswer:
    """Holds the stall report. It shows which worker waits for which process, and the state of blocking workers."""

    report: str


@dataclass(frozen=True, kw_only=True)
class EngineList:
    """Lists the engines in the order of their numbers."""

    engines: list[EngineRow]


@dataclass(frozen=True, kw_only=True)
class OrderList:
    """Holds one page of orders, newest first."""

    requests: list[Order]
    limit: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class CancelManyAnswer:
    """Holds the orders that will be cancelled, or that would be cancelled without ``dry_run``.

    The orders end after this response.
    """

    dry_run: bool
    requests: list[Order]


@dataclass(frozen=True, kw_only=True)
class AutoscalerAnswer:
    """Says whether the autoscaler is on."""

    enabled: bool


@dataclass(frozen=True, kw_only=True)
class DecisionList:
    """Holds one page of the decisions that changed the number of engines, newest first."""

    decisions: list[ScaleDecision]
    limit: int
    offset: int


class _Answer(msgspec.Struct):
    body: msgspec.Raw
    status: int
    headers: dict[str, str]


_answer = msgspec.json.Decoder(_Answer)


class Controller:
    """Sends calls to the run's controller over the socket ``end``.

    Stall reports are requested by files in ``folder``.
    """

    def __init__(self, end: socket.socket, folder: pathlib.Path) -> None:
        self._end, self._folder = end, folder

    async def __call__(self, call: str, **given: Any) -> Response:
        """Returns the answer to a call of `engine_order_service.EngineOrderService`."""
        request = msgspec.json.encode(engine_order_service.Request(call, given))
        data = await engine_order_service.ask(self._end, request, timeout_s=ANSWER_S)
        if data is None:
            raise Refusal(
                "run-starts", "the run is starting, or starting again: its controller does not answer",
                headers={"Retry-After": RETRY_S}, fix="ask again in a few seconds",
            )  # fmt: skip
        answer = _answer.decode(data)
        kind = PROBLEM if answer.status >= 400 else "application/json"
        return Response(bytes(answer.body), answer.status, answer.headers, media_type=kind)

    async def report(self) -> StallAnswer:
        """Returns the stall report of the run."""
        deadline = time.monotonic() + TIMEOUT_S
        try:
            with closing(StallRequest(self._folder)) as ask:
                while (report := ask.report()) is None and time.monotonic() < deadline:
                    await asyncio.sleep(POLL_S)
        except OSError as error:
            raise Refusal("no-report", f"the run's folder cannot be written: {error}") from error
        if report is None:
            raise Refusal(
                "no-report",
                f"the run's controller did not answer within {TIMEOUT_S:g} s",
                headers={"Retry-After": RETRY_S},
                fix="retry: while services restart, no process answers; logs/ has the logs of all processes",
            )
        return StallAnswer(report=report)


def order_app(controller: Controller, limits: Limits, *, pages: Sequence[BaseRoute] = ()) -> FastAPI:
    """Returns the FastAPI application that accepts orders within ``limits`` and serves the run's page."""
    app = FastAPI(
        title="Relax gateway",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_refusals(),
        dependencies=[Depends(_known_query)],
        routes=list(pages),
        exception_handlers={**REFUSALS, RequestValidationError: _malformed},
    )
    _add_run(app, controller)
    _add_engines(app, controller)
    _add_scaling(app, controller, limits)
    for kind in WAYS:
        _add_orders(app, controller, kind)
    _add_autoscaler(app, controller, limits)
    schema = _schema(app, limits)
    app.openapi = lambda: schema  # type: ignore[method-assign]
    return app


async def _known_query(request: Request) -> None:
    """Refuses a query with a key that the route does not know."""
    known = {param.alias for param in request.scope["route"].dependant.query_params}
    if unknown := sorted(request.query_params.keys() - known):
        fix = f"send {', '.join(sorted(known))}" if known else "send no query"
        raise Refusal("malformed", "this route does not know a key of the query", key=unknown[0][:100], fix=fix)


# -- refusals ---------------------------------------------------------------------------------------------------------
async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in PLACES)
    value = repr(first.get("input"))[:200]
    return refusal_answer(Refusal("malformed", first["msg"], key=key or None, value=value, fix="see /openapi.json"))


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the schema of a route's refusals: the common refusals, and the refusals with ``statuses``."""
    every = (400, 401, 403, 429, 503)
    content = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in (*every, *statuses)}


# -- routes -----------------------------------------------------------------------------------------------------------
def _add_run(app: FastAPI, controller: Controller) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        """Returns a fixed status while the gateway is alive. Needs no token."""
        return Health()

    @app.get("/run", response_model=RunRow)
    async def run() -> Response:
        """Returns the progress of the run."""
        return await controller("run")

    @app.post("/run/stop", status_code=202, response_model=Order)
    async def stop() -> Response:
        """Stops the run with a checkpoint after the current train step. Repeated requests return the same order."""
        return await controller("stop")

    @app.post("/run/stall")
    async def stall() -> StallAnswer:
        """Requests a stall report from the controller, like `relax stall`. Takes some seconds."""
        return await controller.report()


def _add_engines(app: FastAPI, controller: Controller) -> None:
    @app.get("/rollout/engines", response_model=EngineList)
    async def engines() -> Response:
        """Returns all present and earlier engines of the run."""
        return await controller("engines")

    @app.get("/rollout/engines/{engine}", response_model=EngineRow, responses=_refusals(404))
    async def engine(engine: OrderId) -> Response:
        """Returns one engine."""
        return await controller("engine", name=engine)


def _add_scaling(app: FastAPI, controller: Controller, limits: Limits) -> None:
    """Adds the routes that add or remove engines, and the route that cancels all orders that add engines."""

    async def order(way: str, body: Any, key: str | None) -> Response:
        fields = body.model_dump()
        if limits.refusal:
            raise Refusal("not-in-this-run", limits.refusal)
        if urls := fields.get("engine_urls"):
            fields["engine_urls"] = await _addresses(urls, limits)
        elif way == "scale_out" and limits.no_more:
            raise Refusal("not-in-this-run", limits.no_more)
        return await controller(way, body=fields, key=key)

    taken: dict[str, Any] = {"response_model": Order | DryRun, "status_code": 202}
    there = {200: {"model": Order | DryRun}, **_refusals(409, 413, 415)}

    @app.post("/rollout/scale_out", responses=there, **taken)
    async def scale_out(body: Annotated[ScaleOut, Body()], key: Key = None) -> Response:
        """Orders a total number of engines, or external servers. Returns 200 and NOOP if all are already present."""
        return await order("scale_out", body, key)

    @app.post("/rollout/scale_in", responses=there | _refusals(404), **taken)
    async def scale_in(body: Annotated[ScaleIn, Body()], key: Key = None) -> Response:
        """Orders the removal of engines: down to ``num_replicas``, or the named engines."""
        return await order("scale_in", body, key)

    @app.post("/rollout/scale_out_cancel", response_model=CancelManyAnswer, responses=_refusals(413, 415))
    async def cancel_many(body: CancelMany) -> Response:
        """Requests the cancellation of all open orders that add engines, or only of the orders in one state."""
        return await controller("cancel_many", status=body.status_filter, dry_run=body.dry_run)


async def _addresses(urls: Sequence[str], limits: Limits) -> list[str]:
    """Returns the addresses of servers without duplicates. Refuses servers that this run does not accept."""
    if limits.no_urls:
        raise Refusal("not-in-this-run", limits.no_urls)
    found = await asyncio.gather(*(engine_address(url, allowed_hosts=limits.hosts) for url in urls))
    return list(dict.fromkeys(found))


def _add_orders(app: FastAPI, controller: Controller, kind: str) -> None:
    """Adds the routes that list, show and cancel the orders of a kind."""

    @app.get(f"/rollout/{kind}", operation_id=f"list_{kind}", response_model=OrderList)
    async def orders(status: State | None = None, limit: Limit = 50, offset: Offset = 0) -> Response:
        """Returns the orders, newest first. With ``status``, returns only the orders in this state."""
        return await controller("orders", kind=kind, status=status, limit=limit, offset=offset)

    route = f"/rollout/{kind}/{{request_id}}"

    @app.get(route, operation_id=f"get_{kind}", response_model=Order, responses=_refusals(404))
    async def order(request_id: OrderId) -> Response:
        """Returns one order."""
        return await controller("order", kind=kind, name=request_id)

    cancels: dict[str, Any] = {"operation_id": f"cancel_{kind}", "status_code": 202, "response_model": Order}

    @app.post(f"{route}/cancel", responses=_refusals(404, 409), **cancels)
    async def cancel(request_id: OrderId) -> Response:
        """Requests the cancellation of an order. The run undoes the effects of the order."""
        return await controller("cancel", kind=kind, name=request_id)


def _add_autoscaler(app: FastAPI, controller: Controller, limits: Limits) -> None:
    @app.get("/autoscaler/status", response_model=AutoscalerAnswer)
    async def status() -> Response:
        """Returns whether the autoscaler is on."""
        return await controller("autoscaler")

    @app.get("/autoscaler/conditions", response_model=ScaleDecision, responses=_refusals(404))
    async def conditions() -> Response:
        """Returns the autoscaler's last decision and its inputs, even if the decision changed nothing."""
        return await controller("conditions")

    @app.get("/autoscaler/scale_history", response_model=DecisionList)
    async def scale_history(limit: Limit = 50, offset: Offset = 0) -> Response:
        """Returns the decisions that changed the number of engines, newest first."""
        return await controller("scale_history", limit=limit, offset=offset)

    @app.post("/autoscaler/enable", response_model=AutoscalerAnswer, responses=_refusals(409, 413, 415))
    async def enable(body: AutoscalerSwitch) -> Response:
        """Turns the autoscaler on or off. Its open orders continue."""
        if body.enabled and (why := limits.refusal or limits.no_more):
            raise Refusal("no-autoscaler", why, key="enabled", value="true")
        return await controller("enable", enabled=body.enabled)


# -- the schema -------------------------------------------------------------------------------------------------------
def _schema(app: FastAPI, limits: Limits) -> dict[str, Any]:
    """Returns ``/openapi.json``, a corrected version of FastAPI's schema: malformed requests get 400, not 422.

    The schema contains the limits of the engine count and the allowed hosts of external servers. If the run never
    accepts a kind of target, the schema leaves it out.
    """
    schema = get_openapi(title=app.title, version="1", routes=app.routes)
    parts = schema.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = TypeAdapter(Problem).json_schema()
    for name in ("ScaleOutTo", "ScaleInTo"):
        schemas[name]["properties"]["num_replicas"] |= {"minimum": limits.start, "maximum": limits.most}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if path != OPEN:
                operation["security"] = [{"token": []}]
    hosts = "|".join(re.escape(host) for host in limits.hosts)
    for name in ("ScaleOutBy", "ScaleInAt"):
        schemas[name]["properties"]["engine_urls"]["items"]["pattern"] = f"^http://({hosts}):[1-9][0-9]{{0,3}}/?$"
    for kind in WAYS:
        post = schema["paths"][f"/rollout/{kind}"]["post"]
        _link(post, kind)
        body = post["requestBody"]["content"]["application/json"]["schema"]
        kinds = body.pop("anyOf", None) or body.pop("oneOf")
        if limits.no_urls:
            kinds = kinds[:-1]  # the schema without targets by address
        elif kind == "scale_out" and limits.no_more:
            kinds = kinds[1:]
        body["oneOf"] = kinds
        body.pop("title", None)
    return schema


def _link(post: dict[str, Any], kind: str) -> None:
    """Declares that the id in an order's response is the id parameter of further routes."""
    for answer in ("200", "202"):
        post["responses"][answer]["links"] = {
            f"{verb}_{kind}": {
                "operationId": f"{verb}_{kind}",
                "parameters": {"request_id": "$response.body#/request_id"},
            }
            for verb in ("get", "cancel")
        }
