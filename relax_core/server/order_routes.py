"""Declares the gateway's routes: each reads the order book, or adds an order that the controller executes."""

from __future__ import annotations

import asyncio
import pathlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Annotated, Any, Literal

from fastapi import Body, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from relax_core.observe.stall_asks import POLL_S, TIMEOUT_S, StallAsk
from relax_core.server.autoscaler_routes import add_autoscaler
from relax_core.server.gateway_settings import EngineRoom, Limits
from relax_core.server.json_bodies import (
    TAGS,
    CancelMany,
    CancelManyAnswer,
    DryRun,
    EngineAnswer,
    EngineList,
    Health,
    OrderAnswer,
    OrderList,
    RunAnswer,
    ScaleIn,
    ScaleInAt,
    ScaleInOf,
    ScaleInTo,
    ScaleOut,
    ScaleOutBy,
    ScaleOutTo,
    StallAnswer,
    engine_answer,
    order_answer,
    run_answer,
)
from relax_core.server.limits import OrderChecks, with_room
from relax_core.server.openapi import describe
from relax_core.server.order_book import EngineRow, Kind, Order, OrderBook, OrderRefused, State, engine_id
from relax_core.server.problems import Refusal, responses
from relax_core.server.scale_book import ScaleBook

RETRY_S = "5"  # Retry-After of an order that waits for another one, in seconds
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]
OrderId = Annotated[str, Path(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]
Answer = OrderAnswer | DryRun
PLACES = ("body", "query", "path", "header", *TAGS)  # parts of an error's place that are no keys of a client's
Ways = Literal["scale_out", "scale_in"]


def application(
    book: OrderBook, scale_book: ScaleBook, limits: Limits, *, folder: pathlib.Path, room: EngineRoom | None = None
) -> FastAPI:
    """Returns the gateway's application over the run's order book and the autoscaler's decisions.

    ``folder`` is the run's, in which its controller is asked what it waits for. ``room`` is what the run's plan says of
    further engines, None if that is not known. `relax_core.server.guard.Guard` guards the application.
    """
    app = FastAPI(
        title="Relax gateway",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=responses(),
        dependencies=[Depends(_known_query)],
    )
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(sqlite3.Error, _unusable_book)
    _add_run(app, book)
    _add_stall(app, book, folder)
    _add_engines(app, book)
    checks = OrderChecks(limits, room)
    _add_scale_out(app, book, checks)
    _add_scale_in(app, book, checks)
    for kind in ("scale_out", "scale_in"):
        _add_orders(app, book, kind)
    _add_cancel_many(app, book)
    add_autoscaler(app, scale_book, limits)
    describe(app, limits)
    return app


async def _known_query(request: Request) -> None:
    """Refuses a query with a key that the route does not have."""
    known = {one.alias for one in request.scope["route"].dependant.query_params}
    if unknown := sorted(request.query_params.keys() - known):
        fix = f"send {', '.join(sorted(known))}" if known else "send no query"
        raise Refusal("malformed", "the query has a key that this route does not know", key=unknown[0][:100], fix=fix)


# -- refusals ---------------------------------------------------------------------------------------------------------
async def _malformed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in PLACES)
    value = repr(first.get("input"))[:200]
    return Refusal("malformed", first["msg"], key=key or None, value=value, fix="see /openapi.json").response()


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refusal)
    return error.response()


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    name = {404: "unknown-route", 405: "unknown-method"}.get(error.status_code, "malformed")
    headers = dict(error.headers or {})
    return Refusal(name, str(error.detail), headers=headers, fix="see /openapi.json for the routes").response()


async def _unusable_book(request: Request, error: Exception) -> JSONResponse:
    words = f"the order book does not answer: {error}"
    return Refusal("order-book-busy", words, headers={"Retry-After": RETRY_S}).response()


# -- the run ----------------------------------------------------------------------------------------------------------
def _add_run(app: FastAPI, book: OrderBook) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        """Says that the gateway answers; it is open to everybody."""
        return Health()

    @app.get("/run")
    async def run() -> RunAnswer:
        """Returns where the run stands."""
        row = book.run()
        if row is None:
            raise Refusal("run-starts", "the run is starting", headers={"Retry-After": RETRY_S})
        return run_answer(row)

    @app.post("/run/stop", status_code=202)
    async def stop(response: Response) -> OrderAnswer:
        """Asks the run to end with a checkpoint once a train step is done; asking again returns the same order."""
        order = next((one for one in book.open_orders() if one.kind == "stop"), None)
        return order_answer(order or book.place("stop", {}, decide=lambda engines: "PENDING")[0])


