"""Adds engines to a running attempt of the services and removes them, without blocking.

A joining engine gets prompts only after it serves the newest published weights. A leaving engine gets no new prompts.
It finishes its open samples, or other engines continue these samples. Then its owner and its processes end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import ray
from ray.exceptions import RayError

from relax_core.contracts.engine import EngineError
from relax_core.control.engine_set import EngineSet
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.protocol.engine_client import TokenScores, TokensToScore
from relax_core.roles.engine_directory import engine_client
from relax_core.roles.failure import failure_line
from relax_core.roles.role_context import ENGINE, RunContext, worker_name
from relax_core.roles.worker import EngineReport
from relax_core.weights.version_folder import PublishedUnreadable, read_latest

DRAIN_TIMEOUT_S = 30.0  # seconds for a leaving engine's open samples; then other engines continue these samples
STOP_S = 10.0  # seconds that an owner may take to end its engine; then owner and engine are killed
# Stages: the owner starts; the owner starts the engine and checks its health; the engine gets weights; it serves.
JoinStage = Literal["CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "ACTIVE"]
MOVE_S = 10.0  # seconds until a leaving engine is removed even if its samples are not aborted
log = logging.getLogger(__name__)


class Probe(Protocol):
    """Declares the part of `relax_core.control.engine_changes.EngineProbe` that `EngineChanges` uses."""

    def start(self, url: str, *, attached: bool, reference: str) -> Future[str]:
        """Starts a comparison. The result is "", or why the engine at ``url`` must not serve.

        ``attached`` says that this engine is an external server.
        """


class EngineServices(Protocol):
    """Declares the part of the services that `EngineChanges` uses."""

    def start_engine(self, number: int) -> None:
        """Starts the owner of an engine."""

    def stop_engine(self, number: int, *, timeout_s: float) -> Any:
        """Asks an engine's owner to end. Returns the Ray reference of the answer."""

    def remove_engine(self, number: int) -> None:
        """Kills the remaining processes of an engine and forgets the engine."""

    def open_samples(self, number: int) -> list[Any]:
        """Asks each rollout worker for its number of open samples on an engine.

        Returns the Ray references of the numbers.
        """


@dataclass(kw_only=True)
class _Joining:
    """Holds the state of a joining engine, which must serve before ``deadline``.

    ``wanted`` is the newest weight version at the time when the engine was up. ``probed`` is the comparison with
    another engine, and ``url`` the engine's address in this comparison. ``waiting_reason`` says why the owner waits,
    such as weights that the engine refuses.
    """

    deadline: float
    wanted: int | None = None
    stage: JoinStage = "CREATING"
    probed: Future[str] | None = None
    url: str = ""
    waiting_reason: str = ""


@dataclass(kw_only=True)
class _Leaving:
    """Holds the state of a leaving engine. ``asked`` has the pending answers of the rollout workers."""

    move_at: float
    asked: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Ending:
    """Holds the state of a removed engine with an owner that is ending."""

    answer: Any
    deadline: float


