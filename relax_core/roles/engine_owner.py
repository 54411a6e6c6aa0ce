"""Implements the owner of an engine process, which starts the engine, monitors it and sends it the newest weights.

If the engine dies, the owner starts a new engine process. The new process serves prompts only after it has loaded the
newest published weights and their digest matches (attested weights). If the owner dies, the engine's stdin closes and
the engine ends, too.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from relax_core.contracts.engine import SYNC_TIMEOUT_S, EngineError, EngineUnreachable, WeightManifest
from relax_core.contracts.monitor import Check, Finding, Monitor
from relax_core.contracts.outage import is_outage
from relax_core.engines.engine_process import EngineLaunch, EngineProcess, EngineStartLost
from relax_core.engines.held_port import HeldPort
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.engine_directory import engine_client
from relax_core.roles.gpu_turns import LOCK_FILE, GpuTurn, shared_gpus
from relax_core.roles.process_placement import node_address, node_id, shares_gpus
from relax_core.roles.role_context import RunContext, worker_name
from relax_core.roles.worker import EngineReport, Worker, WorkerStatus
from relax_core.weights.version_folder import PublishedUnreadable, read_latest, read_pushed, reading

ASK_S = 1.0
log = logging.getLogger(__name__)


class EngineHealth:
    """Polls the health of one engine process every second. It uses a thread, because the owner's calls may take long.

    ``kill`` is called once, after ``timeout_s`` seconds without an answer; `frozen_s` is then the number of seconds
    without an answer.
    """

    def __init__(self, client: EngineClient, *, timeout_s: float, kill: Callable[[], None]) -> None:
        self.frozen_s: float | None = None
        self._client = client
        self._timeout_s = timeout_s
        self._kill = kill
        self._answered = time.monotonic()
        check = Check(
            name="engine", every_s=ASK_S, look=self._look, act=self._end_frozen, in_thread=True, at_end=client.close
        )
        self._monitor = Monitor([check]).start()

    def end(self) -> None:
        """Ends the check; call this method when the process has exited or will exit now."""
        self._monitor.end()

    def _look(self) -> Finding | None:
        try:
            self._client.ready()
        except EngineUnreachable as error:
            silent_s = time.monotonic() - self._answered
            if silent_s >= self._timeout_s:
                self.frozen_s = silent_s
                return Finding(failed_part="the engine", how=f"froze: {error}")
            return None
        except EngineError as error:  # the engine has answered with an error
            log.warning("%s", error)
        self._answered = time.monotonic()
        return None

    def _end_frozen(self, finding: Finding) -> None:
        log.warning("%s; it is killed", finding)
        self._kill()


def how_it_ended(code: int, *, frozen_s: float | None) -> str:
    """Describes the end of a process with this exit code, as a sentence's predicate; negative codes are signals."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return how if frozen_s is None else f"froze (no answer for {frozen_s:.0f} s) and {how}"


WATCH_S = 0.25  # interval of the owner's checks in seconds; also the longest delay until a new engine gets weights
LOAD_S = 1.0  # interval of load requests in seconds


class WeightReconciler:
    """Decides when the owner, and not the trainer, sends weights to the engine.

    If the engine has no weights, or only weights from the owner, the owner sends weights at once, because the trainer
    may not know the engine's address yet. An engine has an old version during each push of the trainer. So the owner
    sends weights only if the push has ended and the engine still has an old version. If the engine rejects weights, or
    a push does not end, the owner sends weights again after the engine has kept one old version for ``retry_after_s``
    seconds.
    """

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._brought = -1
        self._offered = -1
        self._behind: tuple[int, float] | None = None  # the served version, and since when it is too old

    def brought(self, version: int) -> None:
        """Records that the engine serves ``version``, which the owner sent."""
        self._brought = version

    def offered(self, serving: int, version: int, *, now: float) -> None:
        """Records that the owner is about to send ``version``, which the engine may reject."""
        self._offered = version
        self._behind = serving, now

    def due(self, serving: int, wanted: int, *, pushed: int, now: float) -> bool:
        """Returns True if the owner must send the version ``wanted`` now.

        ``serving`` is the engine's version, -1 without weights. ``pushed`` is the newest version with a push that has
        ended, successfully or not. ``now`` is a monotonic time in seconds.
        """
        if serving >= wanted:
            self._behind = None
            return False
        if serving == -1:
            return True
        if self._behind is None or self._behind[0] != serving:
            self._behind = serving, now
        if wanted > self._offered and (serving == self._brought or pushed >= wanted):
            return True
        return now - self._behind[1] >= self._retry_after_s


