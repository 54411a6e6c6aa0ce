"""Assigns attempts at episodes to external agents. An agent opens a session, sends a reward, and ends the session."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hmac import compare_digest
from hmac import digest as keyed_digest
from pathlib import Path
from typing import Any

from relax_core.contracts.untrusted_values import decode_json
from relax_core.rollout.agent_processes.agent_tasks import AgentResult, AgentTask, result_of
from relax_core.rollout.agents.chat_messages import RequestRefused, refused

SESSIONS = "/v1/relax/sessions"
RETRY_S = 2
TOKEN_FILE, ADDRESS_FILE = "token", "endpoint"


@dataclass(eq=False, kw_only=True)
class _Attempt:
    """Holds an attempt that waits for an agent or is played by an agent; ``given`` is the agent's result so far."""

    task: AgentTask
    done: asyncio.Future[AgentResult]
    taken_s: float = 0.0
    given: dict[str, Any] = field(default_factory=dict)

    def end(self, result: AgentResult) -> None:
        if not self.done.done():
            self.done.set_result(result)


class ExternalAgents:
    """Holds the attempts of a rollout worker for external agents; the agents send ``token`` with their requests.

    An agent that sends no request for ``idle_s`` seconds is treated as lost, and its attempt ends as env_failed.
    """

    def __init__(self, *, token: str, idle_s: float) -> None:
        self._token = token
        self._idle_s = idle_s
        self._waiting: OrderedDict[str, _Attempt] = OrderedDict()  # by session name
        self._taken: dict[str, _Attempt] = {}

    async def play(self, task: AgentTask) -> AgentResult:
        """Returns the result of a task; see `AgentRunner`."""
        name = secrets.token_hex(8)
        attempt = self._waiting[name] = _Attempt(task=task, done=asyncio.get_running_loop().create_future())
        try:
            await task.began.wait()
            while not attempt.done.done():
                quiet_s = min(task.quiet_s(), time.monotonic() - attempt.taken_s)
                if quiet_s >= self._idle_s:
                    message = f"its agent sent no request for {self._idle_s:g} s, half of agent.timeout_s"
                    return AgentResult(failed=message)
                await asyncio.wait([attempt.done], timeout=self._idle_s - quiet_s)
            return attempt.done.result()
        finally:
            self._waiting.pop(name, None)
            self._taken.pop(name, None)

    async def aclose(self) -> None:
        """Does nothing, because Relax did not start these agents."""

    def check(self, method: str, path: str, *, token: str) -> None:
        """Raises `RequestRefused` for a request with a wrong token or method."""
        if not compare_digest(token.encode(errors="surrogatepass"), self._token.encode()):
            raise RequestRefused(
                401,
                f"{SESSIONS} requires the token in the run's folder: Authorization: Bearer $(cat RUN/{TOKEN_FILE})",
                code="invalid_api_key",
            )
        if method != "POST":
            raise RequestRefused(405, f"{path[:80]}: takes POST, not {method}")

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Returns the reply to a checked request with a path at or below `SESSIONS`. Raises `RequestRefused`."""
        given = _object(body)
        name, _, verb = path.removeprefix(SESSIONS).strip("/").partition("/")
        if not name:
            return self._open()
        if verb not in ("reward", "end"):
            raise RequestRefused(404, f"there is no route {path[:80]!r}; below a session are /reward and /end")
        return self._reply(name, given, ends=verb == "end")

    def _open(self) -> dict[str, Any]:
        if not self._waiting:
            raise RequestRefused(429, "no task waits for an agent now; ask again", retry_after_s=RETRY_S)
        name, attempt = self._waiting.popitem(last=False)
        self._taken[name] = attempt
        attempt.taken_s = time.monotonic()
        attempt.task.began.set()
        return {"session": name, **attempt.task.as_json()}

    def _reply(self, name: str, given: dict[str, Any], *, ends: bool) -> dict[str, Any]:
        attempt = self._taken.get(name)
        if attempt is None or attempt.done.done():
            raise RequestRefused(410, "this session has ended, or no session has this name", code="episode_ended")
        told = {**attempt.given, **given}
        result = result_of(told, what="the result")
        if result.failed and not (ends and told.get("error")):
            raise refused(result.failed)
        attempt.given = told
        if ends:
            attempt.end(result)
        return {"session": name, "ended": ends}


def _object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body; an empty body is an empty object."""
    try:
        given: Any = decode_json(body, Any) if body.strip() else {}
    except ValueError as error:
        raise refused(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise refused('the body is not a JSON object; send {} or such as {"reward": 1.0}')
    return given


def sessions_token(run_token: str) -> str:
    """Returns the token that opens sessions, the same for all attempts of a run; the engines refuse this token."""
    return keyed_digest(run_token.strip().encode(), b"sessions of agents", "sha256").hex()


def write_address(folder: Path, *, rank: int, base_url: str, token: str) -> Path:
    """Writes the address and the token of a rollout worker's endpoint to files that only this user may read.

    Returns the address file: `ADDRESS_FILE` for worker 0; other workers append their number to this name.
    """
    file = folder / (ADDRESS_FILE if not rank else f"{ADDRESS_FILE}-{rank}")
    for path, text in ((folder / TOKEN_FILE, token), (file, base_url)):
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            opened.write(f"{text}\n")
        partial.replace(path)
    return file
