"""Defines `relax_core.run`: executes a run in a child process, from a script, a thread or a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, TextIO

from relax_core.api.function_reward import FUNCTION_FILE, RewardFunction, function_text, write_private
from relax_core.api.loaded_run import LoadedRun, Summary
from relax_core.api.run_child import LOCATION, PROBLEMS, REQUEST, USAGE
from relax_core.config.errors import ConfigError
from relax_core.contracts.child_process import Child, import_path, module_command
from relax_core.observe.event_log import ACTOR, EventReader, MetricRecord
from relax_core.observe.summary import SUMMARY_FILE

POLL_S = 0.2
END_S = 600.0  # limit for the end of a stopped run, which writes a checkpoint; the run's own limits are shorter
KEPT_LINES = 50  # number of kept lines of the run's stderr

OnStep = Callable[[int, Mapping[str, float]], bool | None]


class RunFailed(RuntimeError):
    """Reports that a run has failed.

    The text is the first cause. ``folder`` is the run's folder with logs, or None if the run had no folder yet.
    ``summary`` is None if the run failed before the first report.
    """

    def __init__(self, cause: str, *, folder: Path | None, summary: Summary | None) -> None:
        super().__init__(cause)
        self.folder = folder
        self.summary = summary


def run(
    overrides: Sequence[str] = (), *, reward: RewardFunction | None = None, on_step: OnStep | None = None
) -> Summary:
    """Executes a run to its end in separate processes, and returns the summary.

    The function may be called from any thread. ``overrides`` are key=value pairs as on the command line, such as
    ``["algo=grpo", "run.steps=20"]``. ``reward`` is a function of one `RewardInput` that returns a number or a
    `RewardOutput`; the function runs in worker processes. ``on_step(step, numbers)`` is called in the calling thread
    after each train step, with the metrics of docs/metrics.md. If ``on_step`` returns True, the run stops with a
    checkpoint, and the summary is returned.

    Raises `ConfigError` for a mistake in the configuration, before the run starts, and `RunFailed` for a failed run.
    After an error of ``on_step`` or a KeyboardInterrupt, the run first stops with a checkpoint; then the error is
    raised.
    """
    words = _checked_overrides(overrides, reward=reward)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="relax-run-") as name:  # only this user may enter it
        staging = Path(name)
        if reward is not None:
            write_private(staging / FUNCTION_FILE, function_text(reward))
        request = {"words": words, "function": reward is not None, "on_step": on_step is not None}
        (staging / REQUEST).write_text(json.dumps(request), encoding="utf-8")
        child = _RunProcess(staging)
        try:
            child.follow(on_step)
        except BaseException as error:
            child.stop(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            child.close()
        return _outcome(child, started=started)


def _checked_overrides(overrides: Sequence[str], *, reward: object) -> list[str]:
    """Returns the overrides as strings. Raises `ConfigError` if they are not a list of key=value pairs."""
    if isinstance(overrides, str):
        raise ConfigError([f"relax_core.run({overrides!r}): give a list, [{overrides!r}]."])
    words = [str(word) for word in overrides]
    if flags := [word for word in words if word.startswith("-") or "=" not in word]:
        raise ConfigError(
            [f"{flag}: relax_core.run takes key=value. Other words are for the command line." for flag in flags]
        )
    named = [word for word in words if word.partition("=")[0] in ("reward", "reward.name")]
    if reward is not None and named:
        raise ConfigError([f"{named[0]} with reward=function: a run has one reward. Drop one of the two."])
    return words


class _RunProcess:
    """Starts the child process of the run.

    ``code`` is the exit code of the process, or -N if signal N killed the process.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._stopping = False
        terminal = _is_terminal(sys.stdout)  # the child then writes its panel directly to the terminal
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._readers: list[threading.Thread] = []
        with ExitStack() as ends:
            self._child = Child(
                module_command("relax_core.api.run_child", str(staging)),
                name="the run",
                log=self._copied_to(sys.stderr, self.last_lines, ends),
                stdin=subprocess.DEVNULL,
                stdout=1 if terminal else self._copied_to(sys.stdout, deque(maxlen=1), ends),
                # The run can import all modules that this program can import. The run's output is read line by line.
                environment=os.environ | {"PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1"},
                with_parent=signal.SIGTERM,
            )

    def _copied_to(self, target: TextIO, kept: deque[str], ends: ExitStack) -> int:
        """Returns a descriptor, open until ``ends`` ends; a thread copies lines from the descriptor to ``target``."""
        read_end, write_end = os.pipe()
        ends.callback(os.close, write_end)
        self._readers.append(_reader(os.fdopen(read_end, "rb"), target, kept))
        return write_end

    @property
    def code(self) -> int:
        code = self._child.poll()
        assert code is not None
        return code

    def follow(self, on_step: OnStep | None) -> None:
        """Waits until the run has ended; calls ``on_step`` after each train step, also after repeated steps."""
        log: EventReader | None = None
        while True:
            ended = self._child.wait(POLL_S) is not None
            if on_step is not None:
                if log is None and (location := self.location()) is not None:
                    log = EventReader(Path(location["folder"]), cursor=location["events"], kinds=("numbers",))
                for event in log.each() if log is not None else ():
                    if not isinstance(event, MetricRecord) or event.source != ACTOR:
                        continue
                    if on_step(event.step, event.values) and not self._stopping:
                        self._stopping = True
                        self._child.send_signal(signal.SIGTERM)
            if ended:
                return

    def location(self) -> Any:
        """Returns the run's folder and the initial sizes of the event files in bytes; None before the folder exists."""
        file = self._staging / LOCATION
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def problems(self) -> list[str]:
        """Returns the errors of the configuration."""
        file = self._staging / PROBLEMS
        if file.exists():
            return [str(problem) for problem in json.loads(file.read_text(encoding="utf-8"))]
        messages = [line.removeprefix("relax: ") for line in self.last_lines if line.startswith("relax: ")]
        return messages[-1:] or ["the run could not be started"]

    def stop(self, number: signal.Signals) -> None:
        """Sends the signal and waits until the run has ended. Ctrl-C during the wait ends the run at once."""
        self._child.send_signal(number)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            try:
                if self._child.wait(POLL_S) is not None:
                    return
            except KeyboardInterrupt:
                self._child.send_signal(signal.SIGINT)
        self._child.kill()

    def close(self) -> None:
        """Waits for the remaining output of the ended process."""
        for reader in self._readers:
            reader.join(END_S)


