"""Answers the gateway's requests in the run's controller: queries of orders and engines, and new orders.

The supervisor creates a pair of sockets. Each gateway that it starts inherits one end, and each controller that it
forks inherits the other end. So other processes cannot connect, and a restarted gateway or controller uses the same
pair. A request is one datagram, so it is never read partially. The datagram carries a socket for the response. If the
requester has closed this socket, the request is not executed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from relax_core.observe.process_usage import available_bytes
from relax_core.server.engine_order_store import RETRY_S, EngineOrderStore
from relax_core.server.order_types import (
    DryRun,
    EngineRoom,
    EngineRow,
    Kind,
    Limits,
    Order,
    Refusal,
    RunRow,
    State,
    engine_id,
    engine_number,
)

GIB = 1 << 30
CALLS = frozenset(
    (
        *("run", "stop", "engines", "engine", "scale_out", "scale_in", "orders", "order", "cancel", "cancel_many"),
        *("autoscaler", "conditions", "scale_history", "enable"),
    )
)
log = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True):
    """Holds the name of one of `CALLS` and its arguments. The gateway has already checked the arguments."""

    call: str
    given: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds an HTTP response. ``body`` is encoded as JSON."""

    body: Any
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


_request = msgspec.json.Decoder(Request)


class EngineOrderService:
    """Accepts orders within the limits of the run, and refuses all other orders with a reason.

    ``room`` is the plan's estimate for further engines, or None if unknown.
    """

    def __init__(self, order_store: EngineOrderStore, limits: Limits, room: EngineRoom | None) -> None:
        self._order_store, self._limits, self._room = order_store, limits, room

    def answer(self, request: bytes) -> bytes:
        """Returns the JSON of the `Answer` to a `Request`. Any thread may call this method."""
        asked = _request.decode(request)
        assert asked.call in CALLS
        try:
            with self._order_store.lock:
                found = getattr(self, asked.call)(**asked.given)
        except Refusal as refusal:
            found = _refused(refusal)
        except OSError as error:
            message = f"the order cannot be written: {error}"
            log.warning("%s", message)
            found = _refused(Refusal("order-unwritten", message, headers={"Retry-After": RETRY_S}))
        return msgspec.json.encode(found if isinstance(found, Answer) else Answer(body=found))

    # -- the run and its engines --------------------------------------------------------------------------------------
    def run(self) -> RunRow:
        """Returns the progress of the run."""
        if self._order_store.run is None:
            raise Refusal("run-starts", "the run is starting", headers={"Retry-After": RETRY_S})
        return self._order_store.run

    def stop(self) -> Answer:
        """Places the order that ends the run, or returns the open order."""
        order = next((open_order for open_order in self._order_store.open_orders() if open_order.kind == "stop"), None)
        return Answer(body=order or self._order_store.place("stop", {}), status=202)

    def engines(self) -> dict[str, Any]:
        """Returns all present and earlier engines of the run."""
        return {"engines": self._order_store.engines()}

    def engine(self, name: str) -> EngineRow:
        """Returns one engine."""
        row = next((engine for engine in self._order_store.engines() if engine.id == name), None)
        if row is None:
            raise Refusal("unknown-id", "this run has no such engine", key="engine", value=name[:100])
        return row

    # -- orders for engines -------------------------------------------------------------------------------------------
    def scale_out(self, body: dict[str, Any], key: str | None) -> Answer:
        """Accepts an order that adds engines: up to a total number, or external servers at given addresses."""
        self._check_goes_on()
        engines = self._order_store.engines()
        now, urls = _present(engines), body.get("engine_urls")
        if urls:
            more = len(self._unknown(engines, urls))
        else:
            self._check_target(body["num_replicas"])
            more = max(0, body["num_replicas"] - now)
        if (known := self._order_store.known("scale_out", body, key)) is not None:
            return _taken(known)
        if urls and now + more > self._limits.most:
            raise Refusal(
                "no-room",
                f"the run has {now} engines, and engine.elastic.max_count={self._limits.most}",
                key="engine_urls",
                value=str(more),
                fix="send fewer addresses, or raise the key and start again",
            )
        status: Literal["PENDING", "NOOP"] = "PENDING" if more else "NOOP"
        if body["dry_run"]:
            dry = DryRun(status=status, engines_now=now, engines_then=now + more, engine_ids=[])
            return Answer(body=dry if urls or not more else with_room(dry, self._room, more=more))
        return _taken(self._order_store.place("scale_out", body, status=status, key=key, queues=bool(urls)))

    def scale_in(self, body: dict[str, Any], key: str | None) -> Answer:
        """Accepts an order that removes engines: down to ``num_replicas``, or by id or address."""
        self._check_goes_on()
        engines = self._order_store.engines()
        if body.get("engine_urls"):
            body["engine_ids"] = self._at(engines, body["engine_urls"])
        elif body.get("engine_ids"):
            body["engine_ids"] = [engine_number(name) for name in body["engine_ids"]]
        else:
            self._check_target(body["num_replicas"])
        body = {"num_replicas": None, "engine_ids": None, **body}
        if (known := self._order_store.known("scale_in", body, key)) is not None:
            return _taken(known)
        if body["engine_ids"]:
            gone = self._added(engines, body["engine_ids"])
        else:
            added = [row.number for row in engines if row.present and row.number >= self._limits.start]
            gone = added[body["num_replicas"] - self._limits.start :]
        status: Literal["PENDING", "NOOP"] = "PENDING" if gone else "NOOP"
        if body["dry_run"]:
            now = _present(engines)
            names = [engine_id(engine) for engine in gone]
            return Answer(body=DryRun(status=status, engines_now=now, engines_then=now - len(gone), engine_ids=names))
        return self._place("scale_in", body, useful=bool(gone), key=key)

    def _place(
        self, kind: Kind, body: dict[str, Any], *, useful: bool, key: str | None, queues: bool = False
    ) -> Answer:
        return _taken(
            self._order_store.place(kind, body, status="PENDING" if useful else "NOOP", key=key, queues=queues)
        )

    def _check_goes_on(self) -> None:
        if self.run().stopping:
            raise Refusal("run-ends", "the run is ending", headers={"Retry-After": "60"})

    def _check_target(self, engines: int) -> None:
        start, most, wrong = self._limits.start, self._limits.most, str(engines)
        if engines < start:
            message = f"the run keeps the {start} engines of its start"
            raise Refusal("too-few-engines", message, key="num_replicas", value=wrong, fix=f"send at least {start}")
        if engines > most:
            message = f"engine.elastic.max_count={most} is the largest number of engines"
            fix = f"send at most {most}, or raise the key and start again"
            raise Refusal("too-many-engines", message, key="num_replicas", value=wrong, fix=fix)

    def _unknown(self, engines: Sequence[EngineRow], urls: Sequence[str]) -> list[str]:
        """Returns the addresses of servers that have not joined and are not in an open order."""
        known = {row.url for row in engines if row.present}
        for order in self._order_store.open_orders():
            known |= set(order.body.get("engine_urls") or ())
        return [url for url in urls if url not in known]

    def _at(self, engines: Sequence[EngineRow], urls: Sequence[str]) -> list[int]:
        """Returns the number of the newest engine at each address. Refuses an address without an engine."""
        newest = {row.url: row.number for row in engines if row.origin == "external"}
        for url in urls:
            if url not in newest:
                raise Refusal("unknown-id", f"no engine of this run joined by {url}", key="engine_urls", value=url)
        return [newest[url] for url in urls]

    def _added(self, engines: Sequence[EngineRow], numbers: Sequence[int]) -> list[int]:
        """Returns the given engines that are present. Refuses unknown engines and engines that the run started with."""
        rows = {row.number: row for row in engines}
        for number in numbers:
            name = engine_id(number)
            if number not in rows:
                raise Refusal("unknown-id", f"{name} is not an engine of this run", key="engine_ids", value=name)
            if rows[number].origin == "start":
                message = f"{name} is an engine of the start, which cannot be removed"
                raise Refusal("engine-of-the-start", message, key="engine_ids", value=name, fix="leave it out")
        return [number for number in dict.fromkeys(numbers) if rows[number].present]

    def orders(self, kind: Kind, status: State | None, limit: int, offset: int) -> dict[str, Any]:
        """Returns one page of orders, newest first."""
        found = self._order_store.orders(kind, status=status)[offset : offset + limit]
        return {"requests": found, "limit": limit, "offset": offset}

    def order(self, kind: Kind, name: str) -> Order:
        """Returns one order."""
        order = self._order_store.order(name)
        if order is None or order.kind != kind:
            message = f"this run has no such order of kind {kind}"
            raise Refusal("unknown-id", message, key="request_id", value=name[:100])
        return order

    def cancel(self, kind: Kind, name: str) -> Answer:
        """Requests the cancellation of an order."""
        return Answer(body=self._order_store.ask_cancel(self.order(kind, name).request_id), status=202)

    def cancel_many(self, status: State | None, dry_run: bool) -> dict[str, Any]:
        """Requests the cancellation of the open orders that add engines."""
        return {
            "dry_run": dry_run,
            "requests": self._order_store.cancel_many("scale_out", status=status, dry_run=dry_run),
        }

    # -- the autoscaler -----------------------------------------------------------------------------------------------
    def autoscaler(self) -> dict[str, Any]:
        """Returns whether the autoscaler is on."""
        return {"enabled": self._order_store.autoscaler}

    def conditions(self) -> Any:
        """Returns the newest decision of the autoscaler."""
        if self._order_store.last_decision is None:
            raise Refusal("unknown-id", "the autoscaler has not decided yet", fix="turn it on, and ask again")
        return self._order_store.last_decision

    def scale_history(self, limit: int, offset: int) -> dict[str, Any]:
        """Returns one page of the decisions that changed the number of engines, newest first."""
        return {"decisions": self._order_store.decisions()[offset : offset + limit], "limit": limit, "offset": offset}

    def enable(self, enabled: bool) -> dict[str, Any]:
        """Turns the autoscaler on or off."""
        self._order_store.enable_autoscaler(enabled)
        return self.autoscaler()


