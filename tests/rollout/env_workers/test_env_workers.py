"""Tests isolated envs in real worker processes: seeds, hangs, deaths, floods, memory, and orphaned children."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.contracts.env import Action, BaseInteractionEnv, EpisodeStart, IsolatedConfig, StepResult
from relax_core.contracts.media import MediaSource
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.tool_calls import ToolCall
from relax_core.registry import find_env
from relax_core.rollout.env_workers.env_worker import EnvFailed
from relax_core.rollout.env_workers.env_workers import EnvWorkers
from relax_core.rollout.episodes.env_calls import EnvCalls, EnvTooSlow

ODD_ENV = """
import asyncio, os, random, socket, subprocess, sys, time
from dataclasses import dataclass
import numpy as np
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, IsolatedConfig, StepResult
from relax_core.contracts.media import MediaSource


@dataclass(frozen=True)
class OddConfig(IsolatedConfig):
    name: str = "odd"


class Odd(BaseInteractionEnv):
    def __init__(self, start, config):
        self.start, self.held = start, None

    def reset(self):
        return f"{random.random()} {np.random.random()} {self.start.row['prompt']}"

    async def step(self, action):
        await asyncio.sleep(0)
        verb, _, rest = action.text.partition(" ")
        if verb == "hang":
            time.sleep(600)
        if verb == "exit":
            os._exit(3)
        if verb == "raise":
            raise OSError("no game server")
        if verb == "wrong":
            return "no step"
        if verb == "memory":
            self.held = np.ones(int(rest), dtype=np.uint8)
        if verb == "flood":
            os.write(1, b"x" * 1000 + b"\\n")
            for _ in range(40_000):
                print("y" * 999)
        if verb == "child":
            child = subprocess.Popen(["sleep", "600"], start_new_session=rest == "session")
            return StepResult(observation=str(child.pid))
        if verb == "port":
            self.held = socket.create_server(("127.0.0.1", 0))
            return StepResult(observation=str(self.held.getsockname()[1]))
        if verb == "orphan":  # its parent ends at once
            printed = subprocess.run(["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True)
            return StepResult(observation=printed.stdout.decode().strip())
        if verb == "port":
            self.held = socket.create_server(("127.0.0.1", 0))
            os.set_inheritable(self.held.fileno(), True)
            subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)  # it holds the port, too
            return StepResult(observation=str(self.held.getsockname()[1]))
        if verb == "picture":
            part = {"type": "image", "image": MediaSource(kind="image", data=b"png")}
            return StepResult(observation=[{"role": "user", "content": [part]}])
        if verb == "edit":
            return StepResult(context_edit=[{"role": "user", "content": "anew"}], state_key="k", info={"n": 1})
        if verb == "calls":
            return StepResult(observation=f"{action.tool_calls[0].arguments['a'] + 1} {action.stopped}", reward=0.5)
        return StepResult(observation=f"{random.random()} {np.random.random()}", done=verb == "end")

    def close(self):
        print("closed", self.start.episode_seed, os.getpid(), flush=True)


SPEC = EnvSpec(name="odd", summary="s", config=OddConfig, open=Odd, isolated=True)
"""


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    file = tmp_path / "odd.py"
    file.write_text(ODD_ENV)
    return file


def config_of(file: Path, **settings: Any) -> IsolatedConfig:
    return IsolatedConfig(name=str(file), **{"step_timeout_s": 60.0, **settings})


@asynccontextmanager
async def workers_of(file: Path, *, group_size: int = 1, **settings: Any) -> AsyncIterator[Callable[..., Any]]:
    """Yields a function that opens an episode with a group seed and an episode seed, and resets its env."""
    config = config_of(file, **settings)
    workers = EnvWorkers(find_env(str(file)), config, log_file=file.with_suffix(".log"))
    spec = workers.spec(episodes_per_group=group_size)
    calls = EnvCalls(timeout_s=0.001)  # the timeout of a call starts in the worker
    opened = spec.open
    assert opened is not None

    async def begin(group: int = 1, episode: int = 2, **row: Any) -> tuple[BaseInteractionEnv, str]:
        start = EpisodeStart(row={"prompt": "p", **row}, group_seed=group, episode_seed=episode)
        env: BaseInteractionEnv = await calls(opened, start, config)
        (message,) = await calls(env.reset)
        return env, message["content"]

    begin.workers = workers  # type: ignore[attr-defined]
    try:
        async with asyncio.timeout(240):
            yield begin
    finally:
        await asyncio.to_thread(workers.close)


async def say(env: BaseInteractionEnv, text: str, **action: Any) -> StepResult:
    result = env.step(Action(text=text, stopped=True, **action))
    return await result if isinstance(result, Awaitable) else result


async def seen(env: BaseInteractionEnv, text: str) -> str:
    content = (await say(env, text)).observation[0]["content"]
    assert isinstance(content, str)
    return content


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def wait_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < until, f"process {pid} is still alive"
        time.sleep(0.05)


def test_an_episode_is_a_function_of_its_seeds_whatever_else_runs_in_the_worker(odd: Path) -> None:
    async def scene() -> None:
        async with workers_of(odd) as begin:
            first, opening = await begin(group=7, episode=70)
            alone = [await seen(first, "draw") for _ in range(4)]
            other_episodes = [await begin(group=8, episode=80), await begin(group=7, episode=71)]
            again, same = await begin(group=7, episode=70)
            mixed = []
            for _ in range(4):
                for other_env, _opening in other_episodes:
                    await seen(other_env, "draw")
                mixed.append(await seen(again, "draw"))
            assert same == opening and mixed == alone
            assert other_episodes[0][1] != opening, "another group has another opening"
            assert other_episodes[1][1] == opening, "all episodes of a group have the same opening"
            assert len({*alone, await seen(other_episodes[1][0], "draw")}) == 5, (
                "episodes of a group differ after the opening"
            )

    asyncio.run(scene())


def test_all_that_the_contract_has_passes_the_pipe(odd: Path) -> None:
    async def scene() -> None:
        async with workers_of(odd) as begin:
            env, opening = await begin(prompt="größer")
            assert opening.endswith(" größer")
            call = ToolCall(name="f", arguments={"a": 41})
            step = await say(env, "calls", tool_calls=(call,))
            assert step.observation == [{"role": "user", "content": "42 True"}] and step.reward == 0.5
            step = await say(env, "edit")
            assert step.observation is None and step.context_edit == [{"role": "user", "content": "anew"}]
            assert step.state_key == "k" and step.info == {"n": 1}
            (message,) = (await say(env, "picture")).observation
            assert message["content"] == [{"type": "image", "image": MediaSource(kind="image", data=b"png")}]
            assert (await say(env, "end")).done
            with pytest.raises(WrongResult, match="step returned 'no step'"):
                await say(env, "wrong")
            with pytest.raises(EnvFailed, match=r"OSError: no game server \(.*odd.py, line 29"):
                await say(env, "raise")
            assert await seen(env, "draw"), "an error of an env ends no worker"

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("verb", "error", "message"), [("hang", EnvTooSlow, "no answer within 8 s"), ("exit", EnvFailed, "exit code 3")]
)
def test_a_worker_that_is_lost_is_replaced_and_the_other_worker_notices_nothing(
    odd: Path, verb: str, error: type[Exception], message: str
) -> None:
    async def scene() -> None:
        limit_s = 8.0 if verb == "hang" else 60.0
        async with workers_of(odd, workers=2, group_size=4, episodes_per_worker=2, step_timeout_s=limit_s) as begin:
            envs = [(await begin(episode=place))[0] for place in range(4)]  # in workers 0, 1, 0, 1
            pid = int(await seen(envs[2], "child session"))
            with pytest.raises(error, match=message):
                await say(envs[0], verb)
            with pytest.raises(EnvFailed, match="its worker process was replaced: .*" + message):
                await say(envs[2], "draw")
            assert await seen(envs[1], "draw") and await seen(envs[3], "draw")
            if verb == "hang":  # if a process exits by itself, children outside its process group survive
                assert is_gone(pid)
            else:
                os.kill(pid, signal.SIGKILL)
            await envs[0].close()
            again, _ = await begin(episode=0)
            assert await seen(again, "draw")

    asyncio.run(scene())


def test_a_flood_blocks_nothing_and_fills_no_disk(odd: Path) -> None:
    async def scene() -> None:
        async with workers_of(odd) as begin:
            env, _ = await begin()
            assert await seen(env, "flood")
            await env.close()
            second_env, _ = await begin()
            assert await seen(second_env, "draw")

    asyncio.run(scene())
    size = odd.with_suffix(".log").stat().st_size
    assert 15 * 2**20 < size < 17 * 2**20


def test_a_worker_over_its_memory_is_replaced(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IsolatedConfig, "worker_memory_gib", 0.5)

    async def scene() -> None:
        async with workers_of(odd) as begin:
            env, _ = await begin()
            assert await seen(env, f"memory {2**20}")

            async def fill() -> None:
                await say(env, f"memory {2**30}")
                while True:  # the next check follows within a second
                    await say(env, "draw")
                    await asyncio.sleep(0.1)

            with pytest.raises(EnvFailed, match=r"more than the 0.5 GiB"):
                await fill()
            fresh, _ = await begin(episode=3)
            assert await seen(fresh, "draw")

    asyncio.run(scene())


def test_groups_wait_for_places_and_never_for_each_other(odd: Path) -> None:
    """At most two of three groups of two episodes are open. A group gets slots for all of its episodes at once."""

    async def scene() -> None:
        async with workers_of(odd, workers=2, episodes_per_worker=2, group_size=2) as begin:
            running: list[int] = []
            most = 0
            two_run = asyncio.Event()

            async def play(group: int) -> None:
                nonlocal most
                envs = [env for env, _ in await asyncio.gather(begin(group, 0), begin(group, 1))]
                running.append(group)
                most = max(most, len(running))
                if most == 2:
                    two_run.set()
                await two_run.wait()  # the first group stays open until another group has opened
                for env in envs:
                    await say(env, "draw")
                running.remove(group)
                for env in envs:
                    await env.close()

            await asyncio.gather(*map(play, range(3)))
            assert most == 2
            assert [worker.open_episodes for worker in begin.workers.workers] == [0, 0]  # type: ignore[attr-defined]

    asyncio.run(scene())


def test_workers_and_their_children_end_with_their_owner(odd: Path, tmp_path: Path) -> None:
    """The owner is killed, so it cannot clean up."""
    owner_file = tmp_path / "owner.py"
    owner_file.write_text(
        "import asyncio, os, sys, pathlib\n"
        "from tests.rollout.env_workers.test_env_workers import workers_of, seen\n"
        "async def scene():\n"
        "    async with workers_of(pathlib.Path(sys.argv[1])) as begin:\n"
        "        env, _ = await begin()\n"
        "        child = await seen(env, 'child')\n"
        "        print(begin.workers.workers[0]._process.pid, child, flush=True)\n"
        "        await asyncio.sleep(200)\n"
        "asyncio.run(scene())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    owner = subprocess.Popen([sys.executable, str(owner_file), str(odd)], stdout=subprocess.PIPE, env=environment)
    try:
        assert owner.stdout is not None
        worker, child = map(int, owner.stdout.readline().split())
        assert not is_gone(worker) and not is_gone(child)
    finally:
        owner.kill()
        owner.communicate(timeout=30)
    wait_gone(worker)
    wait_gone(child)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_what_an_env_leaves_behind_ends_with_the_workers(odd: Path) -> None:
    """Covers an orphaned process, and a port that a child in another session holds."""

    async def scene() -> tuple[int, int]:
        async with workers_of(odd) as begin:
            env, _ = await begin()
            pid, port = int(await seen(env, "orphan")), int(await seen(env, "port"))
            assert not is_gone(pid) and is_open(port)
            return pid, port

    pid, port = asyncio.run(scene())
    assert is_gone(pid) and not is_open(port)
