"""An env with the tools of servers of the Model Context Protocol: programs that Relax starts, or external servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from envs.tool_servers.mcp_sessions import McpSessions, in_thread, listed_tools
from envs.tool_servers.server_processes import PORT, McpServer, server_command
from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.tool_calls import ToolCall

_NO_SERVER = "env.servers is empty: name a server, such as env.servers.sum.command='python sum_server.py'."


@dataclass(frozen=True)
class McpConfig(InteractionConfig):
    """Holds the settings of the adapter.

    ``servers`` are the servers by name. If several servers have a tool of the same name, these tools get the names
    SERVER_TOOL.
    """

    name: str = "mcp"
    servers: dict[str, McpServer] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Offered:
    """Holds one tool: the schema that the model reads, its server, and its name on the server."""

    schema: dict[str, Any]
    server: str
    tool: str


class McpTools(BaseInteractionEnv):
    """Shows the row's prompt, and calls the tools. A response without a call is the answer and ends the episode.

    The env returns no reward: a reward plug-in scores the answer. Each episode has one session with each server. If a
    server marks a result as an error, or refuses arguments, the model reads the error. After the loss of a server, the
    episode fails and starts again with new sessions.
    """

    def __init__(self, start: EpisodeStart, config: McpConfig) -> None:
        self._prompt = start.row["prompt"]
        self._config = config
        self._sessions = McpSessions(config.servers)
        self._calls = self._failed = 0

    async def reset(self) -> Any:
        """Opens the sessions and returns the prompt of the data row."""
        await asyncio.wrap_future(in_thread(self._sessions.open()))
        return self._prompt

    async def step(self, action: Action) -> StepResult:
        """Returns the results of the calls, or the end of the episode."""
        if action.tool_calls:
            texts = [await self._result(call) for call in action.tool_calls]
            return StepResult(observation=[{"role": "tool", "content": text} for text in texts])
        if action.parse_error:
            return StepResult(observation=action.parse_error)
        return StepResult(done=True, info={"tool_calls": self._calls, "failed_tool_calls": self._failed})

    async def close(self) -> None:
        """Closes the sessions and ends the episode's processes."""
        await asyncio.wrap_future(in_thread(self._sessions.close()))

    async def _result(self, call: ToolCall) -> str:
        offered = _offered(self._config)
        self._calls += 1
        if (tool := offered.get(call.name)) is None:
            self._failed += 1
            return f"There is no tool {call.name!r}. The tools are: {', '.join(offered)}."
        failed, text = await asyncio.wrap_future(
            in_thread(self._sessions.call(tool.server, tool.tool, dict(call.arguments)))
        )
        self._failed += failed
        return text


def tools(row: Mapping[str, Any], config: McpConfig) -> Sequence[dict[str, Any]]:
    """Returns the tools of all servers; a process queries the servers once."""
    return [tool.schema for tool in _offered(config).values()]


_known: dict[str, dict[str, _Offered]] = {}
_asking = threading.Lock()


def _offered(config: McpConfig) -> dict[str, _Offered]:
    """Returns the tools by the names that the model reads.

    Raises ValueError if no server is configured, or if a server does not answer.
    """
    if not config.servers:
        raise ValueError(_NO_SERVER)
    key = json.dumps({name: asdict(server) for name, server in config.servers.items()}, sort_keys=True)
    with _asking:
        if key not in _known:
            asking = in_thread(listed_tools(config.servers))
            try:
                listed = asking.result(config.step_timeout_s)
            except TimeoutError:
                asking.cancel()
                raise ValueError(
                    f"env.servers: the servers listed no tools within env.step_timeout_s={config.step_timeout_s:g}."
                ) from None
            except RuntimeError as error:
                raise ValueError(f"env.servers: {error}") from error
            _known[key] = _by_name(listed)
        return _known[key]


def _by_name(listed: Sequence[tuple[str, Any]]) -> dict[str, _Offered]:
    """Returns the tools by name; tools with the same name on several servers get the names SERVER_TOOL."""
    offered: dict[str, _Offered] = {}
    counts = Counter(tool.name for _, tool in listed)
    for server, tool in listed:
        name = f"{server}_{tool.name}" if counts[tool.name] > 1 else tool.name
        if name in offered:
            raise ValueError(
                f"env.servers: {offered[name].server} and {server} both have a tool {name}. Rename a server."
            )
        function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        offered[name] = _Offered(schema={"type": "function", "function": function}, server=server, tool=tool.name)
    return offered


def check(config: McpConfig) -> None:
    """Raises ValueError if the package is missing, or if the settings of a server are invalid."""
    if importlib.util.find_spec("mcp") is None:
        raise ValueError("env=mcp needs the package mcp: pip install 'relax-core[mcp]'.")
    if not config.servers:
        raise ValueError(_NO_SERVER)
    for name, server in config.servers.items():
        key = f"env.servers.{name}"
        if not server.command and not server.url:
            raise ValueError(f"{key}: it has neither command nor url. Give it one of them.")
        if server.url and not server.url.startswith(("http://", "https://")):
            raise ValueError(f"{key}.url={server.url}: write http://HOST:PORT/PATH.")
        if (PORT in server.url) != (PORT in server.command):
            raise ValueError(f"{key}: only one of command and url has {PORT}. Write it in both, or a port in both.")
        if server.cwd is not None and not os.path.isdir(server.cwd):
            raise ValueError(f"{key}.cwd={server.cwd} is not a folder.")
        if server.command:
            _check_command(server.command, f"{key}.command")


def _check_command(command: str, key: str) -> None:
    try:
        program = server_command(command)[0]
    except ValueError as error:
        raise ValueError(f"{key}={command}: {error}. Write a program and its arguments.") from error
    if shutil.which(program) is None:
        raise ValueError(f"{key}={command}: there is no program {program}.")


SPEC = EnvSpec(
    name="mcp",
    summary="tools of servers that speak the Model Context Protocol",
    config=McpConfig,
    open=McpTools,
    tools=tools,
    check=check,
)
