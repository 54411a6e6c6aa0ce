"""A thousand requests that schemathesis makes from the schema, right and wrong, are answered as it says."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.types import Message, Receive, Scope, Send

import relax_core.server.guard as guard
import relax_core.server.order_routes as gateway_routes
from relax_core.observe.stall_asks import StallAsks
from relax_core.server.guard import Guard, Session
from relax_core.server.order_book import OrderBook
from relax_core.server.order_desk import OrderDesk, answering, channel
from relax_core.server.order_routes import Controller, order_app
from relax_core.server.orders import EngineRow, Limits, Order, RunRow, engine_id

schemathesis = pytest.importorskip("schemathesis", reason="make test-env")

TOKEN = {"Authorization": "Bearer secret"}
DEADLINE_S = 60.0
CASES = 16  # for each route, right and wrong requests each
CHAINS, CHAIN = 40, 12  # requests that follow each other by the schema's links
LIMITS = {
    "both": Limits(start=1, most=4, hosts=["127.0.0.1", "localhost"]),
    "by_address": Limits(start=1, most=4, no_more="by address only", hosts=["127.0.0.1", "localhost"]),
}
HOW = settings(
    max_examples=CASES,
    phases=[Phase.generate],
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class MovingRun:
    """Is the gateway of a run whose controller moves every order on by one state after five requests."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.book = OrderBook(folder)
        self.requests = self._since_reset = 0
        self.answers: Counter[tuple[str, int]] = Counter()  # by the last word of the path and the status
        self._asks, self._ended = StallAsks(folder), threading.Event()
        self._controller = threading.Thread(target=self._answer_asks)
        self._controller.start()
        self._open = ExitStack()
        ours, theirs = map(self._open.enter_context, channel())
        self._open.enter_context(answering(theirs, OrderDesk(self.book, limits, None).answer))
        self._app = Guard(
            order_app(Controller(ours, folder), limits),
            Session(),
            port=lambda: 80,
            names=["testserver"],
            token="secret",
        )
        self.book.run = RunRow(at=1.0, step=4, steps=9, stopping=False)
        self.reset()

    def reset(self) -> None:
        """Forgets all orders, so that the same requests get the same answers."""
        self.book._orders.clear()
        self.book._keys.clear()
        self._since_reset = 0
        self._write(range(1, 2))

    def close(self) -> None:
        self._ended.set()
        self._controller.join(DEADLINE_S)
        self._open.close()

    def _answer_asks(self) -> None:
        while not self._ended.wait(0.01):
            self._asks.check(lambda: "actor-0 waits for bus")

    def _write(self, serving: range) -> None:
        rows = [EngineRow(id="engine-0", origin="start", state="serving", since=1.0)]
        for number in range(1, 4):
            state = "serving" if number in serving else "left"
            rows.append(EngineRow(id=engine_id(number), origin="added", state=state, since=1.0))
        self.book.write_engines(rows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answers[scope["path"].rpartition("/")[2], message["status"]] += 1
            await send(message)

        await self._app(scope, receive, noted)
        self.requests += 1
        self._since_reset += 1
        if self._since_reset % 5 == 0:
            for order in self.book.open_orders():
                self._move(order)

    def _move(self, order: Order) -> None:
        if order.cancel_requested:
            self.book.move(order, "CANCELLED")
        elif order.kind == "scale_out":
            self.book.move(order, "CREATING" if order.status == "PENDING" else "ACTIVE", engines=[3])
        elif order.kind == "scale_in":
            self.book.move(order, "DRAINING" if order.status == "PENDING" else "COMPLETED", engines=[3])
            self._write(range(1, 2 + self._since_reset % 3))
        else:
            self.book.move(order, "COMPLETED")


@pytest.mark.parametrize("kind", list(LIMITS))
def test_every_answer_is_as_the_schema_says(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "REQUESTS_A_SECOND", 10**9)
    from schemathesis.specs.openapi.checks import ignored_auth, negative_data_rejection

    # The first one triples the requests; test_who_may_come_in asks every route. The second one takes a query for wrong
    # of which nothing wrong is sent: an empty value is left out, and every request has the token.
    excluded, no_body = [ignored_auth], [negative_data_rejection]

    monkeypatch.setattr(gateway_routes, "POLL_S", 0.005)
    monkeypatch.setattr(gateway_routes, "TIMEOUT_S", 600.0)  # only a report that never comes reaches it
    run = MovingRun(tmp_path, LIMITS[kind])
    schema = schemathesis.openapi.from_asgi("/openapi.json", run, headers=TOKEN)
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:

            @HOW
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                case.call_and_validate(headers=TOKEN, excluded_checks=excluded + no_body * (not case.operation.body))

            try:
                check()
            except Unsatisfiable:
                assert mode is schemathesis.GenerationMode.NEGATIVE and not (
                    operation.body or operation.path_parameters
                )

    linked = schema.exclude(path="/run/stall")  # it takes no id, so the chains' few steps are for routes that do

    class Chain(linked.as_state_machine()):  # type: ignore[misc]
        def setup(self) -> None:
            run.reset()

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"headers": TOKEN}

        def validate_response(self, response: Any, case: Any, *_: Any, **__: Any) -> None:
            case.validate_response(response, excluded_checks=excluded + no_body * (not case.operation.body))

    Chain.run(settings=settings(HOW, max_examples=CHAINS, stateful_step_count=CHAIN))
    assert run.requests >= 400
    assert run.answers["scale_out", 202] and run.answers["scale_in", 202] and run.answers["stop", 202]
    assert run.answers["stall", 200] and not run.answers["stall", 503], run.answers
    assert run.answers["cancel", 202] + run.answers["cancel", 409], "ids of answers were used"
    run.close()
