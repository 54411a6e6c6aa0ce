"""Guards one agent: ``python -I -S agent_guard.py GRACE_S MODE COMMAND…`` starts an agent and ends its processes.

The guard is the parent of the agent. It is also a subreaper: orphaned processes of the agent become children of the
guard. The owner is the Relax process that started the guard. The guard ends all processes of the agent when the agent
ends, when the owner requests the end, or when the owner dies, which closes stdin. The guard imports only the standard
library, because a guard may start for every episode.

With MODE "warm" the agent plays several tasks, one per line of its stdin. The owner writes lines to the guard's stdin.
The line "K" kills the agent at once. A line that begins with "T" is a task: the guard writes the text after "T" to the
stdin of a warm agent. When the guard's stdin ends, the guard sends SIGTERM to the agent, and SIGKILL after GRACE_S
seconds.

The guard writes one JSON object per line to its stdout: the pid of the agent, then each JSON object that a warm agent
wrote as a line to its stdout, and last the exit code with the newest `KEPT_BYTES` of the agent's output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

KEPT_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20  # limit of a warm agent's answer; a longer line is treated as output
_READ_BYTES = 1 << 16
_KILL_S = 10.0  # seconds after SIGKILL; a process that still exists then hangs in the kernel
_PAUSE_S = 0.01
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


class Output:
    """Keeps the newest `KEPT_BYTES` of an agent's output."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._dropped = False

    def add(self, part: bytes) -> None:
        """Adds output."""
        self._kept += part
        if len(self._kept) > KEPT_BYTES:
            self._dropped = True
            del self._kept[:-KEPT_BYTES]

    def text(self) -> str:
        """Returns the kept output, with a mark if older output was dropped."""
        return ("[…]" if self._dropped else "") + self._kept.decode(errors="replace")


class Agent:
    """Holds the agent's process and its pipes; only a warm agent has the pipes ``stdin`` and ``answers``."""

    def __init__(self, command: Sequence[str], *, warm: bool, libc: Any) -> None:
        output, output_end = os.pipe()
        answers, answers_end = os.pipe() if warm else (-1, output_end)
        stdin_end, stdin = os.pipe() if warm else (os.open(os.devnull, os.O_RDONLY), -1)
        guard = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _become(command, libc, guard, stdin=stdin_end, stdout=answers_end, stderr=output_end)
        for end in {output_end, answers_end, stdin_end}:
            os.close(end)
        self.output, self.answers, self.stdin = output, answers, stdin
        for pipe in (output, *((answers, stdin) if warm else ())):
            os.set_blocking(pipe, False)
        self.ended = os.pidfd_open(self.pid)
        self.status: int | None = None

    def reap(self) -> None:
        """Reaps ended children: the agent, and its orphaned processes."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    self.status = ended[1]
        except ChildProcessError:
            pass


def _become(command: Sequence[str], libc: Any, guard: int, *, stdin: int, stdout: int, stderr: int) -> NoReturn:
    """Replaces the forked child process with the agent's program."""
    try:
        os.setsid()
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        for end, descriptor in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(end, descriptor)
        for signum in _IGNORED:
            signal.signal(signum, signal.SIG_DFL)
        with open("/proc/self/oom_score_adj", "w") as score:  # the OOM killer kills agents before the run
            score.write("1000")
        os.closerange(3, 1 << 16)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