def _present(engines: Sequence[EngineRow]) -> int:
    return sum(row.present for row in engines)


def _refused(refusal: Refusal) -> Answer:
    return Answer(body=refusal.problem, status=refusal.status, headers=refusal.headers)


def _taken(order: Order) -> Answer:
    where = {"Location": f"/rollout/{order.kind}/{order.request_id}"}
    return Answer(body=order, status=200 if order.status == "NOOP" else 202, headers=where)


def with_room(dry: DryRun, room: EngineRoom | None, *, more: int) -> DryRun:
    """Returns the dry run with the resources of ``more`` engines.

    Adds warnings if the engines exceed the machine's resources, or if the samples in flight cannot fill them.
    """
    if room is None:
        return dry
    effect = replace(
        dry,
        memory_bytes=more * room.engine_bytes,
        free_memory_bytes=None if room.machine_cores is None else available_bytes(),
        cores=more * room.engine_cores,
        machine_cores=room.machine_cores,
        usable_engines=room.usable,
    )
    return replace(effect, warnings=list(_warnings(effect)))


def _warnings(dry: DryRun) -> Iterator[str]:
    assert dry.memory_bytes is not None and dry.usable_engines is not None and dry.cores is not None
    if dry.engines_then > dry.usable_engines:
        yield f"the samples in flight can fill {dry.usable_engines} engines, so more of them would get none"
    if dry.free_memory_bytes is not None and dry.memory_bytes > dry.free_memory_bytes:
        yield (
            f"they take {dry.memory_bytes / GIB:.1f} GiB at their peaks, and "
            f"{dry.free_memory_bytes / GIB:.1f} GiB of this machine are free"
        )
    if dry.machine_cores is not None and dry.cores >= dry.machine_cores:
        yield f"they compute on {dry.cores} cores, and the whole run has {dry.machine_cores} on this machine"


