"""The watchdog reports a stall, with the wait graph of the workers, the blockers, and the blockers' stacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from relax_core.bus.ray_bus import blocking
from relax_core.contracts.bus import BusLost, BusTimeout, BusWait
from relax_core.contracts.monitor import Finding
from relax_core.contracts.outage import is_outage
from relax_core.contracts.process_trees import process_state
from relax_core.control.worker_health import WorkerHeartbeat
from relax_core.observe.panel import RoleState
from relax_core.roles.role_context import BUS, RunContext, worker_name
from relax_core.roles.worker import process_host

if TYPE_CHECKING:
    from relax_core.control.services import Services

LOG = "watchdog.log"
REPORTS = 5  # number of reports without a train step after which all services restart
BUS_S = 2.0  # timeout in seconds of the bus's answer, which normally takes milliseconds


class Watchdog:
    """Measures the time without a train step, and reports after each fifth of ``run.stall_timeout_s``.

    A separate thread makes the report, because it calls processes that may not answer. This thread calls ``stalled``
    with a short text. ``goes_on`` is called when a train step ends after a report.
    """

    def __init__(
        self,
        context: RunContext,
        services: Services,
        *,
        stalled: Callable[[str], None] = lambda words: None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> None:
        self._context = context
        self._services = services
        self._stalled, self._goes_on = stalled, goes_on
        self._is_shown = False
        self._since = self._reported = time.monotonic()

    def moved(self) -> None:
        """Resets the time, because a train step ended or the trainer's checkpoint made progress."""
        self._since = self._reported = time.monotonic()
        if self._is_shown:
            self._is_shown = False
            self._goes_on()

    def look(self, beats: Mapping[str, WorkerHeartbeat], roles: Sequence[RoleState], *, step: int) -> Finding | None:
        """Starts a report if it is due. Returns a finding for a stall beyond the limit.

        ``step`` is the number of finished train steps. The first step after a start may take ``run.start_timeout_s``
        longer.
        """
        now, run = time.monotonic(), self._context.config.run
        if now - self._reported >= run.stall_timeout_s / REPORTS:
            self._reported = now
            arguments = (dict(beats), step, now - self._since)
            threading.Thread(target=self._report, args=arguments, name="watchdog", daemon=True).start()
        limit_s, keys = run.stall_timeout_s, "run.stall_timeout_s"
        if step == self._context.start_step:
            limit_s, keys = limit_s + run.start_timeout_s, f"run.start_timeout_s and {keys}"
        if now - self._since <= limit_s:
            return None
        states = "; ".join(f"{role.name} {role.state} {role.since_s:.0f} s {role.detail}" for role in roles)
        return Finding(failed_part="no train step", how=f"ended for {limit_s:.0f} s ({keys}) at step {step}: {states}")

    def report(self, beats: Mapping[str, WorkerHeartbeat], *, step: int) -> str:
        """Returns a current report. It takes seconds, because it calls processes that may not answer."""
        idle_s = time.monotonic() - self._since
        return self._text(beats, f"the newest progress is {idle_s:.1f} s old, at step {step}")

    def _report(self, beats: Mapping[str, WorkerHeartbeat], step: int, idle_s: float) -> None:
        text = self._text(beats, f"no train step ended for {idle_s:.0f} s at step {step}")
        blockers = next((line.strip() for line in text.splitlines() if line.startswith("  blocker:")), "")
        self._is_shown = True
        self._stalled(f"no train step ended for {idle_s:.0f} s; {blockers}")
        print(text, file=sys.stderr, end="", flush=True)
        log = self._context.log_dir / LOG
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            if not is_outage(error):
                raise
            print(f"relax: {log} lacks this report: {error}", file=sys.stderr, flush=True)

    def _text(self, beats: Mapping[str, WorkerHeartbeat], what: str) -> str:
        waits: list[BusWait] | str
        try:
            waits = blocking(self._services.bus.waits(timeout_s=BUS_S))
        except (BusLost, BusTimeout) as error:
            waits = str(error)
        found = chain(beats, waits, start=worker_name("actor", 0))
        handles: Mapping[str, Any] = self._services.handles()
        now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        lines = [
            f"{now} {what}; which worker waits for which:",
            *(f"  {line}" for line in found.lines),
            f"  blocker: {', '.join(found.blockers)}",
        ]
        for name in found.blockers:
            if name == BUS:
                stacks = stacks_from_outside(self._services.bus_pid)
            else:
                stacks = stacks_of(beats.get(name), handles.get(name))
            lines += [f"  {name}: {stacks[0]}", *(f"    {line}" for line in stacks[1:])]
        return "\n".join(lines) + "\n"


# -- Builds the wait graph (which worker waits for which) from the statuses of workers and bus ------------------------