class AgentGuard:
    """Watches one agent until the agent has ended, and then ends the agent's remaining processes."""

    def __init__(self, agent: Agent, *, grace_s: float, warm: bool) -> None:
        self._agent = agent
        self._grace_s = grace_s
        self._warm = warm
        self._output = Output()
        self._owner_line = self._answer_line = b""
        self._tasks = bytearray()  # not yet written to the agent's stdin
        self._ends_at: float | None = None
        self._poll = select.poll()
        for descriptor in (0, agent.output, agent.ended, *((agent.answers,) if warm else ())):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        """Returns when the agent and all of its processes have ended."""
        tell({"pid": self._agent.pid})
        while self._agent.status is None:
            left = None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())
            for descriptor, _ in self._poll.poll(None if left is None else left * 1e3):
                self._read(descriptor)
            self._agent.reap()
            if self._ends_at is not None and time.monotonic() >= self._ends_at:
                break
        kill_descendants(self._agent)
        self._read_rest()
        code, status = None, self._agent.status
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
        tell({"ended": {"code": code, "output": self._output.text()}})

    def _read(self, descriptor: int) -> None:
        if descriptor == 0:
            self._receive_answers()
        elif descriptor == self._agent.output:
            self._take(descriptor, self._output.add)
        elif descriptor == self._agent.answers:
            self._take(descriptor, self._take_answers)
        elif descriptor == self._agent.stdin:
            self._write_tasks()

    def _take(self, descriptor: int, take: Any) -> None:
        try:
            part = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if part:
            take(part)
        else:
            self._poll.unregister(descriptor)

    def _receive_answers(self) -> None:
        part = os.read(0, _READ_BYTES)
        if not part:
            self._poll.unregister(0)
            self._ask_to_end()
            return
        *lines, self._owner_line = (self._owner_line + part).split(b"\n")
        for line in lines:
            if line == b"K":
                self._ends_at = time.monotonic()
            elif line.startswith(b"T") and self._warm:
                self._tasks += line[1:] + b"\n"
                self._poll.register(self._agent.stdin, select.POLLOUT)

    def _ask_to_end(self) -> None:
        if self._ends_at is None:
            self._ends_at = time.monotonic() + self._grace_s
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._agent.pid, signal.SIGTERM)

    def _write_tasks(self) -> None:
        try:
            del self._tasks[: os.write(self._agent.stdin, self._tasks)]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the agent no longer reads; the owner notices the missing answer
            self._tasks.clear()
        if not self._tasks:
            self._poll.unregister(self._agent.stdin)

    def _take_answers(self, part: bytes) -> None:
        *lines, self._answer_line = (self._answer_line + part).split(b"\n")
        for line in lines:
            self._take_line(line)
        if len(self._answer_line) > MAX_LINE_BYTES:
            self._output.add(self._answer_line)
            self._answer_line = b""

    def _take_line(self, line: bytes) -> None:
        try:
            answer = json.loads(line) if line.startswith(b"{") and len(line) <= MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            tell({"answer": answer, "output": self._output.text()})
        else:
            self._output.add(line + b"\n")

    def _read_rest(self) -> None:
        """Reads the remaining bytes of the agent's pipes, after all writers have ended."""
        for descriptor, take in ((self._agent.output, self._output.add), (self._agent.answers, self._take_answers)):
            try:
                while descriptor >= 0 and (part := os.read(descriptor, _READ_BYTES)):
                    take(part)
            except BlockingIOError:
                pass


def tell(message: dict[str, Any]) -> None:
    """Writes a message to the owner; a dead owner is ignored."""
    rest = json.dumps(message).encode() + b"\n"
    try:
        while rest:
            rest = rest[os.write(1, rest) :]
    except BrokenPipeError:
        pass


def kill_descendants(agent: Agent) -> None:
    """Kills all descendants of this process, and reaps them."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        agent.reap()
        if not has_children():
            return
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def has_children() -> bool:
    """Returns whether this process has an unreaped child."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(root: int) -> list[int]:
    """Returns the living descendants of a process."""
    parents = dict(living())
    found, tree = [], {root}
    while new := [pid for pid, parent in parents.items() if parent in tree and pid not in tree]:
        found += new
        tree.update(new)
    return found


def living() -> Iterator[tuple[int, int]]:
    """Yields the pid of each living process with the pid of its parent."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # the process has ended meanwhile
                continue
            if state not in (b"Z", b"X"):
                yield int(name), int(parent)


def main() -> None:
    """Starts the agent of the command line, and returns when all processes of the agent have ended."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    warm = sys.argv[2] == "warm"
    agent = Agent(sys.argv[3:], warm=warm, libc=libc)
    AgentGuard(agent, grace_s=float(sys.argv[1]), warm=warm).run()


if __name__ == "__main__":
    main()
