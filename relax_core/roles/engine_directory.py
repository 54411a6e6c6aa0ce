"""Finds the run's engines, makes clients for them, and copies images and videos to the engines' nodes."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from relax_core.bus.factory import connect_bus
from relax_core.bus.ray_bus import RayBus, blocking
from relax_core.config.engine_checks import engine_count
from relax_core.contracts.bus import CALL_TIMEOUT_S
from relax_core.contracts.engine import REQUEST_TIMEOUT_S, SYNC_TIMEOUT_S, EngineUnreachable, PromptRequest
from relax_core.contracts.media import Media
from relax_core.engines.build_client import build_client
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.failure import failure_line
from relax_core.roles.role_context import BUS, ENGINE, RunContext, worker_name
from relax_core.weights.engine_members import MemberList

OWNER_S = 0.25  # a running owner returns its engine's address within this time


def engine_client(
    context: RunContext,
    url: str,
    *,
    attached: bool = False,
    model_folder: Path | None = None,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    control_timeout_s: float = SYNC_TIMEOUT_S,
) -> EngineClient:
    """Returns a client with the run's deadlines and token; with ``attached``, with the external servers' token.

    ``model_folder`` is the folder of a teacher's model; the default is the run's model.
    """
    return build_client(
        context.config.engine,
        url,
        model_folder=model_folder or context.model_folder,
        token_file=context.token_file,
        attached=attached,
        request_timeout_s=request_timeout_s,
        control_timeout_s=control_timeout_s,
        media_folder=context.media_folder,
        weights_folder=context.weights_folder,
    )


def member_list(context: RunContext) -> MemberList:
    """Returns a reader of the list of sampling engines."""
    return MemberList(context.weights_folder, count=engine_count(context.config))


class EngineDirectory:
    """Holds clients of the run's engines, by number.

    Addresses come from the engine owners, which may restart. So request the address again if an engine stops answering.
    `reachable` and `left` cover only engines that get the trainer's weight pushes. Servers that joined a run with
    started engines get the weights from their owners and are not covered. ``role`` is the role of the owners, by
    default the role of the sampling engines' owners. ``model_folders`` are the folders of the models that the engines
    serve, by default the run's model.
    """

    def __init__(self, context: RunContext, *, role: str = ENGINE, model_folders: Sequence[Path] | None = None) -> None:
        self._context = context
        self._role = role
        self._folders = model_folders
        self._members = member_list(context) if role == ENGINE else None
        self._clients: dict[int, EngineClient] = {}
        self._urls: dict[int, str] = {}  # of current and former clients
        self._left: list[str] = []  # addresses of engines that have left since the last `left`
        self._asked: dict[int, Any] = {}  # engine → the Ray reference of its owner's pending answer
        self._lock = threading.Lock()  # serialises `reachable`
        self._connecting: dict[int, threading.Lock] = defaultdict(threading.Lock)  # so an engine has one client

    def client(self, engine: int) -> EngineClient:
        """Returns an engine's client. Waits for the engine's owner; raises EngineUnreachable after the deadline."""
        with self._connecting[engine]:
            if engine not in self._clients:
                self._connect(engine, timeout_s=self._context.config.engine.start_timeout_s)
            return self._clients[engine]

    def _connect(self, engine: int, *, timeout_s: float) -> None:
        try:
            url = ray.get(self._ask(engine, timeout_s=timeout_s), timeout=timeout_s + 2.0)
        except (ValueError, RayError) as error:
            name = worker_name(self._role, engine)
            raise EngineUnreachable(f"{name}: its owner does not answer: {failure_line(error)}") from error
        self._clients[engine] = self._new_client(engine, url)

    def _ask(self, engine: int, *, timeout_s: float) -> Any:
        """Requests the engine's address from its owner.

        Returns a Ray reference; raises ValueError if no owner exists.
        """
        owner: Any = ray.get_actor(worker_name(self._role, engine), namespace=self._context.namespace)
        return owner.endpoint.remote(timeout_s)

    def _new_client(self, engine: int, url: str) -> EngineClient:
        self._urls[engine] = url
        attached = self._members is not None and bool(self._members.read().url_of(engine))
        folder = self._folders[engine] if self._folders else None
        return engine_client(self._context, url, attached=attached, model_folder=folder)

    def _numbers(self) -> Collection[int]:
        """Returns the numbers of the engines that `reachable` searches: engines that serve or have served prompts."""
        if self._members is not None:
            members = self._members.read()
            all_attached = bool(self._context.config.engine.urls)
            return [number for number in members.started if all_attached or not members.url_of(number)]
        return range(len(self._folders or ()))

    def reachable(self) -> list[EngineClient]:
        """Returns clients of the running engines that get the trainer's pushes, without engines that are still joining.

        Missing addresses are requested from the engine owners. The call that requests an address waits for it at most
        `OWNER_S` seconds; if the owner answers later, a later call uses the address.
        """
        with self._lock:
            asked: dict[int, Any] = {}
            numbers = self._numbers()
            for engine in (self._urls.keys() | self._asked.keys()) - set(numbers):
                self._leave(engine)
            for engine in set(numbers) - self._clients.keys() - self._asked.keys():
                with suppress(ValueError):  # the engine has no owner process yet
                    asked[engine] = self._ask(engine, timeout_s=0.0)
            if asked:
                ray.wait(list(asked.values()), num_returns=len(asked), timeout=OWNER_S)
            self._asked |= asked
            for engine, answer in list(self._asked.items()):
                if ray.wait([answer], timeout=0)[0]:
                    del self._asked[engine]
                    with suppress(RayError):  # the engine is not up or its owner has died: the next call retries
                        self._clients[engine] = self._new_client(engine, ray.get(answer, timeout=OWNER_S))
            return [self._clients[engine] for engine in sorted(self._clients)]

    def _leave(self, engine: int) -> None:
        """Closes the client of an engine that has left, after the client's current call."""
        client = self._clients.pop(engine, None)
        if (url := self._urls.pop(engine, None)) is not None:
            self._left.append(url)
        self._asked.pop(engine, None)
        if client is not None:
            threading.Thread(target=client.close, name=f"close {client.url}", daemon=True).start()

    def left(self) -> list[str]:
        """Returns the addresses of engines that `reachable` found to have left since the last call of `left`."""
        with self._lock:
            left, self._left = self._left, []
            return left

    async def close_client(self, engine: int) -> None:
        """Closes the client of an engine that has left; call it in the event loop of `client_async`."""
        if (client := self._clients.get(engine)) is not None:
            await client.aclose()
        self._leave(engine)
        self._left.clear()

    async def client_async(self, engine: int, refresh: bool) -> EngineClient:
        """Returns an engine's client without blocking the event loop.

        With ``refresh`` it requests the address again.
        """
        if refresh:
            self._clients.pop(engine, None)
        if engine in self._clients:
            return self._clients[engine]
        return await asyncio.to_thread(self.client, engine)

    async def report_malformed(self, engine: int, why: str) -> None:
        """Requests a restart of the engine from its owner. ``why`` describes the reply that violated the protocol."""

        def report() -> None:
            with suppress(ValueError):  # the owner has ended
                owner: Any = ray.get_actor(worker_name(self._role, engine), namespace=self._context.namespace)
                owner.replace_engine.remote(why)

        await asyncio.to_thread(report)

    def forget(self, url: str) -> None:
        """Forgets this engine's address, so the next use requests it again."""
        self._clients = {engine: client for engine, client in self._clients.items() if client.url != url}


