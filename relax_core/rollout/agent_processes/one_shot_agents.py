"""Plays each episode in a new agent process."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from relax_core.config.rollout_checks import agent_environment
from relax_core.config.schema import AgentConfig
from relax_core.rollout.agent_processes.agent_limits import AgentLimits
from relax_core.rollout.agent_processes.agent_process import AgentProcess
from relax_core.rollout.agent_processes.agent_tasks import (
    RESULT_FILE,
    TASK_FILE,
    AgentResult,
    AgentTask,
    read_result,
)


class OneShotAgentRunner:
    """Starts a process of ``command`` for each task.

    ``folder`` contains one folder per task in flight, and no other files. The runner must be created and used in one
    event loop.
    """

    def __init__(self, command: Sequence[str], agent: AgentConfig, *, folder: Path) -> None:
        self._command = command
        self._agent = agent
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)  # folders that a killed process left
        folder.mkdir(parents=True, mode=0o700)
        self._limits = AgentLimits()
        self._watch = asyncio.create_task(self._limits.watch())
        self._ending: set[asyncio.Task[None]] = set()

    async def play(self, task: AgentTask) -> AgentResult:
        """Returns the result of a task; see `AgentRunner`."""
        own = Path(tempfile.mkdtemp(dir=self._folder, prefix=f"{task.name.replace('/', '_')}-"))
        process: AgentProcess | None = None
        try:
            (own / TASK_FILE).write_bytes(task.row_json())
            variables = {
                **task.urls(),
                "RELAX_TASK": str(own / TASK_FILE),
                "RELAX_RESULT": str(own / RESULT_FILE),
                "RELAX_UID": task.uid,
                "RELAX_ATTEMPT": str(task.attempt),
                "RELAX_EVALUATION": str(int(task.evaluation)),
            }
            process = await self._start(variables)
            task.began.set()
            end = await process.wait()
            if process.killed or end.code != 0:
                return AgentResult(failed=f"the agent failed: {process.killed or end.describe()}", output=end.output)
            return read_result(own / RESULT_FILE, output=end.output)
        except OSError as error:  # the machine has no process or no memory for the agent
            return AgentResult(failed=f"the agent did not start: {error}")
        finally:
            ending = asyncio.create_task(self._end(process, own))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _start(self, variables: dict[str, str]) -> AgentProcess:
        process = await AgentProcess.start(
            self._command,
            cwd=self._agent.cwd or str(self._folder),
            env=agent_environment(self._agent, variables),
            secrets=tuple(self._agent.env.values()),
        )
        self._limits.running.add(process)
        return process

    async def _end(self, process: AgentProcess | None, own: Path) -> None:
        if process is not None:
            process.end()
            await process.wait()
            self._limits.running.discard(process)
        shutil.rmtree(own, ignore_errors=True)

    async def aclose(self) -> None:
        """Ends all agents, and returns when all of their processes have ended."""
        self._watch.cancel()
        for process in self._limits.running:
            process.end()
        while self._ending:
            await asyncio.wait(self._ending)
        shutil.rmtree(self._folder, ignore_errors=True)
