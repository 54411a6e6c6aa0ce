"""Tests the adapter with the real package `mcp`, on small servers over stdin and over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="pip install 'relax-core[mcp]'")

from envs.mcp import McpConfig, McpTools, check, tools
from envs.tool_servers.server_processes import McpServer
from relax_core.contracts.env import Action, EpisodeStart, StepResult
from relax_core.contracts.tool_calls import ToolCall

ROOT = Path(__file__).resolve().parents[2]
SUM = f"python {ROOT}/examples/mcp/sum_server.py"
ODD = '''
import os, sys, time
from mcp.server import MCPServer
server = MCPServer("odd")

@server.tool()
def add(numbers: list[int]) -> int:
    """Adds otherwise."""
    return -sum(numbers)

@server.tool()
def variables() -> str:
    """Names its variables."""
    return " ".join(sorted(os.environ))

@server.tool()
def fails() -> str:
    """Raises."""
    raise ValueError("no luck")

@server.tool()
def dies() -> str:
    """Ends its process."""
    print("the odd server ends", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def process() -> int:
    """Tells its process."""
    return os.getpid()

server.run() if len(sys.argv) == 1 else server.run("streamable-http", port=int(sys.argv[1]))
'''
RAW = """
import json, sys

def answer(number, **found):
    print(json.dumps({{"jsonrpc": "2.0", "id": number, **found}}), flush=True)

number = {{"type": "object", "properties": {{"n": {{"type": "integer"}}}}, "required": ["n"]}}
TOOL = {{"name": "find", "inputSchema": {{"type": "object"}}, "outputSchema": number}}
for line in sys.stdin:
    asked = json.loads(line)
    id, method = asked.get("id"), asked.get("method")
    if method == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {{"name": "raw", "version": "1"}}
        answer(id, result={{"protocolVersion": version, "capabilities": {{"tools": {{}}}}, "serverInfo": info}})
    elif method == "tools/list":
        answer(id, result={{"tools": [TOOL]}})
    elif method == "tools/call":
        answer(id, **{answer!r})
    elif id is not None:
        answer(id, error={{"code": -32601, "message": "unknown"}})
