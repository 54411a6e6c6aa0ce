"""Plays environments of OpenEnv on a server; each episode has one session over a WebSocket.

The protocol is from the package openenv 0.10: JSON messages {"type": "reset" | "step" | "close", "data": …} on /ws, and
the JSON schema of actions on /schema. Relax does not need this package.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.host_network import opener, proxy_description

_TOOL = "act"
_CLOSE_S = 2.0
HEARTBEAT_S = 20.0  # interval of pings; aiohttp closes the connection if the server does not answer a ping
_POLL_S = 0.2
_FULL, _INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"  # error codes of the server


@dataclass(frozen=True)
class OpenEnvConfig(InteractionConfig):
    """Holds the settings of the adapter.

    ``url`` is the server's address. With ``text_field``, the text of a response becomes the action's field of this
    name; otherwise the model calls the tool "act" with the fields of an action. ``observation_field`` is the field of
    an observation that the model reads; without it, the model reads all fields except the metadata, as JSON. When
    an episode begins, the server receives the group's seed, the arguments ``reset``, and the columns ``row_fields`` of
    the data row.
    """

    name: str = "openenv"
    url: str = ""
    text_field: str | None = None
    observation_field: str | None = None
    reset: dict[str, Any] = field(default_factory=dict)
    row_fields: list[str] = field(default_factory=list)


class _Refused(Exception):
    """Reports that the server answered with an error; ``code`` is the name of the error."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(f"{words} ({code})")
        self.code = code


class OpenEnvEpisode(BaseInteractionEnv):
    """Plays one episode in a session with the server; the rewards are from the server.

    If the server cannot read an action, the model reads the error. After a lost connection or an error of the
    environment, the episode fails and starts again in a new session. If the server has no free session, the request is
    repeated until ``config.step_timeout_s`` is nearly over.
    """

    def __init__(self, start: EpisodeStart, config: OpenEnvConfig) -> None:
        self._config = config
        row = {name: start.row[name] for name in config.row_fields}
        self._reset = {"seed": start.group_seed % 2**31, **config.reset, **row}
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self) -> str:
        """Opens a session and returns the first observation."""
        until = time.monotonic() + 0.9 * self._config.step_timeout_s
        while True:
            try:
                await self._connect()
                return self._shown(await self._ask("reset", self._reset))
            except _Refused as error:
                await self.close()
                if error.code != _FULL or time.monotonic() > until:
                    raise RuntimeError(f"the server {self._config.url} opens no session: {error}") from error
                await asyncio.sleep(_POLL_S)

    async def step(self, action: Action) -> StepResult:
        """Returns the server's observation after an action, with the reward."""
        if action.parse_error:
            return StepResult(observation=action.parse_error)
        as_tool = self._config.text_field is None
        call = (
            next((tool_call for tool_call in action.tool_calls if tool_call.name == _TOOL), None) if as_tool else None
        )
        if as_tool and call is None:
            return StepResult(observation=f"Call the tool {_TOOL}, which is the only way to act.")
        given = dict(call.arguments) if call else {str(self._config.text_field): action.content or action.text}
        try:
            told = await self._ask("step", given)
        except _Refused as error:
            if error.code != _INVALID:
                raise RuntimeError(f"the environment failed: {error}") from error
            return StepResult(observation=self._messages(action, f"The action cannot be read: {error}"))
        reward = told.get("reward")
        return StepResult(
            observation=self._messages(action, self._shown(told)),
            reward=None if reward is None else float(reward),
            done=bool(told.get("done")),
        )

    async def close(self) -> None:
        """Ends the session and closes the connection, also if the server does not answer."""
        socket, http = self._socket, self._http
        self._socket = self._http = None
        try:
            if socket is not None and not socket.closed:
                await socket.send_str(json.dumps({"type": "close"}))
                await socket.close()
        except ConnectionError:
            pass  # the connection has already ended on both sides
        finally:
            if http is not None:
                await http.close()

    async def _connect(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(connect=self._config.step_timeout_s))
        try:
            self._socket = await self._http.ws_connect(
                f"{self._config.url.rstrip('/')}/ws",
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                max_msg_size=16 << 20,
            )
        except aiohttp.ClientError as error:
            raise RuntimeError(f"the server {self._config.url} does not answer: {error}") from error

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the observation in the server's answer. Raises `_Refused`, and RuntimeError if the server is lost."""
        socket = self._socket
        assert socket is not None
        answered = False
        try:
            await socket.send_str(json.dumps({"type": kind, "data": dict(data)}))
            reply = await socket.receive()
            answered = True
        except ConnectionError as error:
            raise RuntimeError(f"the server {self._config.url} is lost: {error}") from error
        finally:
            if not answered and self._http is not None:  # the next call would read a late answer
                await self._http.close()
        if reply.type is not aiohttp.WSMsgType.TEXT:
            why = socket.exception() or f"it closed the connection with {socket.close_code}"
            raise RuntimeError(f"the server {self._config.url} is lost: {why}")
        message = json.loads(reply.data)
        told: dict[str, Any] = message.get("data") or {}
        if message.get("type") == "error":
            more = f": {json.dumps(told['errors'])}" if "errors" in told else ""
            raise _Refused(str(told.get("code")), f"{told.get('message')}{more}")
        return told

    def _messages(self, action: Action, text: str) -> Any:
        """Returns an observation as a user message, or as the results of all calls of the action."""
        if not action.tool_calls:
            return text
        first = next(place for place, call in enumerate(action.tool_calls) if call.name == _TOOL)
        words = [text if place == first else "One call at a time." for place in range(len(action.tool_calls))]
        return [{"role": "tool", "content": word} for word in words]

    def _shown(self, told: Mapping[str, Any]) -> str:
        observation = {name: inner for name, inner in (told.get("observation") or {}).items() if name != "metadata"}
        name = self._config.observation_field
        if name is None:
            return json.dumps(observation, ensure_ascii=False)
        if name not in observation:
            raise RuntimeError(
                f"env.observation_field={name}: an observation of this server has {', '.join(observation) or 'none'}."
            )
        value = observation[name]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_schemas: dict[str, dict[str, Any]] = {}
