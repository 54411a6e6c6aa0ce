"""Tests agent processes: every process of an agent ends, and failure messages include the agent's output."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from relax_core.rollout.agent_processes import agent_limits, agent_process
from relax_core.rollout.agent_processes.agent_guard import KEPT_BYTES
from relax_core.rollout.agent_processes.agent_process import AgentProcess
from relax_core.rollout.agent_processes.agent_tasks import AgentResult, AgentTask
from relax_core.rollout.agent_processes.one_shot_agents import OneShotAgentRunner
from tests.rollout.agents.agent_harness import LONG_S, agent_settings

MARK = "RELAX_TEST_AGENT"
GONE_S = 5.0


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """Yields a marker for the environment of this test's agent processes. At the end no process may have the marker."""
    yield str(tmp_path)
    deadline = time.monotonic() + GONE_S
    while (left := marked(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.01)  # a killed process exists until the kernel schedules it once more
    for process in left:
        process.kill()
    assert not left


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def task(**given: object) -> AgentTask:
    fields = {"uid": "g0.1", "attempt": 2, "row": {"prompt": "p"}, "key": "KEY", "base_url": "http://127.0.0.1:9"}
    return AgentTask(**{**fields, "evaluation": False, **given})  # type: ignore[arg-type]


def run(
    tmp_path: Path,
    mark: str,
    command: list[str] | str,
    *,
    beside: Callable[[asyncio.Task[AgentResult]], object] | None = None,
    **settings: object,
) -> AgentResult:
    """Plays one task with a command or a shell script."""
    words = ["sh", "-c", command] if isinstance(command, str) else command

    async def played() -> AgentResult:
        agent = agent_settings(env={MARK: mark}, **settings)
        runs = OneShotAgentRunner(words, agent, folder=tmp_path / "agents")
        try:
            async with asyncio.timeout(LONG_S):
                playing = asyncio.create_task(runs.play(task()))
                if beside is not None:
                    await beside(playing)  # type: ignore[misc]
                return await playing
        finally:
            await runs.aclose()

    return asyncio.run(played())


def test_a_child_that_is_left_behind_ends_with_its_agent(tmp_path: Path, mark: str) -> None:
    """Includes an orphaned child that has left its process group and session."""
    began = time.monotonic()
    result = run(tmp_path, mark, "setsid sh -c 'sleep 300 & sleep 300' & (sleep 300 &) ; exit 0")
    assert result.failed == "" and time.monotonic() - began < 60


def test_a_flood_of_output_is_kept_to_its_newest_part(tmp_path: Path, mark: str) -> None:
    flood = "import sys\nfor _ in range(2000): sys.stdout.write('x' * 4096)\nprint('the end'); sys.exit(7)"
    result = run(tmp_path, mark, [sys.executable, "-c", flood])
    assert len(result.output) <= KEPT_BYTES + 3 and result.output.endswith("the end\n")
    assert "exit code 7; the last that it wrote: […]x" in result.failed and len(result.failed) < 2200


def test_an_agent_that_does_not_hear_a_signal_is_killed_behind_the_grace(tmp_path: Path, mark: str) -> None:
    async def beside(playing: asyncio.Task[AgentResult]) -> None:
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.01)
        playing.cancel()

    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, mark, f"trap '' TERM; touch {tmp_path}/ready; sleep 300; sleep 300", beside=beside)


def test_an_agent_may_end_well_in_the_grace(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "GRACE_S", 30.0)

    async def beside(playing: asyncio.Task[AgentResult]) -> None:
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.01)
        playing.cancel()

    script = f"trap 'touch {tmp_path}/heard; exit' TERM; touch {tmp_path}/ready; while true; do sleep 0.05; done"
    with pytest.raises(asyncio.CancelledError):
        run(tmp_path, mark, script, beside=beside)
    assert (tmp_path / "heard").exists()


@pytest.mark.parametrize(
    ("script", "limits", "message"),
    [
        (
            "x = bytearray(300 << 20); import time; time.sleep(300)",
            {"MEMORY_GIB": 0.2},
            "more than 0.2",
        ),
        (
            "import os, time\nfor _ in range(9):\n    if not os.fork(): break\ntime.sleep(300)",
            {"PROCESSES": 5},
            "it had 10 processes, more than 5",
        ),
    ],
)
def test_an_agent_above_a_limit_is_killed(
    tmp_path: Path, mark: str, script: str, limits: dict[str, float], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_limits, "CHECK_S", 0.1)
    for name, limit in limits.items():
        monkeypatch.setattr(agent_limits, name, limit)
    result = run(tmp_path, mark, [sys.executable, "-c", script])
    assert message in result.failed