# -- The channel -------------------------------------------------------------------------------------------------------
MAX_REQUEST = 192 << 10  # limit in bytes; `request_guard` accepts bodies of 64 KiB
WRITE_S = 5.0  # timeout for writing a response to the gateway
END_S = 10.0
END = b"\n"  # marks the end of a complete response


def channel() -> tuple[socket.socket, socket.socket]:
    """Returns the gateway's end, which is non-blocking, and the controller's end."""
    gateway, controller = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    gateway.setblocking(False)
    return gateway, controller


async def ask(end: socket.socket, request: bytes, *, timeout_s: float) -> bytes | None:
    """Sends a request to the controller. Returns the answer, or None if the controller does not answer in time."""
    own, theirs = socket.socketpair()
    with own:
        with theirs:
            try:
                socket.send_fds(end, [request], [theirs.fileno()])
            except OSError:  # the queue is full
                return None
        own.setblocking(False)
        loop, parts = asyncio.get_running_loop(), []
        try:
            async with asyncio.timeout(timeout_s):
                while part := await loop.sock_recv(own, 1 << 16):
                    parts.append(part)
        except (OSError, TimeoutError):
            return None
    answer = b"".join(parts)
    return answer.removesuffix(END) if answer.endswith(END) else None


@contextmanager
def answering(end: socket.socket, answer: Callable[[bytes], bytes]) -> Iterator[None]:
    """Answers requests in a thread while the block runs. ``answer`` returns the response, without the end marker."""
    ending = os.eventfd(0)
    thread = threading.Thread(target=_answer_all, args=(end, answer, ending), name="orders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(ending, 1)
        thread.join(END_S)
        os.close(ending)


def _answer_all(end: socket.socket, answer: Callable[[bytes], bytes], ending: int) -> None:
    while ending not in select.select([end.fileno(), ending], [], [])[0]:
        request, descriptors, _, _ = socket.recv_fds(end, MAX_REQUEST, 1)
        with socket.socket(fileno=descriptors[0]) as asker:
            if _has_left(asker):
                continue
            asker.settimeout(WRITE_S)
            try:
                asker.sendall(answer(request) + END)
            except OSError as error:
                log.info("an answer to the gateway was not read: %s", error)


def _has_left(asker: socket.socket) -> bool:
    asker.setblocking(False)
    try:
        return asker.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
