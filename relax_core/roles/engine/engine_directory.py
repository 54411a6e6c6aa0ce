"""How a role finds the run's engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from relax_core.contracts.engine import EngineUnreachable
from relax_core.engines.build_client import build_client
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.process.failure import failure_line
from relax_core.roles.process.role_context import RunContext, worker_name

OWNER_S = 0.25  # a living owner says its engine's address within this


def engine_client(
    context: RunContext, url: str, *, model_folder: Path | None = None, control_timeout_s: float | None = None
) -> EngineClient:
    """A client with the run's token and deadlines. ``model_folder``: of a teacher's model, where it is not the run's.
    ``control_timeout_s``: another one than engine.sync_timeout_s."""
    return build_client(
        context.config.engine,
        url,
        model_folder=model_folder or context.model_folder,
        token_file=context.token_file,
        control_timeout_s=control_timeout_s,
    )


class EngineDirectory:
    """Clients of the run's engines, by number. Addresses come from the engines' owners, which may have been restarted:
    ask afresh for one that stopped answering. ``role``: whose engines, by default those that sample;
    ``model_folders``: of the model that each of them serves, by default the run's."""

    def __init__(
        self, context: RunContext, *, role: str = "engine", model_folders: Sequence[Path] | None = None
    ) -> None:
        self._context = context
        self._role = role
        self._folders = model_folders or [context.model_folder] * context.config.engine.count
        self._clients: dict[int, EngineClient] = {}
        self._asked: dict[int, Any] = {}  # engine → its owner's answer to come
        self._lock = threading.Lock()  # of `reachable`

    def client(self, engine: int) -> EngineClient:
        """Waits for the engine's owner; raises EngineUnreachable past its deadline."""
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
        """Asks the engine's owner for its address; the answer is a reference of Ray's. Raises ValueError where there is
        no owner."""
        owner: Any = ray.get_actor(worker_name(self._role, engine), namespace=self._context.namespace)
        return owner.endpoint.remote(timeout_s)

    def _new_client(self, engine: int, url: str) -> EngineClient:
        return engine_client(self._context, url, model_folder=self._folders[engine])

    def reachable(self) -> list[EngineClient]:
        """Clients of the engines that are up. An owner is asked for the address of an engine that has none; one that is
        silent is waited for for a moment, once, and its answer is taken whenever it comes."""
        with self._lock:
            asked = {}
            for engine in set(range(len(self._folders))) - self._clients.keys() - self._asked.keys():
                with suppress(ValueError):  # it has no owner yet
                    asked[engine] = self._ask(engine, timeout_s=0.0)
            if asked:
                ray.wait(list(asked.values()), num_returns=len(asked), timeout=OWNER_S)
            self._asked |= asked
            for engine, answer in list(self._asked.items()):
                if ray.wait([answer], timeout=0)[0]:
                    del self._asked[engine]
                    with suppress(RayError):  # it is not up, or its owner is gone: it is asked again the next time
                        self._clients[engine] = self._new_client(engine, ray.get(answer, timeout=OWNER_S))
            return [self._clients[engine] for engine in sorted(self._clients)]

    async def client_async(self, engine: int, on_policy: bool) -> EngineClient:
        """The same for an event loop; ``on_policy`` asks for the address again."""
        if on_policy:
            self._clients.pop(engine, None)
        if engine in self._clients:
            return self._clients[engine]
        return await asyncio.to_thread(self.client, engine)

    def forget(self, url: str) -> None:
        """Asks for this engine's address anew at the next use."""
        self._clients = {engine: client for engine, client in self._clients.items() if client.url != url}
