"""Sends the event log of a run to its trackers.

Each tracker runs in a child process, which stores its position in the log.

The position of a tracker is a cursor in ``RUN/trackers/NAME.json``. While a tracker is down or slow, its events stay in
the log, and other processes do not wait for the tracker. After a restart it continues from its cursor, also in a
resumed run. Memory use, output and crashes of a tracker library affect only the child process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relax_core.contracts.child_process import Child, cause_in_log, module_command
from relax_core.contracts.outage import is_outage
from relax_core.contracts.sink import BaseSink, SinkStart
from relax_core.observe.event_log import EventReader, Record
from relax_core.registry import FILE_SINKS, find_sink, short_name

if TYPE_CHECKING:
    from relax_core.config.schema import TrackerConfig

FOLDER = "trackers"
LOOK_S = 0.5  # pause between two reads of the log
ALIVE_S, HANGS_S = 5.0, 90.0  # heartbeat interval of a child, and time without a heartbeat after which it is killed
SURE_S = 20.0  # a child is healthy after running for this time
END_S = 2.0  # time for children to end after a failed start of a run
LEFT_S = 20.0  # a child exits this long after the controller's end, even if its library hangs
LOCK_S = 60.0  # time to wait for a child of an earlier controller, which may still send its last events
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0  # pause before a retry, doubled after each failure


class TrackerState(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a tracker's progress: the cursor, the number of sent events, and the reason for the last failure, or ""."""

    cursor: dict[str, int] = {}
    records: int = 0
    problem: str = ""


