"""The owner of one engine process: starts it, watches it, brings it to the newest attested weights.

When the engine dies, its successor serves nothing until the newest published weights are in and their digest agreed.
When the owner dies, the engine's stdin closes and it ends too.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.engine.engine_directory import engine_client
from relax_core.roles.engine.engine_health import EngineHealth, how_it_ended
from relax_core.roles.process.process_placement import node_address
from relax_core.roles.process.role_context import RunContext
from relax_core.roles.process.worker import Worker
from relax_core.weights.version_folder import PublishedUnreadable, read_latest, read_pushed, reading

WATCH_S = 0.25  # how often the owner looks at its engine; also how late it may bring weights to a new one


class WeightReconciler:
    """When the owner brings weights itself. At once to a process that has none, or only what the owner brought: the
    trainer may not know its address yet. One that the trainer's pushes reach is behind during each of them: to that one
    when the push has ended and it is behind all the same. What it refuses is offered again after ``patience_s`` seconds
    at one version; so is what is still being pushed then."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._brought = -1
        self._offered = -1
        self._behind: tuple[int, float] | None = None  # version that it serves, and since when it is behind with it

    def brought(self, version: int) -> None:
        self._brought = version

    def offered(self, serving: int, version: int, *, now: float) -> None:
        """The owner is about to bring ``version``, which the engine may refuse."""
        self._offered = version
        self._behind = serving, now

    def due(self, serving: int, wanted: int, *, pushed: int, now: float) -> bool:
        """``pushed``: the newest version whose push has ended, well or not."""
        if serving >= wanted:
            self._behind = None
            return False
        if serving == -1:
            return True
        if self._behind is None or self._behind[0] != serving:
            self._behind = serving, now
        if wanted > self._offered and (serving == self._brought or pushed >= wanted):
            return True
        return now - self._behind[1] >= self._patience_s


class EngineHost(Worker):
    """Owner of engine ``rank``. Its address stays the same over restarts of the engine process."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        self._rank = rank
        self._address = threading.Event()
        self._url = ""
        self._catch_up = WeightReconciler(context.config.engine.sync_timeout_s)
        super().__init__(name, context)

    def endpoint(self, timeout_s: float) -> str:
        """The engine's URL; waits until the first process is up."""
        if not self._address.wait(timeout_s):
            raise EngineError(f"{self.name} is not up after {timeout_s:.0f} s; see {self._log_file}")
        return self._url

    @property
    def _log_file(self) -> str:
        return str(self.context.log_dir / f"{self.name}.log")

    def _engine_launch(self, port: int) -> EngineLaunch:
        config = self.context.config
        joined = config.launcher.ray_address is not None
        return EngineLaunch(
            model_folder=self.context.model_folder,
            engine=replace(config.engine, host=node_address(config.launcher)) if joined else config.engine,
            beyond_loopback=joined,
            dtype=config.engine.dtype or config.model.dtype,
            token_file=self.context.token_file,
            log_file=self.context.log_dir / f"{self.name}.log",
            port=port,
            return_routed_experts=config.algo.routing_replay,
            stop_strings=bool(config.rollout.stop),
        )

    def _first_port(self) -> int:
        port = self.context.config.engine.port
        return port + self._rank if port else 0

    def _launch(self, port: int) -> EngineProcess:
        return EngineProcess.start(self._engine_launch(port))

    def work(self) -> None:
        process = self._launch(self._first_port())
        self._url = process.url
        health = self._watch_over(process)
        self._address.set()
        client = engine_client(self.context, self._url)
        try:
            while not self.stopping:
                code = process.poll()
                if code is not None:
                    health.end()
                    process = self._launch_again(process, how_it_ended(code, frozen_s=health.frozen_s))
                    health = self._watch_over(process)
                    client = engine_client(self.context, self._url)
                self._reconcile(client)
                self._stopping.wait(WATCH_S)
        finally:
            health.end()
            process.stop(timeout_s=5.0)

    def _watch_over(self, process: EngineProcess) -> EngineHealth:
        self.child_pids = (process.pid,)
        timeout_s = self.context.config.run.heartbeat_timeout_s
        return EngineHealth(
            engine_client(self.context, process.url, control_timeout_s=timeout_s),
            timeout_s=timeout_s,
            kill=partial(os.kill, process.pid, signal.SIGKILL),
        )

    def _launch_again(self, process: EngineProcess, how: str) -> EngineProcess:
        """Raises EngineUnreachable where it has ended too often."""
        self.last_restart = how
        self.restarts += 1
        process.stop(timeout_s=0.0)  # it has ended; this removes what it left
        limit = self.context.config.run.max_restarts
        if self.restarts > limit:
            raise EngineUnreachable(
                f"{self.name}: its engine process ended {self.restarts} times, more than run.max_restarts={limit}; "
                f"the last one {how}; see {self._log_file}"
            )
        self.set_state("starting", f"its engine process {how}; restart {self.restarts}")
        return self._launch(process.port)

    def _reconcile(self, client: EngineClient) -> None:
        """Gives the engine the newest published weights where the trainer's own push does not reach it."""
        try:
            latest = read_latest(self.context.weights_folder)
            if latest is None:
                self.set_state("waiting", "for the first published weights")
                return
            serving = int(client.model_info()["weight_version"])
            pushed = read_pushed(self.context.weights_folder)
            if self._catch_up.due(serving, latest.version, pushed=pushed, now=time.monotonic()):
                time.sleep(WATCH_S / 5)  # the trainer's push may be on its way right now
                serving = int(client.model_info()["weight_version"])
                if serving < latest.version:
                    with reading(self.context.weights_folder, reader=self.name) as latest:
                        self._catch_up.offered(serving, latest.version, now=time.monotonic())
                        if client.update_weights(latest)["stall_ms"] > 0.0:  # else the trainer was faster
                            self._catch_up.brought(latest.version)
                        serving = latest.version
        except (EngineError, PublishedUnreadable) as error:
            self.set_state("waiting", str(error))
            return
        self.set_state("running", f"{self._url} weights {serving}")
