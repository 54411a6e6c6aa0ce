"""The owner of one engine process: starts it, watches it, brings it to the newest attested weights.

When the engine dies, its successor serves nothing until the newest published weights are in and their digest agreed.
When the owner dies, the engine's stdin closes and it ends too.
"""

from __future__ import annotations

import threading
import time

from relax_core.contracts.engine import EngineError
from relax_core.engines.client import EngineClient
from relax_core.engines.process import EngineLaunch, EngineProcess
from relax_core.roles.context import RunContext
from relax_core.roles.engines import engine_client
from relax_core.roles.worker import Worker
from relax_core.weights.publisher import read_latest

WATCH_S = 0.25  # how often the owner looks at its engine; also how late it may bring weights to a new one


class EngineHost(Worker):
    """Owner of engine ``rank``. Its address stays the same over restarts of the engine process."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        self._rank = rank
        self._address = threading.Event()
        self._url = ""
        super().__init__(name, context)

    def endpoint(self, timeout_s: float) -> str:
        """The engine's URL; waits until the first process is up."""
        if not self._address.wait(timeout_s):
            raise EngineError(f"{self.name} is not up after {timeout_s:.0f} s; see {self._log_file}")
        return self._url

    @property
    def _log_file(self) -> str:
        return str(self.context.log_dir / f"{self.name}.log")

    def _launch(self, port: int) -> EngineProcess:
        config = self.context.config
        return EngineProcess.start(
            EngineLaunch(
                model_folder=self.context.model_folder,
                engine=config.engine,
                dtype=config.model.dtype,
                token_file=self.context.token_file,
                log_file=self.context.log_dir / f"{self.name}.log",
                port=port,
            )
        )

    def work(self) -> None:
        engine = self.context.config.engine
        port = engine.port + self._rank if engine.port else 0
        process = self._launch(port)
        self._url = process.url
        self._address.set()
        client = engine_client(self.context, self._url)
        try:
            while not self.stopping:
                code = process.poll()
                if code is not None:
                    self.restarts += 1
                    limit = self.context.config.run.max_restarts
                    if self.restarts > limit:
                        raise EngineError(
                            f"{self.name} ended {self.restarts} times (last exit {code}), more than "
                            f"run.max_restarts={limit}; see {self._log_file}"
                        )
                    self.set_state("starting", f"engine process ended with {code}; restart {self.restarts}")
                    process = self._launch(process.port)
                    client = engine_client(self.context, self._url)
                self._reconcile(client)
                self._stopping.wait(WATCH_S)
        finally:
            process.stop(timeout_s=5.0)

    def _reconcile(self, client: EngineClient) -> None:
        """Gives the engine the newest published weights where the trainer's own push has not reached it."""
        latest = read_latest(self.context.weights_folder)
        if latest is None:
            self.set_state("waiting", "for the first published weights")
            return
        try:
            serving = int(client.model_info()["weight_version"])
            if serving < latest.version:
                time.sleep(WATCH_S / 5)  # the trainer's push may be on its way right now
                if int(client.model_info()["weight_version"]) < latest.version:
                    client.update_weights(latest)
        except EngineError as error:
            self.set_state("waiting", str(error))
            return
        self.set_state("running", f"{self._url} weights {max(serving, latest.version)}")
