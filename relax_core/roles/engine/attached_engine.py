"""The owner of an engine that the run attaches to; it sends weights, and neither starts nor ends the engine."""

from __future__ import annotations

from relax_core.contracts.engine import EngineUnreachable
from relax_core.registry import find_engine
from relax_core.roles.engine.engine_directory import engine_client
from relax_core.roles.engine.engine_owner import WATCH_S, EngineOwner


class AttachedEngineOwner(EngineOwner):
    """Owns the engine at ``engine.urls[rank]``.

    If the engine does not answer, the owner waits until the user has restarted it. The engine gets the newest weights
    before it gets prompts.
    """

    def media_node(self) -> str:
        """Returns "", because its clients send the pixels."""
        return ""

    def work(self) -> None:
        """Checks the engine and keeps its weights up to date until the run stops."""
        engine = self.context.config.engine
        self._url = engine.urls[self._rank].rstrip("/")
        client = engine_client(self.context, self._url)
        attach = find_engine(engine.name).attach
        assert attach is not None, "engine.urls is a key of kinds of engine with attach only"
        attach(client, engine.start_timeout_s, self.context.config.rollout)
        self._address.set()
        while not self.stopping:
            try:
                client.ready()
                self._reconcile(client)
                self._measure(client)
            except EngineUnreachable as error:
                self.set_state("waiting", str(error))
            self._stopping.wait(WATCH_S)