class EngineMedia:
    """Copies the media items of requests to the engine's node.

    ``find_bus`` returns the run's bus, and ``role`` is the role of the engine owners. An engine process does not use
    Ray and cannot call the bus. So its clients call the bus before they call the engine.
    """

    def __init__(self, context: RunContext, find_bus: Callable[[], RayBus], *, role: str) -> None:
        self._context, self._find_bus, self._role = context, find_bus, role
        self._nodes: dict[str, str] = {}  # by engine address, which changes when the engine restarts on another node

    async def fetch_requests(self, engine: int, client: EngineClient, requests: Sequence[PromptRequest]) -> None:
        """Waits until the engine's node has the items of requests, without blocking the event loop."""
        media = [medium for request in requests for medium in request.media]
        if media:
            await asyncio.to_thread(self.fetch, engine, client.url, media)

    def fetch(self, engine: int, url: str, media: Sequence[Media]) -> None:
        """Waits until the node of the engine at ``url`` has these items.

        Raises EngineUnreachable if the engine's owner does not answer, and the errors of
        `relax_core.contracts.bus.Bus.fetch_media`.
        """
        timeout_s = CALL_TIMEOUT_S
        if media and (node_id := self._node(engine, url, timeout_s=timeout_s)):
            digests = list({medium.item.digest: None for medium in media})
            blocking(self._find_bus().fetch_media(digests, node_id=node_id, timeout_s=timeout_s))

    def _node(self, engine: int, url: str, *, timeout_s: float) -> str:
        if url not in self._nodes:
            name = worker_name(self._role, engine)
            try:
                owner = ray.get_actor(name, namespace=self._context.namespace)
                self._nodes[url] = str(ray.get(owner.media_node.remote(), timeout=timeout_s))
            except (ValueError, RayError) as error:
                raise EngineUnreachable(f"{name}: its owner does not answer: {failure_line(error)}") from error
        return self._nodes[url]


def engine_media(context: RunContext, *, role: str = "engine") -> EngineMedia | None:
    """Returns an `EngineMedia`, or None if every engine can read the run's folder of media items.

    The `EngineMedia` searches the bus when it transfers the first item, because the bus may start later than this
    process.
    """
    if context.media_folder is None or context.config.launcher.ray_address is None:
        return None
    return EngineMedia(context, cache(lambda: connect_bus(BUS, context.namespace)), role=role)