def test_a_program_that_is_not_there_says_so(tmp_path: Path, mark: str) -> None:
    result = run(tmp_path, mark, ["no-such-agent", "--x"])
    assert "exit code 127; the last that it wrote: no-such-agent: No such file or directory" in result.failed
    result = run(tmp_path, mark, "true", cwd=str(tmp_path / "gone"))
    assert "the agent did not start" in result.failed


def test_the_environment_is_a_clean_one(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment contains no secret and no proxy. The interpreter's folder is first on PATH."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    result = run(tmp_path, mark, "env; readlink /proc/self/fd/0; exit 1", python="/opt/own/bin/python")
    lines = set(result.output.splitlines())
    assert {"OPENAI_API_KEY=KEY", "ANTHROPIC_API_KEY=KEY", "OPENAI_BASE_URL=http://127.0.0.1:9/v1"} <= lines
    assert {"RELAX_UID=g0.1", "RELAX_ATTEMPT=2", "RELAX_EVALUATION=0", "/dev/null"} <= lines
    names = {line.partition("=")[0] for line in lines}
    assert not names & {"HF_TOKEN", "HTTP_PROXY", "PYTHONPATH", "PYTEST_CURRENT_TEST"}
    assert any(line.startswith("PATH=/opt/own/bin:") for line in lines)


def test_a_guard_that_is_killed_takes_its_agent_with_it(tmp_path: Path, mark: str) -> None:
    async def beside(playing: asyncio.Task[AgentResult]) -> None:
        while not (tmp_path / "ready").exists():
            await asyncio.sleep(0.01)
        (guard,) = [child for child in psutil.Process().children() if "agent_guard.py" in " ".join(child.cmdline())]
        guard.kill()

    script = f"import os, time; os.fork(); open({str(tmp_path / 'ready')!r}, 'w'); time.sleep(300)"
    result = run(tmp_path, mark, [sys.executable, "-c", script], beside=beside)
    assert "its guard was killed" in result.failed


def test_agents_end_with_an_owner_that_is_killed(tmp_path: Path, mark: str) -> None:
    """After SIGKILL of the owner process, the agent and its children end within the grace period."""
    owner = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from relax_core.rollout.agent_processes.one_shot_agents import OneShotAgentRunner
        from tests.rollout.agent_processes.test_one_shot_agents import MARK, task
        from tests.rollout.agents.agent_harness import agent_settings

        async def main():
            agent = agent_settings(env={{MARK: {mark!r}}})
            script = "trap '' TERM; setsid sleep 300 & touch {tmp_path}/ready; sleep 300; sleep 300"
            runner = OneShotAgentRunner(["sh", "-c", script], agent, folder=Path({str(tmp_path / "agents")!r}))
            await runner.play(task())

        asyncio.run(main())
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", owner], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + LONG_S
    while not (tmp_path / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(LONG_S)
    while marked(mark):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_guard_tells_only_of_json_objects_of_a_warm_agent(tmp_path: Path) -> None:
    """JSON objects of an agent worker are answers; all other lines are output. A flood of unrequested answers ends the
    agent.
    """

    async def scene() -> None:
        process = await AgentProcess.start(["cat"], cwd=str(tmp_path), env={}, warm=True)
        for line in (b"[1]", b"{broken", b'{"uid": "a"}', b"note"):
            process.give(line)
        assert await process.answers.get() == ({"uid": "a"}, "[1]\n{broken\n")
        process.give(b'{"uid": "b"}')
        assert await process.answers.get() == ({"uid": "b"}, "[1]\n{broken\nnote\n")
        process.end()
        assert (await process.wait()).code == -signal.SIGTERM
        process = await AgentProcess.start(["yes", '{"uid": "x"}'], cwd=str(tmp_path), env={}, warm=True)
        await process.wait()
        assert "answers that no task asked for" in process.killed

    async def bounded() -> None:
        async with asyncio.timeout(LONG_S):
            await scene()

    asyncio.run(bounded())