class LoadMeter:
    """Requests an engine's load every `LOAD_S` seconds; ``newest`` has the fields of an `EngineReport`.

    If ``always`` is False, an engine without counted decode steps is polled only once, because only the gateway reads
    its load.
    """

    def __init__(self, *, always: bool) -> None:
        self.newest: dict[str, Any] = {}
        self._always, self._is_read = always, True
        self._asked = -LOAD_S
        self._tokens: tuple[float, int] | None = None  # time of the last request, and number of tokens until then

    def measure(self, client: EngineClient, *, now: float) -> None:
        """Requests the load if the interval has passed. If the engine does not answer, the load is unknown."""
        if now - self._asked < LOAD_S or not self._is_read:
            return
        self._asked = now
        try:
            load = client.loads()
        except EngineError:
            self.newest, self._tokens = {}, None
            return
        found: dict[str, Any] = {"running": int(load["running"]), "waiting": int(load["queued"])}
        if (count := load.get("generated_tokens")) is not None:
            if self._tokens is not None and count >= self._tokens[1]:  # a lower count means a restarted engine
                found["tokens_per_s"] = (count - self._tokens[1]) / (now - self._tokens[0])
            self._tokens = now, int(count)
        elif (rate := load.get("gen_throughput")) is not None:  # SGLang's value, which stays after the last request
            found["tokens_per_s"] = float(rate) if found["running"] else 0.0
        if (share := load.get("token_usage")) is not None:
            found["cache_share"] = float(share)
        if "decode_times" in load:
            found["decode_times"] = tuple(
                (int(size), int(steps), float(seconds), float(wait_s))
                for size, steps, seconds, wait_s in load["decode_times"]
            )
        self._is_read = self._always or "decode_times" in load
        self.newest = found if self._is_read else {}


