"""Plays episodes in warm agents: a process plays many tasks, because an agent's libraries take seconds to import."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_core.config.rollout_checks import agent_environment
from relax_core.config.schema import AgentConfig
from relax_core.rollout.agent_processes import agent_process
from relax_core.rollout.agent_processes.agent_limits import AgentLimits
from relax_core.rollout.agent_processes.agent_process import AgentProcess
from relax_core.rollout.agent_processes.agent_tasks import AgentResult, AgentTask, result_of


class AgentWorkerPool:
    """Holds ``agent.workers`` processes of ``command``. A process starts on demand and plays one task at a time.

    After a task is cancelled, its process has `GRACE_S` seconds to answer this task. A process that does not answer in
    time is ended, and the next task gets a new process. The pool must be created and used in one event loop. The
    processes run in the folder agent.cwd, or in ``folder`` if agent.cwd is empty.
    """

    def __init__(self, command: Sequence[str], agent: AgentConfig, *, folder: Path) -> None:
        self._command = command
        self._agent = agent
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._cwd = agent.cwd or str(folder)
        self._limits = AgentLimits()
        self._watch = asyncio.create_task(self._limits.watch())
        self._free: asyncio.Queue[AgentProcess | None] = asyncio.Queue()  # None: a process that has not started
        for _ in range(agent.workers):
            self._free.put_nowait(None)
        self._ending: set[asyncio.Task[None]] = set()

    async def play(self, task: AgentTask) -> AgentResult:
        """Returns the result of a task; see `AgentRunner`."""
        process = await self._free.get()
        answered = False
        try:
            if process is None or process.ended.is_set():
                process = await self._start()
            task.began.set()
            process.give(msgspec.json.encode(task.as_json()))
            result = await self._answer(process, task)
            answered = result is not None
            if result is not None:
                return result
            end = await process.wait()
            return AgentResult(failed=f"the agent failed: {process.killed or end.describe()}", output=end.output)
        except OSError as error:  # the machine has no process or no memory for the agent
            return AgentResult(failed=f"the agent did not start: {error}")
        finally:
            ending = asyncio.create_task(self._give_back(process, task, answered=answered))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def _start(self) -> AgentProcess:
        variables = {"RELAX_WORKER": "1"}
        process = await AgentProcess.start(
            self._command,
            cwd=self._cwd,
            env=agent_environment(self._agent, variables),
            secrets=tuple(self._agent.env.values()),
            warm=True,
        )
        self._limits.running.add(process)
        return process

    async def _answer(self, process: AgentProcess, task: AgentTask) -> AgentResult | None:
        """Returns the agent's answer to a task, or None if the agent has ended. Answers to other tasks are ignored."""
        while not process.ended.is_set() or not process.answers.empty():
            answer = asyncio.create_task(process.answers.get())
            try:
                await asyncio.wait([answer, process.reading], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    told, output = answer.result()
                    if told.get("uid") == task.uid and told.get("attempt", task.attempt) == task.attempt:
                        return result_of(told, output=output, what=f"the answer to {task.name}")
            finally:
                answer.cancel()  # a pending get would take the next answer
        return None

    async def _give_back(self, process: AgentProcess | None, task: AgentTask, *, answered: bool) -> None:
        """Makes a process available for the next task, or ends the process."""
        if process is not None and not answered and not process.ended.is_set():
            try:
                async with asyncio.timeout(agent_process.GRACE_S):
                    await self._answer(process, task)
            except TimeoutError:
                process.end()
                await process.wait()
        if process is not None and process.ended.is_set():
            self._limits.running.discard(process)
            process = None
        self._free.put_nowait(process)

    async def aclose(self) -> None:
        """Ends all agents, and returns when all of their processes have ended."""
        self._watch.cancel()
        for process in self._limits.running:
            process.end()
        for process in list(self._limits.running):
            await process.wait()
        while self._ending:
            await asyncio.wait(self._ending)
        shutil.rmtree(self._folder, ignore_errors=True)
