"""Brings images and videos to the nodes of the engines that are about to read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cache

import ray
from ray.exceptions import RayError

from relax_core.bus.factory import connect_bus
from relax_core.bus.ray.ray_bus import RayBus
from relax_core.contracts.bus import CALL_TIMEOUT_S
from relax_core.contracts.engine import EngineUnreachable, PromptRequest
from relax_core.contracts.media import Media
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.process.failure import failure_line
from relax_core.roles.process.role_context import BUS, RunContext, worker_name


class EngineMedia:
    """Brings the items of requests to the node of the engine that gets them.

    ``find_bus`` returns the run's bus, and ``role`` is that of the engines' owners. An engine process has no Ray, so
    its clients ask the bus before they ask the engine.
    """

    def __init__(self, context: RunContext, find_bus: Callable[[], RayBus], *, role: str) -> None:
        self._context, self._find_bus, self._role = context, find_bus, role
        self._nodes: dict[str, str] = {}  # by the engine's address, which changes if it restarts on another node

    async def bring_requests(self, engine: int, client: EngineClient, requests: Sequence[PromptRequest]) -> None:
        """Waits until the engine has the items of requests, without blocking the event loop."""
        media = [one for request in requests for one in request.media]
        if media:
            await asyncio.to_thread(self.bring, engine, client.url, media)

    def bring(self, engine: int, url: str, media: Sequence[Media]) -> None:
        """Waits until the engine at ``url`` has these items.

        Raises EngineUnreachable if its owner does not answer, and what `relax_core.contracts.bus.Bus.bring_media` does.
        """
        timeout_s = CALL_TIMEOUT_S
        if media and (node_id := self._node(engine, url, timeout_s=timeout_s)):
            digests = list({one.item.digest: None for one in media})
            self._find_bus().bring_media(digests, node_id=node_id, timeout_s=timeout_s)

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
    """Returns what brings items to the engines, or None if every engine reads the folder in which they are written.

    It finds the bus when the first item is brought, because the bus may start later.
    """
    if context.media_folder is None or context.config.launcher.ray_address is None:
        return None
    return EngineMedia(context, cache(lambda: connect_bus(BUS, context.namespace)), role=role)