"""
START_S = 60.0
STARTS = pytest.mark.agents  # a server costs a second of processor time, because its package is large


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("odd") / "odd_server.py"
    file.write_text(ODD)
    return f"python {file}"


def config_of(**servers: McpServer) -> McpConfig:
    return McpConfig(servers=servers, step_timeout_s=START_S)


def played(config: McpConfig, scene: Callable[[McpTools], Awaitable[None]]) -> None:
    """Opens an episode, plays it and closes it."""

    async def play() -> None:
        async with asyncio.timeout(2 * START_S):
            env = McpTools(EpisodeStart(row={"prompt": "2 + 3"}, group_seed=1, episode_seed=2), config)
            try:
                assert await env.reset() == "2 + 3"
                await scene(env)
            finally:
                await env.close()

    asyncio.run(play())


async def called(env: McpTools, name: str, **arguments: Any) -> str:
    call = ToolCall(name=name, arguments=arguments)
    step: StepResult = await env.step(Action(text="", stopped=True, tool_calls=(call,)))
    (message,) = step.observation
    assert message["role"] == "tool" and not step.done
    return str(message["content"])


def ended(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@STARTS
def test_tools_of_a_server_over_stdin_are_shown_and_called() -> None:
    config = config_of(sum=McpServer(command=SUM))
    shown = {tool["function"]["name"]: tool["function"] for tool in tools({}, config)}
    assert shown["add"]["description"] == "Returns the sum of whole numbers."
    assert shown["add"]["parameters"]["required"] == ["numbers"]

    async def scene(env: McpTools) -> None:
        assert await called(env, "add", numbers=[2, 3]) == "5"
        assert "numbers" in await called(env, "add", number=2)  # the server's message about the argument
        assert await called(env, "multiply") == "There is no tool 'multiply'. The tools are: add, remember."
        assert [await called(env, "remember", number=number) for number in (2, 3)] == ["2", "5"]
        told = await env.step(Action(text="<tool_call>{", stopped=True, parse_error="the call is not JSON"))
        assert told.observation == "the call is not JSON"
        last = await env.step(Action(text="It is 5.", content="It is 5.", stopped=True))
        assert last.done and last.info == {"tool_calls": 5, "failed_tool_calls": 2}

    played(config, scene)

    async def anew(env: McpTools) -> None:
        assert await called(env, "remember", number=1) == "1"  # each episode has a separate process

    played(config, anew)


@STARTS
def test_a_server_sees_few_variables_and_ends_with_its_episode(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    config, processes = config_of(odd=McpServer(command=odd, env={"OWN": "1"})), []

    async def scene(env: McpTools) -> None:
        seen = set((await called(env, "variables")).split())
        assert "OWN" in seen and seen <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "OWN", "LC_CTYPE"}
        assert await called(env, "fails") == "Error executing tool fails"
        processes.append(int(await called(env, "process")))

    played(config, scene)
    assert ended(*processes)


@STARTS
def test_a_server_that_dies_fails_its_episode_and_not_the_next_one(odd: str) -> None:
    config = config_of(odd=McpServer(command=odd))

    async def scene(env: McpTools) -> None:
        with pytest.raises(RuntimeError, match=r"the server odd is lost.*the odd server ends"):
            await called(env, "dies")

    played(config, scene)

    async def anew(env: McpTools) -> None:
        assert await called(env, "add", numbers=[1]) == "-1"

    played(config, anew)


@STARTS
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": {"code": -32603, "message": "no such city"}}, "no such city"),
        ({"error": {"code": -32000, "message": "no such city"}}, "no such city"),
        ({"result": {"content": [{"type": "hologram", "data": "x"}]}}, "cannot be read"),
        ({"result": {"content": [], "structuredContent": {"n": "x"}}}, "cannot be read"),
    ],
)
def test_an_error_of_a_server_that_lives_is_read_by_the_model(
    tmp_path: Path, answer: dict[str, Any], message: str, recwarn: pytest.WarningsRecorder
) -> None:
    file = tmp_path / "raw.py"
    file.write_text(RAW.format(answer=answer))
    config = config_of(raw=McpServer(command=f"python {file}"))

    async def scene(env: McpTools) -> None:
        assert message in await called(env, "find")
        assert message in await called(env, "find")

    played(config, scene)
    assert not recwarn.list


@STARTS
def test_a_server_of_http_is_started_shared_and_started_again(odd: str, caplog: pytest.LogCaptureFixture) -> None:
    served = McpServer(command=f"{odd} {{port}}", url="http://127.0.0.1:{port}/mcp")
    config, processes = config_of(odd=served), []

    async def scene(env: McpTools) -> None:
        processes.append(int(await called(env, "process")))

    played(config, scene)
    played(config, scene)
    assert processes[0] == processes[1] != os.getpid()

    async def dies(env: McpTools) -> None:
        with pytest.raises(RuntimeError, match="the server odd is lost"):
            await called(env, "dies")

    played(config, dies)
    assert ended(processes[0])
    played(config, scene)
    assert processes[2] != processes[0] and "ended with 3 and starts again: " in caplog.text


@STARTS
def test_two_tools_of_one_name_get_the_name_of_their_server(odd: str) -> None:
    servers = {"sum": McpServer(command=SUM), "odd": McpServer(command=odd)}

    async def scene(env: McpTools) -> None:
        assert [await called(env, f"{name}_add", numbers=[2, 3]) for name in servers] == ["5", "-5"]

    played(config_of(**servers), scene)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (McpServer(), r"env\.servers\.a: it has neither command nor url"),
        (McpServer(command="no-such-program x"), "there is no program no-such-program"),
        (McpServer(command="python 'x"), "No closing quotation"),
        (McpServer(url="localhost:1"), r"env\.servers\.a\.url=localhost:1: write http"),
        (McpServer(command="python x {port}"), r"only one of command and url has \{port\}"),
        (McpServer(command="python x", cwd="/nowhere"), r"env\.servers\.a\.cwd=/nowhere is not a folder"),
    ],
)
def test_a_server_that_makes_no_sense_is_refused(server: McpServer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config_of(a=server))


def test_no_server_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.servers is empty"):
        check(McpConfig())


@STARTS
def test_a_program_that_is_no_server_is_told_with_its_output() -> None:
    command = "python -c \"import sys; sys.exit('this is no server')\""
    with pytest.raises(ValueError, match=r"the server a opens no session.*this is no server"):
        tools({}, config_of(a=McpServer(command=command)))


@STARTS
def test_servers_end_with_a_process_that_is_killed(odd: str, tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path[:0] = {[str(ROOT)]!r}
from tests.envs.test_mcp import *

async def scene(env):
    print(*[await called(env, "a_process"), await called(env, "b_process")], flush=True)
    await asyncio.sleep(60)

servers = {{"a": McpServer(command={odd!r}), "b": McpServer(command={odd!r} + " {{port}}", url="http://127.0.0.1:{{port}}/mcp")}}
played(config_of(**servers), scene)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.send_signal(signal.SIGKILL)
        assert len(pids) == 2 and all(map(ended, pids))
