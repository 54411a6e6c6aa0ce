"""Controls one running agent through its guard: starts the agent, reads its answers, and reports its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from relax_core.config.redaction import without_values
from relax_core.contracts.child_process import Child, cause_in
from relax_core.rollout.agent_processes import agent_guard

_GUARD = Path(agent_guard.__file__)
_MAX_LINE_BYTES = 4 << 20  # limit of a guard's message: an answer or the kept output as JSON
GRACE_S = 2.0  # seconds between SIGTERM and SIGKILL to all processes of an agent
_EXIT_S = 30.0  # limit for the guard's exit; longer than GRACE_S and `agent_guard._KILL_S` together
MAX_ANSWERS = 64  # largest number of unread answers of a warm agent, which plays several tasks
SHOWN = 2000  # characters of an agent's output that an error shows
SHOWN_CAUSE = 500  # characters of the cause that an error shows


@dataclass(frozen=True, kw_only=True)
class AgentEnd:
    """Describes the end of an agent.

    ``code`` is the exit code: negative for a signal, None if unknown. ``output`` is the newest output.
    """

    code: int | None
    output: str

    def describe(self) -> str:
        """Returns a description of the agent's end, with its last output."""
        if self.code is None:
            how = "its guard was killed"
        elif self.code < 0:
            how = f"it was ended by {signal.Signals(-self.code).name}"
        else:
            how = f"it ended with exit code {self.code}"
        return f"{how}; {shown_output(self.output)}"


def shown_output(output: str) -> str:
    """Returns the line with a failure's cause, and then the last `SHOWN` characters of an agent's output."""
    text = output.strip()
    if not text:
        return "it wrote nothing"
    tail = f"{'[…]' if len(text) > SHOWN else ''}{text[-SHOWN:]}"
    cause = cause_in(text)[:SHOWN_CAUSE]  # the terminal shows only the first line
    return f"the last that it wrote: {tail}" if "\n" not in tail else f"the last that it wrote: {cause}\n{tail}"


class AgentProcess:
    """Controls one running agent.

    `start` creates the object. The caller must call `end` or `kill`; `wait` returns the agent's end.

    ``answers`` receives each JSON object that a warm agent writes to stdout, together with the agent's output before
    this object. ``killed`` is the reason why Relax killed the agent, else empty. ``ended`` is set once all processes of
    the agent have ended. The task ``reading`` ends at the same time.
    """

    def __init__(
        self,
        guard: Child,
        to_guard: asyncio.WriteTransport,
        told: asyncio.StreamReader,
        *,
        secrets: Collection[str],
    ) -> None:
        self._secrets = secrets
        self._guard = guard
        self._to_guard = to_guard
        self._pid = 0
        self._end: AgentEnd | None = None
        self.answers: asyncio.Queue[tuple[dict[str, Any], str]] = asyncio.Queue(MAX_ANSWERS)
        self.ended = asyncio.Event()
        self.killed = ""
        self.reading = asyncio.create_task(self._read(told))

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        warm: bool = False,
        secrets: Collection[str] = (),
    ) -> AgentProcess:
        """Starts an agent with ``env`` as its complete environment; a ``warm`` agent reads tasks from stdin.

        The values ``secrets`` of the environment are removed from the agent's output. Raises OSError if the folder
        ``cwd`` cannot be entered.
        """
        mode = "warm" if warm else "cold"
        guard = Child(
            [sys.executable, "-I", "-S", str(_GUARD), f"{GRACE_S:g}", mode, *command],
            name="the guard of an agent",
            folder=cwd,
            environment=env,
        )
        loop, told = asyncio.get_running_loop(), asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), guard.stdout)
        to_guard, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, guard.stdin)
        return cls(guard, to_guard, told, secrets=secrets)

    @property
    def guard_pid(self) -> int:
        """Returns the pid of the guard; all of the agent's processes are its descendants."""
        return self._guard.pid

    def give(self, task: bytes) -> None:
        """Sends a task, one line of JSON, to a warm agent."""
        self._to_guard.write(b"T" + task + b"\n")

    def end(self) -> None:
        """Sends SIGTERM to the agent, and kills the agent after `GRACE_S` seconds."""
        self._to_guard.close()

    def kill(self, why: str) -> None:
        """Kills all processes of the agent at once."""
        self.killed = self.killed or why
        self._to_guard.write(b"K\n")

    async def wait(self) -> AgentEnd:
        """Waits until all processes of the agent have ended, and returns the agent's end."""
        await self.ended.wait()
        assert self._end is not None
        return self._end

    async def _read(self, told: asyncio.StreamReader) -> None:
        """Reads the guard's messages until the guard has ended."""
        try:
            while line := await told.readline():
                self._receive(msgspec.json.decode(line))
        finally:
            await self._clear_up()
            self.ended.set()

    def _receive(self, told: dict[str, Any]) -> None:
        if "pid" in told:
            self._pid = told["pid"]
        elif "ended" in told:
            code, output = told["ended"]["code"], told["ended"]["output"]
            self._end = AgentEnd(code=code, output=without_values(output, self._secrets))
        elif self.answers.full():
            self.kill(f"it wrote more than {MAX_ANSWERS} answers that no task asked for")
        else:
            self.answers.put_nowait((told["answer"], without_values(told["output"], self._secrets)))

    async def _clear_up(self) -> None:
        """Reaps the guard. If the guard itself was killed, kills the agent's process group."""
        self._to_guard.close()
        if self._end is None:
            self._end = AgentEnd(code=None, output="")
            self._guard.kill()
            if self._pid:
                with suppress(ProcessLookupError):
                    os.killpg(self._pid, signal.SIGKILL)
        if await asyncio.to_thread(self._guard.wait, _EXIT_S) is None:
            await asyncio.to_thread(self._guard.kill)