class EngineChanges:
    """Advances the joining and leaving engines of one attempt at each `tick`, which takes milliseconds.

    ``folder`` contains the attempt's published weights. An engine must join within ``join_timeout_s`` seconds. A
    leaving engine may finish its open samples within ``drain_timeout_s`` seconds; then the samples move to other
    engines. ``probe`` compares a joining engine that has loaded its weights with an engine of the configuration.
    ``clock`` returns monotonic seconds.
    """

    def __init__(
        self,
        engines: EngineSet,
        services: EngineServices,
        *,
        folder: Path,
        join_timeout_s: float,
        drain_timeout_s: float,
        probe: Probe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._services = services
        self._folder = folder
        self._join_timeout_s = join_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._probe = probe
        self._clock = clock
        self._joining = {engine: self._deadline_of_join() for engine in engines.added("joining")}
        self._leaving: dict[int, _Leaving] = {}
        self._ending: dict[int, _Ending] = {}

    def _deadline_of_join(self) -> _Joining:
        return _Joining(deadline=self._clock() + self._join_timeout_s)

    def join(self, number: int, url: str = "") -> None:
        """Adds a joining engine with a reserved number and starts its owner.

        ``url`` is the address of a running server.
        """
        self._engines.add(number, url)
        self._joining[number] = self._deadline_of_join()
        self._services.start_engine(number)

    def stage(self, number: int) -> JoinStage:
        """Returns the stage of a joining engine, or "ACTIVE" for an engine that has joined."""
        return self._joining[number].stage if number in self._joining else "ACTIVE"

    def leave(self, number: int, *, at_once: bool = False, timeout_s: float | None = None) -> None:
        """Makes an added engine leave. With ``at_once`` its open samples move now. A joining engine is removed now.

        ``timeout_s`` replaces ``drain_timeout_s``.
        """
        if self._joining.pop(number, None) is not None:
            self._remove(number)
            return
        self._engines.set_state(number, "moving" if at_once else "leaving")
        drain_s = self._drain_timeout_s if timeout_s is None else timeout_s
        self._leaving[number] = _Leaving(move_at=self._clock() + (0.0 if at_once else drain_s))

    def stay(self, number: int) -> bool:
        """Makes a leaving engine serve again. Returns False if the engine was already removed."""
        if self._leaving.pop(number, None) is None:
            return False
        self._engines.set_state(number, "serving")
        return True

    def draining(self) -> Collection[int]:
        """Returns the leaving engines that can still stay."""
        return self._leaving.keys()

    def leaving(self) -> Collection[int]:
        """Returns all leaving engines, including removed engines with processes that are still ending."""
        return {*self._leaving, *self._ending}

    def tick(self, beats: Mapping[str, WorkerHeartbeat], *, ended: Mapping[str, str]) -> None:
        """Advances each engine according to its owner's newest heartbeat. ``ended`` maps ended owners to the reason."""
        for number in self._engines.added("joining", "serving", "leaving", "moving"):
            if why := ended.get(worker_name(ENGINE, number)):
                self.fail(number, why)
        for number, joining in list(self._joining.items()):
            self._tick_joining(number, joining, beats)
        for number, leaving in list(self._leaving.items()):
            self._tick_leaving(number, leaving)
        for number, ending in list(self._ending.items()):
            if self._clock() > ending.deadline or ray.wait([ending.answer], timeout=0)[0]:
                del self._ending[number]
                self._services.remove_engine(number)

    def _tick_joining(self, number: int, joining: _Joining, beats: Mapping[str, WorkerHeartbeat]) -> None:
        beat, report = beats.get(worker_name(ENGINE, number)), _report(beats, number)
        if beat is not None and beat.life == "alive":
            joining.stage = "HEALTH_CHECKING" if report is None else "WEIGHT_SYNCING"
            status = beat.status
            joining.waiting_reason = status.detail if status is not None and status.state == "waiting" else ""
        if joining.probed is not None and report is not None and report.url != joining.url:
            joining.probed = joining.wanted = None  # the owner restarted and started another engine process
        if joining.probed is not None and joining.probed.done():
            if why := joining.probed.result():
                self.fail(number, why)
            else:
                del self._joining[number]
                self._engines.set_state(number, "serving")
            return
        if joining.wanted is None and report is not None:
            joining.wanted = self._newest()
        ready = report is not None and joining.wanted is not None and report.version >= joining.wanted
        if report is not None and ready and joining.probed is None:
            if (reference := self._reference(beats)) is not None:
                attached = bool(self._engines.url_of(number))
                joining.url = report.url
                joining.probed = self._probe.start(report.url, attached=attached, reference=reference)
        elif self._clock() > joining.deadline:
            had = "is not up" if report is None else f"serves weights {report.version} and not {joining.wanted}"
            had = "was not compared with another engine" if ready else had
            self.fail(number, f"it {had} after {self._join_timeout_s:g} s{_because(joining)}")

    def _reference(self, beats: Mapping[str, WorkerHeartbeat]) -> str | None:
        """Returns the address of an engine of the configuration that has weights, or None."""
        reports = (_report(beats, number) for number in range(self._engines.count))
        return next((report.url for report in reports if report is not None and report.version >= 0), None)

    def _newest(self) -> int | None:
        try:
            latest = read_latest(self._folder)
        except PublishedUnreadable as error:
            log.warning("%s", error)
            return None
        return None if latest is None else latest.version

    def _tick_leaving(self, number: int, leaving: _Leaving) -> None:
        now = self._clock()
        if self._owes_nothing(number, leaving) or now > leaving.move_at + MOVE_S:
            del self._leaving[number]
            self._remove(number)
        elif now >= leaving.move_at and number not in self._engines.added("moving"):
            self._engines.set_state(number, "moving")

    def _owes_nothing(self, number: int, leaving: _Leaving) -> bool:
        """Polls the rollout workers.

        Returns True when all have answered that they have no open samples on the engine.
        """
        if not leaving.asked:
            leaving.asked = self._services.open_samples(number)
        if len(ray.wait(leaving.asked, num_returns=len(leaving.asked), timeout=0)[0]) < len(leaving.asked):
            return False
        answers, leaving.asked = leaving.asked, []
        try:
            return not any(ray.get(answers, timeout=0))
        except RayError as error:  # a rollout worker restarts; the next poll asks its new process
            log.info("%s: %s", worker_name(ENGINE, number), error)
            return False

    def fail_late(self, number: int, why: str) -> None:
        """Removes an engine that did not join in time. Adds the reason for its owner's wait to ``why``."""
        self.fail(number, f"{why}{_because(self._joining[number])}")

    def fail(self, number: int, why: str) -> None:
        """Removes a failed engine at once. ``why`` is the reason."""
        log.warning("%s leaves the run: %s", worker_name(ENGINE, number), why)
        self._joining.pop(number, None)
        self._leaving.pop(number, None)
        self._remove(number, failure=why)

    def _remove(self, number: int, *, failure: str = "") -> None:
        self._engines.remove(number, failure=failure)
        answer = self._services.stop_engine(number, timeout_s=STOP_S)
        self._ending[number] = _Ending(answer=answer, deadline=self._clock() + STOP_S)


def _because(joining: _Joining) -> str:
    return f": {joining.waiting_reason}" if joining.waiting_reason else ""


def _report(beats: Mapping[str, WorkerHeartbeat], number: int) -> EngineReport | None:
    """Returns the report of an engine's owner, or None if the owner or the engine is not up."""
    beat = beats.get(worker_name(ENGINE, number))
    return beat.alive.engine if beat is not None and beat.alive is not None else None


# -- Compares log-probs of a joining engine and an engine of the configuration, under the same weights ----------------

PROBE_TOKENS = 64
TOLERANCE = 1e-4  # an engine may join if no log-prob differs by more than this
PROBE_S = 30.0  # maximum time in seconds until the two engines have scored the tokens under the same version
TRY_S = 0.05
STRIDE = 7919  # a prime number, which spreads the tokens over any vocabulary


def probe_tokens(vocabulary: int, *, context_tokens: int) -> list[int]:
    """Returns fixed tokens: `PROBE_TOKENS`, or fewer if the context is shorter."""
    return [index * STRIDE % vocabulary for index in range(1, min(PROBE_TOKENS, context_tokens) + 1)]


class EngineProbe:
    """Compares the log-probs of engines of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def start(self, url: str, *, attached: bool, reference: str) -> Future[str]:
        """Compares the engine at ``url`` with the engine at ``reference`` in a thread.

        The result is "" if their log-probs agree, otherwise why the engine at ``url`` must not serve. ``attached`` says
        that this engine is an external server.
        """
        found: Future[str] = Future()

        def run() -> None:
            try:
                found.set_result(self._compare(url, reference, attached=attached))
            except Exception as error:  # an engine that cannot be compared does not serve; the run continues
                log.exception("the comparison of engine %s ended early", url)
                found.set_result(f"engine {url} was not compared with {reference}: {failure_line(error)}")

        threading.Thread(target=run, name="engine-probe", daemon=True).start()
        return found

    def _compare(self, url: str, reference: str, *, attached: bool) -> str:
        tokens = probe_tokens(
            PromptTokenizer(self._context.model_folder).vocabulary_size,
            context_tokens=self._context.config.engine.context_tokens,
        )
        item = TokensToScore(input_ids=tokens, first=1)
        clients = [
            engine_client(
                self._context, engine_url, attached=is_attached, request_timeout_s=PROBE_S, control_timeout_s=PROBE_S
            )
            for engine_url, is_attached in (
                (url, attached),
                (reference, False),
            )  # for the reference, engine.urls determines whether it is external
        ]
        deadline, last = time.monotonic() + PROBE_S, ""
        try:
            with ThreadPoolExecutor(2, thread_name_prefix="engine-probe") as pool:
                while time.monotonic() < deadline:
                    calls = [pool.submit(partial(client.score, [item], top_k=0, temperature=1.0)) for client in clients]
                    try:
                        (own,), (theirs,) = [call.result(max(0.0, deadline - time.monotonic())) for call in calls]
                    except (EngineError, TimeoutError) as error:
                        last = str(error) or "no answer"
                    else:
                        if own.version == theirs.version:
                            return self._verdict(url, own, theirs)
                        last = f"they served weights {own.version} and {theirs.version}"
                    time.sleep(TRY_S)
        finally:
            for client in clients:
                client.close()
        return f"engine {url} was not compared with {reference} within {PROBE_S:g} s: {last}"

    def _verdict(self, url: str, own: TokenScores, theirs: TokenScores) -> str:
        difference = float(np.abs(own.logprobs - theirs.logprobs).max())
        if difference <= TOLERANCE:
            return ""
        return (
            f"engine {url} computes other log-probs than the run's engines: log-probs of {len(own.logprobs)} tokens "
            f"differ by up to {difference:.3g} under weights {own.version}; "
            f"at most {TOLERANCE:g} is rounding. Its dtype, its quantisation or its model differs."
        )