def _reader(pipe: IO[bytes], target: TextIO, kept: deque[str]) -> threading.Thread:
    """Starts a thread that copies the run's output line by line to a stream, which may be a notebook's stream."""

    def copy_lines() -> None:
        with pipe:
            for line in pipe:
                text = line.decode(errors="replace")
                kept.append(text.rstrip("\n"))
                try:
                    target.write(text)
                    target.flush()
                except (OSError, ValueError):  # the stream has no reader or is closed; the run continues
                    pass

    thread = threading.Thread(target=copy_lines, name="relax-output", daemon=True)
    thread.start()
    return thread


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1 and os.isatty(1)
    except (OSError, ValueError, AttributeError):  # the stream of a notebook or a test has no descriptor
        return False


def _outcome(child: _RunProcess, *, started: float) -> Summary:
    """Returns the summary of the ended run. Raises `ConfigError` or `RunFailed` if the run failed."""
    if child.code == USAGE:
        raise ConfigError(child.problems())
    location = child.location()
    folder = None if location is None else Path(location["folder"])
    file = None if folder is None else folder / SUMMARY_FILE
    summary = None
    if folder is not None and file is not None and file.exists() and file.stat().st_mtime >= started:
        summary = LoadedRun(folder).summary
    if child.code < 0:
        raise RunFailed(f"the run was killed by {signal.Signals(-child.code).name}", folder=folder, summary=summary)
    if child.code in (0, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))):
        if summary is None:
            raise RunFailed("the run was stopped before its first step ended", folder=folder, summary=None)
        return summary
    if summary is not None:
        cause = summary.outcome.removeprefix("failed: ")
    else:
        failures = [line for line in child.last_lines if line.startswith("relax: failed: ")]
        cause = failures[-1].removeprefix("relax: failed: ") if failures else "\n".join(child.last_lines)
    raise RunFailed(cause, folder=folder, summary=summary)