def _add_stall(app: FastAPI, book: OrderBook, folder: pathlib.Path) -> None:
    @app.post("/run/stall")
    async def stall() -> StallAnswer:
        """Asks the controller what the run waits for, as `relax stall` does, and returns its report, after seconds."""
        if book.run() is None:
            raise Refusal("run-starts", "the run is starting", headers={"Retry-After": RETRY_S})
        deadline = time.monotonic() + TIMEOUT_S
        try:
            with closing(StallAsk(folder)) as ask:
                while (report := ask.report()) is None and time.monotonic() < deadline:
                    await asyncio.sleep(POLL_S)
        except OSError as error:
            raise Refusal("no-report", f"the run's folder cannot be written: {error}") from error
        if report is None:
            raise Refusal(
                "no-report",
                f"the run's controller did not answer within {TIMEOUT_S:g} s",
                headers={"Retry-After": RETRY_S},
                fix="ask again: while services start again, nobody answers; logs/ has the logs of all processes",
            )
        return StallAnswer(report=report)


def _add_engines(app: FastAPI, book: OrderBook) -> None:
    @app.get("/rollout/engines")
    async def engines() -> EngineList:
        """Returns the engines that the run has or had."""
        return EngineList(engines=[engine_answer(row) for row in book.engines()])

    @app.get("/rollout/engines/{engine}", responses=responses(404))
    async def engine(engine: OrderId) -> EngineAnswer:
        """Returns one engine."""
        row = next((one for one in book.engines() if engine_id(one.number) == engine), None)
        if row is None:
            raise Refusal("unknown-id", "this run has no such engine", key="engine", value=engine[:100])
        return engine_answer(row)


# -- orders for engines -----------------------------------------------------------------------------------------------
def _add_scale_out(app: FastAPI, book: OrderBook, checks: OrderChecks) -> None:
    @app.post("/rollout/scale_out", status_code=202, responses={200: {"model": Answer}, **responses(409, 413, 415)})
    async def scale_out(body: Annotated[ScaleOut, Body()], response: Response, key: Key = None) -> Answer:
        """Orders so many engines in all, or servers to join. With the engines there already: 200 and NOOP."""
        checks.check(book.run())
        by_url = isinstance(body, ScaleOutBy)
        urls = await checks.addresses(body.engine_urls) if isinstance(body, ScaleOutBy) else []
        if isinstance(body, ScaleOutTo):
            checks.check_more()
            checks.check_target(body.num_replicas)

        def missing(engines: Sequence[EngineRow]) -> int:
            if isinstance(body, ScaleOutTo):
                return max(0, body.num_replicas - _present(engines))
            more = len(_unknown(book, engines, urls))
            checks.check_room(engines, more)
            return more

        def decide(engines: Sequence[EngineRow]) -> State:
            return "PENDING" if missing(engines) else "NOOP"

        if body.dry_run:
            rows = book.engines()
            now, more = _present(rows), missing(rows)
            dry = _dry(response, "PENDING" if more else "NOOP", now=now, then=now + more, gone=[])
            return dry if by_url or not more else with_room(dry, checks.room, more=more)
        fields = body.model_dump() | ({"engine_urls": urls} if by_url else {})
        return _place(book, "scale_out", fields, decide=decide, key=key, response=response, queues=by_url)


def _add_scale_in(app: FastAPI, book: OrderBook, checks: OrderChecks) -> None:
    @app.post("/rollout/scale_in", status_code=202, responses={200: {"model": Answer}, **responses(404, 409, 413, 415)})
    async def scale_in(body: Annotated[ScaleIn, Body()], response: Response, key: Key = None) -> Answer:
        """Orders engines to go: so many that ``num_replicas`` stay, or the named ones."""
        checks.check(book.run())
        named: list[int] = []
        if isinstance(body, ScaleInOf):
            named = [int(one.partition("-")[2]) for one in body.engine_ids]
        elif isinstance(body, ScaleInAt):
            named = checks.at(book.engines(), await checks.addresses(body.engine_urls))
        else:
            checks.check_target(body.num_replicas)

        def going(engines: Sequence[EngineRow]) -> list[int]:
            if isinstance(body, ScaleInTo):
                return checks.newest(engines, target=body.num_replicas)
            return checks.added(engines, named)

        def decide(engines: Sequence[EngineRow]) -> State:
            return "PENDING" if going(engines) else "NOOP"

        if body.dry_run:
            rows = book.engines()
            gone, now = going(rows), _present(rows)
            return _dry(response, "PENDING" if gone else "NOOP", now=now, then=now - len(gone), gone=gone)
        fields = {"num_replicas": None, "engine_ids": None, **body.model_dump()}
        fields |= {"engine_ids": named} if named else {}
        return _place(book, "scale_in", fields, decide=decide, key=key, response=response)