class Tracker(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a tracker's name, its sink plug-in, and the user's configuration of the sink."""

    name: str
    plugin: str
    values: dict[str, Any] = {}


class TrackersStart(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the start parameters of a child. ``temporary`` is its private folder. The child removes the folder."""

    run_dir: str
    temporary: str
    trackers: list[Tracker]


def trackers_of(config: TrackerConfig) -> list[list[Tracker]]:
    """Returns the enabled trackers of ``tracker``, grouped by process.

    The trackers that write Relax's files share one process.

    Imports no plug-in. Raises ValueError if ``tracker.sinks`` is neither a list nor a mapping.
    """
    from relax_core.config.plugin_types import plugins_of  # imports OmegaConf, which a child does not need

    own = ["jsonl", *(["tensorboard"] if config.tensorboard else [])]
    plugins = [
        [Tracker(name=short_name(plugin), plugin=plugin, values=dict(values))]
        for plugin, values in plugins_of(config.sinks, key="tracker.sinks")
    ]
    return [[Tracker(name=name, plugin=name) for name in own], *plugins]


def read_state(run_dir: Path, name: str) -> TrackerState:
    """Returns a tracker's progress."""
    try:
        return msgspec.json.decode((run_dir / FOLDER / f"{name}.json").read_bytes(), type=TrackerState)
    except FileNotFoundError:
        return TrackerState()


# -- In the controller ------------------------------------------------------------------------------------------------
class Trackers:
    """Starts the child processes of a run's trackers, and restarts a child that dies or hangs. Not thread-safe."""

    def __init__(self, config: TrackerConfig, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children = [_TrackerChild(run_dir, trackers) for trackers in trackers_of(config)]
        self._failing: set[str] = set()

    def check(self) -> list[str]:
        """Restarts dead and hanging children. Returns a sentence for each tracker that began to fail."""
        for child in self._children:
            child.keep_up()
        problems = self._problems()
        new = [problem for name, problem in problems.items() if name not in self._failing]
        self._failing = set(problems)
        return new

    def close(self, *, records: int, timeout_s: float) -> tuple[list[str], dict[str, int]]:
        """Lets the trackers send the remaining events, and ends the child processes.

        ``records`` is the number of events in the log. Returns a sentence for each tracker with missing events, and a
        mapping tracker name → number of missing events.
        """
        deadline = time.monotonic() + timeout_s
        for child in self._children:
            child.begin_end()
        lacking: dict[str, int] = {}
        for child in self._children:
            if not child.end(deadline=deadline):
                states = {tracker.name: read_state(self._run_dir, tracker.name) for tracker in child.trackers}
                lacking |= {name: missing for name, state in states.items() if (missing := records - state.records) > 0}
        problems = self._problems()
        lines = [
            f"metrics: {name} lacks {missing:,} records, which are sent if the run is resumed"
            + (f": {problems[name]}" if name in problems else "")
            for name, missing in lacking.items()
        ]
        return lines, lacking

    def end(self) -> None:
        """Ends all running children, even children with unsent events."""
        for child in self._children:
            child.begin_end()
        for child in self._children:
            child.end(deadline=time.monotonic() + END_S)

    def _problems(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for child in self._children:
            for tracker in child.trackers:
                problem = read_state(self._run_dir, tracker.name).problem or child.problem
                if problem:
                    found[tracker.name] = f"metrics: {tracker.name} cannot be written: {problem}. The run goes on."
        return found


class _TrackerChild:
    """Manages one child process. The child's output goes to ``tracker-NAME.log`` in the run's log folder."""

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self.problem = ""  # reason for the child's last failure
        self._run_dir = run_dir
        self._log = run_dir / "logs" / f"tracker-{trackers[0].name}.log"
        self._pause_s = FIRST_PAUSE_S
        self._start()

    def _start(self) -> None:
        self._next_start = time.monotonic() + self._pause_s
        self._alive_from = time.time()
        self._temporary = tempfile.mkdtemp(
            prefix=f"relax-tracker-{self.trackers[0].name}-"
        )  # libraries leave files in it
        self._child = Child(
            module_command("relax_core.observe.trackers.tracker_process"),
            name=f"tracker {self.trackers[0].name}",
            log=self._log,
            stdout=None,
            environment={**os.environ, "TMPDIR": self._temporary},
        )
        start = TrackersStart(run_dir=str(self._run_dir), temporary=self._temporary, trackers=list(self.trackers))
        self._child.send(msgspec.json.encode(start) + b"\n")

    def keep_up(self) -> None:
        if self._child.poll() is None:
            if time.time() - self._alive_from > SURE_S:
                self.problem, self._pause_s = "", FIRST_PAUSE_S
            silent_s = time.time() - max(self._alive_from, *(self._alive_at(tracker.name) for tracker in self.trackers))
            if silent_s < HANGS_S:
                return
            self.problem = f"its process gave no heartbeat for {silent_s:.0f} s; {self._log} has its output"
            self._kill()
        else:
            self._remove_temporary()
            self.problem = self.problem or f"its process ended: {cause_in_log(self._log)}; see {self._log}"
        if time.monotonic() >= self._next_start:
            self._child.close_pipes()
            try:
                self._start()
            except OSError as error:
                if not is_outage(error):
                    raise
                self.problem = f"its process cannot be started: {error}"
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def begin_end(self) -> None:
        self._child.close_stdin()

    def end(self, *, deadline: float) -> bool:
        """Waits for the end of the child, at most until ``deadline``. Returns whether the child has sent all events."""
        code = self._child.wait(max(0.0, deadline - time.monotonic()))
        if code is None:
            self.problem = self.problem or "its process did not end in time"
        self._kill()
        return code == 0

    def _alive_at(self, name: str) -> float:
        try:
            return (self._run_dir / FOLDER / f"{name}.json").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _kill(self) -> None:
        self._child.kill()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)


# -- In the child -----------------------------------------------------------------------------------------------------
@dataclass
class _Follower:
    """Sends the log to one sink. If the sink does not accept a batch, retries it after growing pauses."""

    tracker: Tracker
    run_dir: Path

    def __post_init__(self) -> None:
        folder = self.run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"{self.tracker.name}.json"
        self._lock = self._file.with_suffix(".lock").open("w")
        _wait_for_lock(self._lock.fileno(), self.tracker.name)
        self._state = read_state(self.run_dir, self.tracker.name)
        self._reader = EventReader(self.run_dir, cursor=self._state.cursor)
        self._sink: BaseSink | None = None
        self._batch: list[Record] = []
        self._taken = 0  # events read since the last saved state
        self._pause_s, self._next_try = FIRST_PAUSE_S, 0.0
        self._saved = False  # whether the file has the newest state
        with suppress(OSError):  # the disk may be full
            self._save(problem="")

    def step(self, *, is_last: bool) -> bool:
        """Sends the next events. Returns True if there were events and the sink accepted them."""
        if not self._batch and time.monotonic() >= self._next_try:
            events = self._reader.read()
            self._taken += len(events)
            self._batch = [event for event in events if isinstance(event, Record)]
            if not events:
                if not self._saved:
                    with suppress(OSError):
                        self._save(problem="")
                return False
        if not is_last and time.monotonic() < self._next_try:
            return False
        try:
            self._write()
        except Exception as error:  # any error of a third-party library
            with suppress(OSError):  # the disk of the log may be full
                traceback.print_exc()
            self._next_try = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            with suppress(OSError):  # the disk may be full
                self._save(problem=f"{type(error).__name__}: {error}")
            return False
        self._batch, self._pause_s, self._next_try = [], FIRST_PAUSE_S, 0.0
        return True

    def close(self) -> bool:
        """Closes the sink, and returns whether all events were sent."""
        if self._sink is not None:
            self._sink.close()
        return not self._batch and not self._reader.read()

    def show_life(self) -> None:
        with suppress(OSError):  # a disk that is full or read-only
            os.utime(self._file)

    def _write(self) -> None:
        if self._batch:
            if self._sink is None:
                self._sink = _open(self.tracker, self.run_dir)
            self._sink.write(self._batch)
            self._sink.flush()
            self._batch = []  # cleared before the state is saved, because a full disk must not cause a second send
        self._state = TrackerState(cursor=self._reader.cursor, records=self._state.records + self._taken)
        self._taken, self._saved = 0, False
        self._save(problem="")

    def _save(self, *, problem: str) -> None:
        self._state = msgspec.structs.replace(self._state, problem=problem)
        partial = self._file.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(self._state))
        partial.replace(self._file)
        self._saved = True


def _open(tracker: Tracker, run_dir: Path) -> BaseSink:
    spec = find_sink(tracker.plugin)
    if tracker.plugin in FILE_SINKS:
        return spec.open(SinkStart(run_dir=run_dir), spec.config(name=tracker.plugin))
    from relax_core.config.plugin_types import plugin_config  # imports OmegaConf, which only such sinks need

    values: Mapping[str, Any] = tracker.values
    config = plugin_config("sink", tracker.plugin, values, section=f"tracker.sinks.{tracker.name}")
    return spec.open(SinkStart(run_dir=run_dir), config)


def _wait_for_lock(descriptor: int, name: str) -> None:
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is still written by the process of an earlier controller") from None
            time.sleep(LOOK_S)


def main() -> int:
    """Follows the log until the standard input closes, which means that the controller ended. Returns the exit code."""
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrackersStart)
    ending = threading.Event()
    threading.Thread(target=_wait_for_end, args=(ending, start.temporary), daemon=True, name="parent").start()
    followers = [_Follower(tracker, Path(start.run_dir)) for tracker in start.trackers]
    alive_at = 0.0
    while True:
        is_last = ending.is_set()  # all earlier events are in the log by now
        goes_on = [follower.step(is_last=is_last) for follower in followers]
        if is_last and not any(goes_on):
            break
        if time.monotonic() - alive_at > ALIVE_S:
            alive_at = time.monotonic()
            for follower in followers:
                follower.show_life()
        if not any(goes_on):
            ending.wait(LOOK_S)
    ends = [follower.close() for follower in followers]  # close all sinks, even if one has failed
    shutil.rmtree(start.temporary, ignore_errors=True)  # the controller may have died
    return 0 if all(ends) else 1


def _wait_for_end(ending: threading.Event, temporary: str) -> None:
    sys.stdin.buffer.read()
    ending.set()
    time.sleep(LEFT_S)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