_asking = threading.Lock()


def tools(row: Mapping[str, Any], config: OpenEnvConfig) -> Sequence[dict[str, Any]]:
    """Returns the tool "act" with the server's schema of an action; a process fetches the schema once."""
    if config.text_field is not None:
        return []
    with _asking:
        if config.url not in _schemas:
            _schemas[config.url] = _schema(config)
        described = _schemas[config.url]
    function = {"name": _TOOL, "description": described.get("description") or "Acts.", "parameters": described}
    return [{"type": "function", "function": function}]


def _schema(config: OpenEnvConfig) -> dict[str, Any]:
    address = f"{config.url.rstrip('/')}/schema"
    try:
        with opener(address).open(address, timeout=config.step_timeout_s) as reply:
            action: dict[str, Any] = json.load(reply)["action"]
    except (OSError, ValueError, KeyError) as error:
        how = proxy_description(address)
        raise ValueError(f"env.url={config.url}: {address}{how} gives no schema of an action: {error}") from error
    fields = {name: schema for name, schema in action.get("properties", {}).items() if name != "metadata"}
    return {**action, "properties": fields}


def check(config: OpenEnvConfig) -> None:
    """Raises ValueError for an invalid address."""
    if not config.url.startswith(("http://", "https://")):
        raise ValueError(f"env.url={config.url}: write the address of an OpenEnv server, http://HOST:PORT.")


SPEC = EnvSpec(
    name="openenv",
    summary="environments of OpenEnv on a server",
    config=OpenEnvConfig,
    open=OpenEnvEpisode,
    tools=tools,
    check=check,
)
