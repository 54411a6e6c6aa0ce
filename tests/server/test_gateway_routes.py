"""Tests the routes of the gateway and a controller's handling of orders: responses, refusals, and the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import relax_core.server.order_routes as gateway_routes
import relax_core.server.request_guard as guard
from relax_core.observe.stall_requests import FOLDER
from relax_core.server.engine_order_service import EngineOrderService, answering, channel
from relax_core.server.engine_order_store import EngineOrderStore
from relax_core.server.order_routes import Controller, order_app
from relax_core.server.order_types import PROBLEM, STATUS_OF, TYPE, EngineRoom, EngineRow, Limits, RunRow, ScaleDecision
from relax_core.server.request_guard import RequestGuard, Session
from tests.observe.test_stall_requests import controller

TOKEN = {"Authorization": "Bearer secret"}


class Gateway:
    """Holds the application of a run with one initial engine and one added engine."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.order_store = EngineOrderStore(folder)
        room = EngineRoom(usable=2, engine_bytes=300 << 20, engine_cores=1, machine_cores=None)
        ours, theirs = channel()
        self._open = ExitStack()
        for end in (ours, theirs):
            self._open.enter_context(end)
        self.answering = self._open.enter_context(ExitStack())
        desk = EngineOrderService(self.order_store, limits, room)
        self.serve = lambda: self.answering.enter_context(answering(theirs, desk.answer))
        self.serve()
        self.app = order_app(Controller(ours, folder), limits)
        guarded = RequestGuard(self.app, Session(), port=lambda: 7788, names=["gpu7"], token="secret")
        self.client = TestClient(guarded, base_url="http://127.0.0.1:7788")
        self._open.callback(self.client.close)
        self.order_store.run = RunRow(at=1.0, step=4, steps=9, stopping=False)
        origins = {"engine-0": "start", "engine-1": "added"}
        self.order_store.write_engines(
            EngineRow(id=engine, origin=origin, state="serving", since=1.0) for engine, origin in origins.items()
        )

    def close(self) -> None:
        self._open.close()

    def ask(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        answer = self.client.request(method, path, **{"headers": TOKEN, **options})
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == PROBLEM, answer.text
            assert STATUS_OF[answer.json()["type"].removeprefix(TYPE)] == answer.status_code
        return answer.status_code, answer.json()

    def order(self, way: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", f"/rollout/{way}", json=body)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(guard, "REQUESTS_A_SECOND", 10**6)
    gateway = Gateway(tmp_path, Limits(start=1, most=4))
    yield gateway
    gateway.close()


@pytest.fixture
def attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """Runs the gateway of a run with engine.urls."""
    monkeypatch.setattr(guard, "REQUESTS_A_SECOND", 10**6)
    limits = Limits(start=1, most=4, no_more="engine.urls: send engine_urls.", hosts=["127.0.0.1", "localhost"])
    gateway = Gateway(tmp_path, limits)
    yield gateway
    gateway.close()


def test_servers_join_by_their_addresses_one_order_after_the_other(attached: Gateway) -> None:
    assert attached.order("scale_out", num_replicas=3)[1]["detail"] == "engine.urls: send engine_urls."
    first_url, same, other_url = "http://localhost:30000/", "http://127.0.0.1:30000", "http://127.0.0.1:30001"
    dry = attached.order("scale_out", engine_urls=[first_url, same, other_url], dry_run=True)[1]
    assert (dry["status"], dry["engines_now"], dry["engines_then"]) == ("PENDING", 2, 4)
    status, first = attached.order("scale_out", engine_urls=[first_url, same])
    assert status == 202 and first["body"]["engine_urls"] == [same]
    status, noop = attached.order("scale_out", engine_urls=[same])
    assert (status, noop["status"]) == (200, "NOOP"), "its order is still open"
    status, second = attached.order("scale_out", engine_urls=[same, other_url])
    assert status == 202 and second["status"] == "PENDING", "the second order waits for the first"
    assert attached.order("scale_in", num_replicas=1)[1]["request_id"] == first["request_id"]
    status, problem = attached.order("scale_out", engine_urls=[f"http://127.0.0.1:{port}" for port in range(1, 4)])
    assert (status, problem["type"]) == (409, TYPE + "no-room")
    for order in attached.order_store.open_orders():
        attached.order_store.move(order, "ACTIVE")
    attached.order_store.write_engines(
        [EngineRow(id="engine-2", origin="external", state="serving", since=1.0, url=same)]
    )
    assert attached.order("scale_out", engine_urls=[first_url])[1]["status"] == "NOOP"
    assert attached.order("scale_in", engine_urls=[other_url])[0] == 404
    assert attached.order("scale_in", engine_urls=[first_url, same], dry_run=True)[1]["engine_ids"] == ["engine-2"]
    status, order = attached.order("scale_in", engine_urls=[first_url])
    assert status == 202 and order["body"]["engine_ids"] == [2]
    attached.order_store.move(attached.order_store.open_orders()[0], "COMPLETED")
    attached.order_store.write_engines([EngineRow(id="engine-2", origin="external", state="left", since=1.0, url=same)])
    assert attached.order("scale_in", engine_urls=[first_url])[1]["status"] == "NOOP", "the engine has already left"


def test_addresses_that_are_no_servers_are_refused_with_the_address(gateway: Gateway, attached: Gateway) -> None:
    for url in ("file:///etc/passwd", "http://169.254.169.254:80", "http://10.0.0.1:30000"):
        status, problem = attached.order("scale_out", engine_urls=["http://127.0.0.1:30000", url])
        assert (status, problem["key"], problem["value"]) == (400, "engine_urls", url)
    assert attached.order("scale_out", engine_urls=[])[0] == 400
    assert attached.order("scale_out", engine_urls=["http://127.0.0.1:1"] * 65)[0] == 400
    assert attached.order("scale_out", engine_urls=["http://127.0.0.1:1"], num_replicas=2)[0] == 400
    assert not attached.order_store.open_orders()


def test_an_order_is_placed_once_shown_listed_and_cancelled(gateway: Gateway) -> None:
    assert gateway.order("scale_out", num_replicas=3, dry_run=True) == (
        200,
        {
            "dry_run": True,
            "status": "PENDING",
            "engines_now": 2,
            "engines_then": 3,
            "engine_ids": [],
            "memory_bytes": 300 << 20,
            "free_memory_bytes": None,
            "cores": 1,
            "machine_cores": None,
            "usable_engines": 2,
            "warnings": ["the samples in flight can fill 2 engines, so more of them would get none"],
        },
    )
    answer = gateway.client.post(
        "/rollout/scale_out", headers=TOKEN | {"Idempotency-Key": "k"}, json={"num_replicas": 3}
    )
    order = answer.json()
    assert (answer.status_code, order["status"], order["engine_ids"]) == (202, "PENDING", [])
    assert answer.headers["location"] == f"/rollout/scale_out/{order['request_id']}"
    again = gateway.client.post(
        "/rollout/scale_out", headers=TOKEN | {"Idempotency-Key": "k"}, json={"num_replicas": 3}
    )
    assert again.json() == order
    refused = gateway.client.post(
        "/rollout/scale_out", headers=TOKEN | {"Idempotency-Key": "k"}, json={"num_replicas": 4}
    )
    assert refused.status_code == 409
    status, problem = gateway.order("scale_in", num_replicas=1)
    assert (status, problem["request_id"]) == (409, order["request_id"])
    assert gateway.ask("GET", "/rollout/scale_out?status=PENDING")[1]["requests"] == [order]
    assert gateway.ask("GET", f"/rollout/scale_in/{order['request_id']}")[0] == 404, "the order is of another kind"
    status, cancelled = gateway.ask("POST", f"/rollout/scale_out/{order['request_id']}/cancel")
    assert status == 202 and cancelled["cancel_requested"]
    gateway.order_store.move(gateway.order_store.open_orders()[0], "CANCELLED")
    assert gateway.ask("POST", f"/rollout/scale_out/{order['request_id']}/cancel")[0] == 409
    status, noop = gateway.order("scale_out", num_replicas=2)
    assert (status, noop["status"]) == (200, "NOOP")
    assert gateway.ask("GET", f"/rollout/scale_out/{noop['request_id']}") == (200, noop)


def test_engines_go_by_number_or_by_name(gateway: Gateway) -> None:
    assert gateway.order("scale_in", num_replicas=1, dry_run=True)[1]["engine_ids"] == ["engine-1"]
    assert gateway.order("scale_in", num_replicas=2)[1]["status"] == "NOOP"
    status, problem = gateway.order("scale_in", engine_ids=["engine-0"])
    assert (status, problem["value"]) == (409, "engine-0") and "cannot be removed" in problem["detail"]
    assert gateway.order("scale_in", engine_ids=["engine-7"])[0] == 404
    status, order = gateway.order("scale_in", engine_ids=["engine-1"], force=True)
    assert status == 202 and order["body"]["engine_ids"] == [1]
    assert gateway.ask("GET", "/rollout/engines/engine-1")[1]["origin"] == "added"
    assert gateway.ask("GET", "/rollout/engines/engine-2")[0] == 404
    assert [engine["id"] for engine in gateway.ask("GET", "/rollout/engines")[1]["engines"]] == ["engine-0", "engine-1"]


def test_the_autoscaler_is_turned_on_and_says_what_it_decided(gateway: Gateway, attached: Gateway) -> None:
    assert gateway.ask("GET", "/autoscaler/status") == (200, {"enabled": False})
    assert gateway.ask("GET", "/autoscaler/conditions")[0] == 404
    assert gateway.ask("POST", "/autoscaler/enable", json={"enabled": 1})[0] == 400
    assert gateway.ask("POST", "/autoscaler/enable", json={"enabled": True}) == (200, {"enabled": True})
    assert gateway.ask("GET", "/autoscaler/status") == (200, {"enabled": True})
    none = ScaleDecision(at=1.0, action="none", reason="the window is not full yet", engines=2, target=2)
    out = ScaleDecision(
        at=2.0,
        action="out",
        reason="it waits",
        engines=2,
        target=3,
        wait_share=0.3,
        waiting=4,
        idle_share=0,
        request_id="x",
    )
    for decision in (out, none):
        gateway.order_store.decided(decision)
    assert gateway.ask("GET", "/autoscaler/conditions")[1]["reason"] == none.reason
    (told,) = gateway.ask("GET", "/autoscaler/scale_history")[1]["decisions"]
    assert (told["action"], told["target"], told["request_id"], told["wait_share"]) == ("out", 3, "x", 0.3)
    assert gateway.ask("GET", "/autoscaler/scale_history?offset=1")[1]["decisions"] == []
    assert attached.ask("POST", "/autoscaler/enable", json={"enabled": True})[0] == 409, "this run starts no engines"
    assert attached.ask("POST", "/autoscaler/enable", json={"enabled": False})[0] == 200


def test_the_run_is_shown_and_stopped_once(gateway: Gateway) -> None:
    assert gateway.ask("GET", "/run") == (200, {"at": 1.0, "step": 4, "steps": 9, "stopping": False})
    status, order = gateway.ask("POST", "/run/stop")
    assert status == 202 and gateway.ask("POST", "/run/stop")[1] == order
    gateway.order_store.run = RunRow(at=2.0, step=5, steps=9, stopping=True)
    assert gateway.order("scale_out", num_replicas=4)[0] == 503


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b"{no", None),
        (b"[]", None),
        (b"{}", "num_replicas"),
        (b'{"num_replicas": true}', "num_replicas"),
        (b'{"num_replicas": "3"}', "num_replicas"),
        (b'{"num_replicas": 0}', "num_replicas"),
        (b'{"num_replicas": -1}', "num_replicas"),
        (b'{"num_replicas": 5}', "num_replicas"),
        (b'{"num_replicas": 3, "timeout_secs": NaN}', "timeout_secs"),
        (b'{"num_replicas": 3, "dry_run": 0}', "dry_run"),
        (b'{"num_replicas": 3, "engines": 4}', "engines"),
        (b'{"num_replicas": 3, "model_name": "other"}', "model_name"),
        (b'{"num_replicas": 3, "model_name": "\\ud800"}', "model_name"),
        (b'{"num_replicas": 3, "\\ud800": 1}', None),
        (b'{"num_replicas": ' + b"9" * 5000 + b"}", None),
        (b'{"num_replicas": 1e400}', "num_replicas"),
        (b"[" * 60000, None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_a_body_that_is_wrong_is_refused_by_its_key(gateway: Gateway, body: bytes, key: str | None) -> None:
    headers = TOKEN | {"Content-Type": "application/json"}
    status, problem = gateway.ask("POST", "/rollout/scale_out", headers=headers, content=body)
    assert status == 400 and problem["status"] == 400 and problem["detail"]
    assert key is None or problem["key"] == key
    assert not gateway.order_store.open_orders()


def test_the_run_keeps_the_engines_of_its_start(tmp_path: Path) -> None:
    second_gateway = Gateway(tmp_path, Limits(start=2, most=4))
    for way in ("scale_out", "scale_in"):
        status, problem = second_gateway.order(way, num_replicas=1)
        assert (status, problem["fix"]) == (400, "send at least 2")
    second_gateway.close()
    (tmp_path / "colocate").mkdir()
    colocate = Gateway(
        tmp_path / "colocate", Limits(start=1, most=4, refusal="mode=colocate: no engine comes or goes.")
    )
    assert colocate.order("scale_out", num_replicas=2)[1]["detail"] == "mode=colocate: no engine comes or goes."
    colocate.close()


def test_a_report_of_what_the_run_waits_for(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with controller(tmp_path, "actor-0 waits for bus\n"):
        assert gateway.ask("POST", "/run/stall") == (200, {"report": "actor-0 waits for bus\n"})
    monkeypatch.setattr(gateway_routes, "TIMEOUT_S", 0.05)
    status, problem = gateway.ask("POST", "/run/stall")
    assert (status, problem["type"]) == (503, TYPE + "no-report")
    assert problem["detail"] == "the run's controller did not answer within 0.05 s"
    assert not list((tmp_path / FOLDER).iterdir()), "a request without a waiting client is withdrawn"
    (tmp_path / FOLDER).rmdir()
    (tmp_path / FOLDER).write_text("")
    assert "the run's folder cannot be written" in gateway.ask("POST", "/run/stall")[1]["detail"]
    assert gateway.ask("GET", "/run/stall")[0] == 405


def test_access_is_limited_to_the_token_holder(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, methods in json.loads(gateway.client.get("/openapi.json", headers=TOKEN).text)["paths"].items():
        for method in methods:
            for headers in ({}, {"Authorization": "Bearer other"}, {"Cookie": "token=secret"}):
                status = gateway.ask(method.upper(), f"{path}?token=secret", headers=headers)[0]
                assert status == (400 if path == "/healthz" else 401), path
    assert gateway.ask("GET", "/healthz", headers={}) == (200, {"status": "ok"})
    assert gateway.ask("GET", "/openapi.json", headers={})[0] == 401
    assert gateway.ask("GET", "/nothing")[0] == 404 and gateway.ask("PUT", "/run")[0] == 405
    assert gateway.ask("GET", "/run?step=1")[1]["key"] == "step" and gateway.ask("GET", "/run?")[0] == 200
    assert gateway.ask("GET", "/rollout/scale_in?limit=1&Limit=2")[1]["fix"] == "send limit, offset, status"
    assert gateway.ask("GET", "/run/")[0] == 404, "no answer redirects a client"
    for host, status in {"evil.example": 403, "": 403, "gpu7": 200, "LOCALHOST:1": 200, "[::1]:7788": 200}.items():
        assert gateway.ask("GET", "/run", headers=TOKEN | {"Host": host})[0] == status, host
    form = {"headers": TOKEN, "data": {"num_replicas": "3"}}
    assert gateway.ask("POST", "/rollout/scale_out", **form)[0] == 415
    large = {"headers": TOKEN | {"Content-Type": "application/json"}, "content": b" " * (guard.BODY_BYTES + 1)}
    assert gateway.ask("POST", "/rollout/scale_out", **large)[0] == 413
    monkeypatch.setattr(guard, "REQUESTS_A_SECOND", 0)
    assert gateway.ask("GET", "/healthz")[0] == 429


def test_requests_without_the_token_do_not_keep_out_those_with_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "REQUESTS_A_SECOND", 10)
    monkeypatch.setattr(guard.time, "monotonic", lambda: 7.5)
    statuses = [gateway.ask("GET", "/run", headers={})[0] for _ in range(11)]
    assert statuses == [401] * 10 + [429] and gateway.ask("GET", "/run")[0] == 200


def test_a_controller_that_is_not_there_gives_503_and_takes_the_order_no_more(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.answering.close()
    monkeypatch.setattr(gateway_routes, "ANSWER_S", 0.05)
    status, problem = gateway.order("scale_out", num_replicas=3)
    assert (status, problem["type"]) == (503, TYPE + "run-starts")
    monkeypatch.undo()
    gateway.serve()
    assert gateway.ask("GET", "/rollout/scale_out")[1]["requests"] == [], "its client has left"
    assert gateway.order("scale_out", num_replicas=3)[0] == 202


def test_an_order_that_cannot_be_written_is_not_taken(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "events").rename(tmp_path / "moved")
    (tmp_path / "events").touch()
    status, problem = gateway.order("scale_out", num_replicas=3)
    assert (status, problem["type"]) == (503, TYPE + "order-unwritten")
    assert gateway.ask("GET", "/rollout/scale_out")[1]["requests"] == []
    (tmp_path / "events").unlink()
    assert gateway.order("scale_out", num_replicas=3)[0] == 202


def test_open_orders_that_add_engines_are_cancelled_together(gateway: Gateway) -> None:
    order = gateway.order("scale_out", num_replicas=3)[1]
    cancel = "/rollout/scale_out_cancel"
    assert gateway.ask("POST", cancel, json={"status_filter": "CREATING"})[1]["requests"] == []
    dry = gateway.ask("POST", cancel, json={"status_filter": "PENDING", "dry_run": True})[1]
    assert dry == {"dry_run": True, "requests": [order]}
    asked = gateway.ask("POST", cancel, json={})[1]["requests"]
    assert [cancelled["request_id"] for cancelled in asked] == [order["request_id"]] and asked[0]["cancel_requested"]
    gateway.order_store.move(gateway.order_store.open_orders()[0], "CANCELLED")
    assert gateway.ask("POST", cancel, json={})[1]["requests"] == []
    gateway.order("scale_in", num_replicas=1)
    assert gateway.ask("POST", cancel, json={})[1]["requests"] == [], "an order of the other kind was cancelled"
    assert gateway.ask("POST", cancel, json={"status_filter": "NEVER"})[0] == 400


def test_the_schema_says_what_the_routes_do(gateway: Gateway) -> None:
    schema = gateway.ask("GET", "/openapi.json")[1]
    assert "422" not in json.dumps(schema)
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path != "/healthz")
            assert {"400", "401", "403", "429", "503"} <= operation["responses"].keys()
    for way in ("scale_out", "scale_in"):
        body = schema["paths"][f"/rollout/{way}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert len(body["oneOf"]) == {"scale_out": 2, "scale_in": 3}[way] and not body.keys() & {
            "anyOf",
            "discriminator",
        }
    replicas = schema["components"]["schemas"]["ScaleOutTo"]["properties"]["num_replicas"]
    assert (replicas["minimum"], replicas["maximum"]) == (1, 4), "the schema has the limits of the run"
    for way in ("scale_out", "scale_in"):
        links = schema["paths"][f"/rollout/{way}"]["post"]["responses"]["202"]["links"]
        assert links[f"get_{way}"]["parameters"] == {"request_id": "$response.body#/request_id"}