SILENT_S = 3.0  # seconds; after a longer time without an answer the waits of a worker are unknown


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Holds the chain of waits from one worker.

    ``lines`` describes all workers and the bus. ``blockers`` are the workers that do not answer, and the workers at the
    end of the chain; if the chain is a cycle, all members of the cycle.
    """

    lines: list[str]
    blockers: list[str]


def chain(beats: Mapping[str, WorkerHeartbeat], bus: Sequence[BusWait] | str, *, start: str) -> Chain:
    """Follows the waits from the worker ``start``.

    ``bus`` has the bus's waits, or the reason why it does not answer.
    """
    edges = {name: _owed_by(beat, bus, beats) for name, beat in beats.items()}
    frozen = [beat.name for beat in beats.values() if beat.silent_s > SILENT_S]
    lines = [line for beat in beats.values() for line in _lines(beat)]
    if isinstance(bus, str):
        lines.append(f"{BUS}: {bus}")
    else:
        lines += [f"{BUS}: {wait.text}; owed by {', '.join(wait.owed_by)}" for wait in bus]
    return Chain(lines=lines, blockers=list(dict.fromkeys([*frozen, *_ends(edges, start)])))


def _owed_by(beat: WorkerHeartbeat, bus: Sequence[BusWait] | str, beats: Mapping[str, WorkerHeartbeat]) -> list[str]:
    """Returns the names of the workers that this worker waits for; empty if this worker does not answer."""
    status = beat.alive
    if status is None or beat.silent_s > SILENT_S or status.state in ("done", "failed"):
        return []
    owed: dict[str, None] = {}
    for wait in status.waits:
        if wait.on != BUS:
            owed |= dict.fromkeys(_workers(wait.on, beats))
            continue
        inside = (
            []
            if isinstance(bus, str)
            else [bus_wait for bus_wait in bus if worker_name(bus_wait.task, bus_wait.worker) == beat.name]
        )
        if not inside:
            owed[BUS] = None  # the bus has not received the call yet, or does not answer
        for bus_wait in inside:
            owed |= dict.fromkeys(name for role in bus_wait.owed_by for name in _workers(role, beats))
    return list(owed)


def _workers(role: str, beats: Mapping[str, WorkerHeartbeat]) -> list[str]:
    """Returns the workers of a role, or the worker with this name.

    The trainer's lead represents all ranks of the trainer.
    """
    if role == "actor":
        return ["actor-0"]
    return [name for name in beats if name.rpartition("-")[0] == role] or [role]


def _ends(edges: Mapping[str, Sequence[str]], start: str) -> list[str]:
    """Returns the workers reached from ``start`` that wait for no worker, or for themselves.

    If no such worker exists, returns all reached workers, because they wait in a cycle.
    """
    reached: dict[str, None] = {start: None}
    queue = [start]
    while queue:
        for name in edges.get(queue.pop(), ()):
            if name not in reached:
                reached[name] = None
                queue.append(name)
    return [name for name in reached if not edges.get(name) or name in edges[name]] or list(reached)


def _lines(beat: WorkerHeartbeat) -> list[str]:
    status = beat.alive
    if status is None:
        return [f"{beat.name}: {beat.life} {beat.cause.partition(chr(10))[0]}".rstrip()]
    silent = f", silent for {beat.silent_s:.0f} s" if beat.silent_s > SILENT_S else ""
    head = f"{beat.name}: {status.state} {status.detail} for {time.time() - status.since:.0f} s{silent}"
    now = time.time()
    return [head, *(f"{beat.name}: waits {now - w.since:.0f} s on {w.on} for {w.what}" for w in status.waits)]


# -- Collects the Python stacks of a process: from the process itself, or with py-spy if it does not answer -----------

ASK_S = 2.0
DUMP_S = 10.0


def stacks_of(beat: WorkerHeartbeat | None, handle: Any) -> list[str]:
    """Returns lines with the stacks of a worker's threads.

    If the worker does not answer, the lines come from `stacks_from_outside`.
    """
    if beat is None or beat.status is None:
        return ["it has not answered yet"]
    status = beat.status
    if beat.life != "alive":
        return [f"it is {beat.life}: {beat.cause}"]
    try:
        stacks: dict[str, str] = ray.get(handle.stacks.remote(), timeout=ASK_S)
    except GetTimeoutError:
        if status.host != process_host():
            return [f"pid {status.pid} on another host does not answer"]
        return stacks_from_outside(status.pid)
    except RayActorError as error:
        return [f"pid {status.pid} has exited: {str(error).splitlines()[0]}"]
    lines = [f"pid {status.pid}, {status.state}"]
    for thread, stack in stacks.items():
        lines += [f"thread {thread}:", *stack.splitlines()]
    for pid in status.child_pids:
        lines += [f"its child {pid}: {line}" for line in stacks_from_outside(pid)]
    return lines


def stacks_from_outside(pid: int) -> list[str]:
    """Returns lines with the state of a process and, if py-spy is installed, py-spy's dump of its stacks."""
    lines = [f"pid {pid}, state {process_state(pid)}"]
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return lines
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=DUMP_S, check=False)
    except subprocess.TimeoutExpired:
        return [*lines, f"py-spy did not answer within {DUMP_S:.0f} s"]
    return [*lines, *(dump.stdout or dump.stderr).strip().splitlines()]