class EngineOwner(Worker):
    """Owns the engine process ``rank``. The engine's address does not change when the process restarts."""

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        self._rank = rank
        self._address = threading.Event()
        self._url = ""
        self._serving = -1
        self._malformed = ""  # a client's reason for a restart
        self._meter = LoadMeter(always=context.config.gateway.name != "none")
        self._reconciler = WeightReconciler(SYNC_TIMEOUT_S)
        super().__init__(name, context)

    def endpoint(self, timeout_s: float) -> str:
        """Returns the engine's URL when the first process is up. Raises EngineError after ``timeout_s`` seconds."""
        if not self._address.wait(timeout_s):
            raise EngineError(f"{self.name} is not up after {timeout_s:.0f} s; see {self._log_file}")
        return self._url

    def replace_engine(self, why: str) -> None:
        """Restarts the engine after a client could not read its replies; ``why`` is the client's error.

        An external server is not restarted.
        """
        self._malformed = why

    def status(self) -> WorkerStatus:
        """Returns the worker's status with its engine."""
        if not self._address.is_set():
            return super().status()
        report = EngineReport(url=self._url, version=self._serving, **self._meter.newest)
        return replace(super().status(), engine=report)

    def media_node(self) -> str:
        """Returns Ray's id of the node with the engine's media folder, "" if the engine reads no media folder."""
        return node_id() if self.context.media_folder is not None else ""

    @property
    def _log_file(self) -> str:
        return str(self.context.log_dir / f"{self.name}.log")

    def _engine_launch(self, port: int) -> EngineLaunch:
        config = self.context.config
        joined = config.launcher.ray_address is not None
        return EngineLaunch(
            model_folder=self.context.model_folder,
            family=config.model.family,
            engine=config.engine,
            host=node_address(config.launcher) if joined else "127.0.0.1",
            beyond_loopback=joined,
            dtype=config.engine.dtype or config.model.dtype,
            token_file=self.context.token_file,
            log_file=self.context.log_dir / f"{self.name}.log",
            port=port,
            return_routed_experts=config.algo.routing_replay,
            stop_strings=bool(config.rollout.stop),
            media_folder=self.context.media_folder,
            shard_media=config.parallel.shard_media,
            shared_gpus=shared_gpus(self.context, self._rank),
        )

    def _first_port(self) -> int:
        engine = self.context.config.engine
        return engine.port + self._rank if engine.port and self._rank < engine.count else 0

    def _launch(self, port: int, held_port: HeldPort | None) -> EngineProcess:
        return EngineProcess.start(self._engine_launch(port), held_port=held_port)

    def work(self) -> None:
        """Runs the engine process, restarts it when it ends, and keeps its weights up to date."""
        with self._gpu_turn():
            process = self._launch_up(self._first_port())
            self._url = process.url
            self._address.set()
        health = self._watch_over(process)
        client = engine_client(self.context, self._url)
        try:
            while not self.stopping:
                code = process.poll()
                if code is not None:
                    health.end()
                    how = how_it_ended(code, frozen_s=health.frozen_s)
                    process = self._launch_again(process, f"{how}, after {self._malformed}" if self._malformed else how)
                    self._malformed = ""
                    health = self._watch_over(process)
                    client = engine_client(self.context, self._url)
                elif self._malformed:
                    log.warning("%s: its engine process is killed: %s", self.name, self._malformed)
                    os.kill(process.pid, signal.SIGKILL)
                    self._stopping.wait(WATCH_S)
                    continue
                self._reconcile(client)
                self._meter.measure(client, now=time.monotonic())
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
        """Restarts the engine process. Raises EngineUnreachable if the process has ended too often."""
        process.stop(timeout_s=0.0, keeps_port=True)  # the process has ended already; this call removes its files
        self._count_restart(how)
        with self._gpu_turn():
            return self._launch_up(process.port, process.held_port)

    def _gpu_turn(self) -> AbstractContextManager[None]:
        """Keeps the trainer's state off the GPUs while the block runs, if the engine shares them with the trainer."""
        if not shares_gpus(self.context.config):
            return nullcontext()
        limit_s = self.context.config.run.stall_timeout_s
        turn = GpuTurn(self.context.token_file.with_name(LOCK_FILE), timeout_s=limit_s, waiting=self.waiting)
        return turn.held(alone=False, what="the end of the trainer's turn on the GPUs", on=worker_name("actor", 0))

    def _launch_up(self, port: int, held_port: HeldPort | None = None) -> EngineProcess:
        """Starts the engine process.

        If the process is lost before its first answer, starts it again and counts a restart.

        If the first start of the run exits with an error or is late, raises `EngineStartLost`, because another start
        would fail in the same way.
        """
        while True:
            try:
                return self._launch(port, held_port)
            except EngineStartLost as lost:
                if lost.code is not None and lost.code < 0:
                    how = f"{how_it_ended(lost.code, frozen_s=None)} before it answered"
                else:
                    how = f"did not start again: {lost}"
                first = not self._url and not self.context.restarted
                if self.stopping or (first and (lost.code is None or lost.code >= 0)):
                    raise
                self._count_restart(how)

    def _count_restart(self, how: str) -> None:
        self.last_restart = how
        self.restarts += 1
        limit = self.context.config.run.max_restarts
        if self.restarts > limit:
            raise EngineUnreachable(
                f"{self.name}: its engine process ended {self.restarts} times, more than run.max_restarts={limit}; "
                f"the last process {how}; see {self._log_file}"
            )
        self._serving = -1
        self.set_state("starting", f"its engine process {how}; restart {self.restarts}")

    def _reading_newest(self) -> AbstractContextManager[WeightManifest]:
        """Yields the newest published version and keeps its file.

        Raises EngineError if this engine cannot get the version.
        """
        return reading(self.context.weights_folder, reader=self.name)

    def _reconcile(self, client: EngineClient) -> None:
        """Sends the newest published weights to the engine if the engine does not get them from the trainer's push."""
        try:
            latest = read_latest(self.context.weights_folder)
            if latest is None:
                self.set_state("waiting", "for the first published weights")
                return
            serving = self._serving = int(client.model_info()["weight_version"])
            pushed = read_pushed(self.context.weights_folder)
            if self._reconciler.due(serving, latest.version, pushed=pushed, now=time.monotonic()):
                time.sleep(WATCH_S / 5)  # the trainer's push may be in progress
                serving = int(client.model_info()["weight_version"])
                if serving < latest.version:
                    self._reconciler.offered(serving, latest.version, now=time.monotonic())
                    with self._reading_newest() as latest:
                        if client.update_weights(latest)["stall_ms"] > 0.0:  # 0: the trainer sent the weights first
                            self._reconciler.brought(latest.version)
                        serving = latest.version
        except (EngineError, PublishedUnreadable) as error:
            self.set_state("waiting", str(error))
            return
        except OSError as error:
            if not is_outage(error):
                raise
            self.set_state("waiting", f"for the disk of the published weights: {error.strerror}")
            return
        self._serving = serving
        self.set_state("running", f"{self._url} weights {serving}")
