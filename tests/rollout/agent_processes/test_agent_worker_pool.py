"""Tests agent workers: one agent process plays many tasks in sequence, and a task cannot affect the next task."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from relax_core.config.schema import AgentConfig
from relax_core.rollout.agent_processes import agent_process
from relax_core.rollout.agent_processes.agent_tasks import AgentTask
from relax_core.rollout.agent_processes.agent_worker_pool import AgentWorkerPool
from tests.rollout.agents.agent_harness import LONG_S, agent_settings

WORKER = """
import json, os, sys, time
assert os.environ["RELAX_WORKER"] == "1" and "OPENAI_API_KEY" not in os.environ
for line in sys.stdin:
    given = json.loads(line)
    do, uid = given["task"]["prompt"], given["uid"]
    print("plays", uid, file=sys.stderr, flush=True)
    if do == "die":
        sys.exit(4)
    if do == "hang":
        time.sleep(300)
    if do == "late":
        time.sleep(0.3)
    if do == "noise":
        print("a library says hello")
        print(json.dumps({"uid": "another", "reward": 9}))
    if do == "wrong":
        print(json.dumps({"uid": uid, "reward": "much"}), flush=True)
        continue
    if do == "error":
        print(json.dumps({"uid": uid, "error": "no docker"}), flush=True)
        continue
    print(json.dumps({"uid": uid, "reward": os.getpid(), "metrics": {"attempt": given["attempt"]}}), flush=True)
"""


def task(prompt: str, uid: str = "g0.0") -> AgentTask:
    return AgentTask(
        uid=uid, attempt=1, row={"prompt": prompt}, key="K", base_url="http://127.0.0.1:9", evaluation=False
    )


def scene(tmp_path: Path, play: Callable[[AgentWorkerPool], Awaitable[None]], **settings: object) -> None:
    (tmp_path / "worker.py").write_text(WORKER)

    async def run() -> None:
        agent: AgentConfig = agent_settings(**{"workers": 1, **settings})
        workers = AgentWorkerPool([sys.executable, str(tmp_path / "worker.py")], agent, folder=tmp_path / "agents")
        try:
            async with asyncio.timeout(LONG_S):
                await play(workers)
        finally:
            await workers.aclose()

    asyncio.run(run())


def test_one_process_plays_task_after_task(tmp_path: Path) -> None:
    """Each answer belongs to its task. Ignores library output and answers to other tasks."""

    async def play(workers: AgentWorkerPool) -> None:
        prompts = ["a", "noise", "wrong", "error", "b"]
        found = await asyncio.gather(
            *(workers.play(task(prompt, f"g0.{number}")) for number, prompt in enumerate(prompts))
        )
        assert len({found[number].reward for number in (0, 1, 4)}) == 1 and found[0].metrics == {"attempt": 1.0}
        assert "reward='much': give a finite number" in found[2].failed
        assert found[3].failed == "the agent says: no docker"
        assert "a library says hello" in found[4].output

    scene(tmp_path, play)


def test_a_process_that_dies_or_hangs_is_replaced(tmp_path: Path) -> None:
    async def play(workers: AgentWorkerPool) -> None:
        first = await workers.play(task("a"))
        died = await workers.play(task("die"))
        assert "exit code 4" in died.failed and "plays g0.0" in died.failed
        second = await workers.play(task("a"))
        hung = asyncio.create_task(workers.play(given := task("hang")))
        await given.began.wait()
        hung.cancel()
        third = await workers.play(task("a"))
        assert len({first.reward, second.reward, third.reward}) == 3

    scene(tmp_path, play)


def test_a_process_that_ends_its_task_in_the_grace_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The late answer is not used for the next task, even if the next task has the same uid."""

    async def play(workers: AgentWorkerPool) -> None:
        first = await workers.play(task("a"))
        late = asyncio.create_task(workers.play(given := task("late")))
        await given.began.wait()
        late.cancel()
        second = await workers.play(task("a"))
        assert first.reward == second.reward and second.failed == ""

    monkeypatch.setattr(agent_process, "GRACE_S", 30.0)
    scene(tmp_path, play)


def test_the_time_of_a_task_begins_when_a_process_has_it(tmp_path: Path) -> None:
    async def play(workers: AgentWorkerPool) -> None:
        running, waiting = task("late"), task("a", "g0.1")
        playing = [asyncio.create_task(workers.play(queued_task)) for queued_task in (running, waiting)]
        await running.began.wait()
        assert not waiting.began.is_set()
        await asyncio.gather(*playing)
        assert waiting.began.is_set()

    scene(tmp_path, play)


@pytest.mark.parametrize("command", [["no-such-agent"], ["true"]])
def test_a_command_that_ends_at_once_fails_every_task(tmp_path: Path, command: list[str]) -> None:
    async def run() -> None:
        workers = AgentWorkerPool(command, agent_settings(workers=1), folder=tmp_path / "agents")
        for _ in range(2):
            assert "it ended with exit code" in (await workers.play(task("a"))).failed
        await workers.aclose()

    asyncio.run(run())