def _unknown(book: OrderBook, engines: Sequence[EngineRow], urls: Sequence[str]) -> list[str]:
    """Returns the addresses of servers that neither are in nor are about to join by an open order."""
    known = {row.url for row in engines if row.present}
    for order in book.open_orders():
        known |= set(order.body.get("engine_urls") or ())
    return [url for url in urls if url not in known]


def _present(engines: Sequence[EngineRow]) -> int:
    return sum(row.present for row in engines)


def _dry(
    response: Response, state: Literal["PENDING", "NOOP"] | State, *, now: int, then: int, gone: list[int]
) -> DryRun:
    response.status_code = 200
    status: Literal["PENDING", "NOOP"] = "PENDING" if state == "PENDING" else "NOOP"
    return DryRun(status=status, engines_now=now, engines_then=then, engine_ids=[engine_id(one) for one in gone])


def _place(
    book: OrderBook,
    kind: Kind,
    body: dict[str, Any],
    *,
    decide: Callable[[Sequence[EngineRow]], State],
    key: str | None,
    response: Response,
    queues: bool = False,
) -> OrderAnswer:
    try:
        order, _ = book.place(kind, body, decide=decide, key=key, queues=queues)
    except OrderRefused as refused:
        if refused.busy is None:
            raise Refusal("other-body", str(refused), key="Idempotency-Key", value=key) from refused
        headers = {"Retry-After": RETRY_S}
        raise Refusal("order-under-way", str(refused), headers=headers, request_id=refused.busy) from refused
    response.status_code = 200 if order.state == "NOOP" else 202
    response.headers["Location"] = f"/rollout/{kind}/{order.id}"
    return order_answer(order)


def _add_orders(app: FastAPI, book: OrderBook, kind: Ways) -> None:
    """Adds the routes that list, show and cancel the orders of a kind."""

    def known(request_id: str) -> Order:
        order = book.order(request_id)
        if order is None or order.kind != kind:
            words = f"this run has no such order of kind {kind}"
            raise Refusal("unknown-id", words, key="request_id", value=request_id[:100])
        return order

    @app.get(f"/rollout/{kind}", operation_id=f"list_{kind}")
    async def orders(status: State | None = None, limit: Limit = 50, offset: Offset = 0) -> OrderList:
        """Returns the orders, and with ``status`` those in this state, the newest first."""
        found = book.orders(kind, state=status, limit=limit, offset=offset)
        return OrderList(requests=[order_answer(one) for one in found], limit=limit, offset=offset)

    @app.get(f"/rollout/{kind}/{{request_id}}", operation_id=f"get_{kind}", responses=responses(404))
    async def order(request_id: OrderId) -> OrderAnswer:
        """Returns one order."""
        return order_answer(known(request_id))

    @app.post(
        f"/rollout/{kind}/{{request_id}}/cancel",
        operation_id=f"cancel_{kind}",
        status_code=202,
        responses=responses(404, 409),
    )
    async def cancel(request_id: OrderId) -> OrderAnswer:
        """Asks for the cancellation of an order; what it has done is taken back."""
        known(request_id)
        try:
            return order_answer(book.ask_cancel(request_id))
        except OrderRefused as refused:
            raise Refusal("order-ended", str(refused), request_id=request_id) from refused


def _add_cancel_many(app: FastAPI, book: OrderBook) -> None:
    @app.post("/rollout/scale_out_cancel", responses=responses(413, 415))
    async def cancel_many(body: CancelMany) -> CancelManyAnswer:
        """Asks for the cancellation of all orders that add engines and are open, or of those in one state."""
        found = book.cancel_many("scale_out", state=body.status_filter, dry_run=body.dry_run)
        return CancelManyAnswer(dry_run=body.dry_run, requests=[order_answer(one) for one in found])
