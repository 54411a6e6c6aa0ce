"""Requests the score of an answer from an external server, by JSON over HTTP.

A request is ``POST url`` with ``{"prompt", "response", "label", "metadata"}``. ``metadata`` has the other columns of
the data row. slime's ``remote_rm`` sends only the first three fields. The request is valid JSON: a number that is not
finite becomes null, bytes become base64, and other values without a JSON type, such as dates, become texts. The
server's answer is a number or an object with ``score``, optionally ``exact``, ``why``, ``reason``, and further numbers,
which become parts of the reward.

After a status 5xx, 408 or 429 or a refused connection, the request is repeated with growing pauses until ``timeout_s``;
then there is no reward. Any other 4xx ends the run, because it would occur for every answer. The source retries ten
times, up to two minutes each, and then ends the run. A redirect is not followed and ends the run. At most 64 requests
are in flight.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, RewardUnusable

_USED = 0.9  # share of timeout_s for requests and pauses, to report the cause before the call is cancelled
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 2.0
_BUSY = (408, 429)
_MAX_BYTES = 1 << 20
_SHOWN = 200


@dataclass(frozen=True)
class RemoteConfig(RewardConfig):
    """Holds the settings of the reward: the server's URL, and the environment variable with the bearer token."""

    name: str = "remote"
    url: str = ""
    token_env: str | None = None


class _Again(Exception):
    """A request failed, but a retry may succeed. The text of the exception is the cause."""


async def score(given: RewardInput, config: RemoteConfig) -> RewardOutput:
    """Returns the server's score, or None if it gives none in time. Raises `RewardUnusable` for a status of 4xx."""
    import aiohttp

    loop = asyncio.get_running_loop()
    deadline = loop.time() + _USED * config.timeout_s
    wait_s, cause = _FIRST_WAIT_S, ""
    while True:
        left_s = deadline - loop.time()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return _output(await _asked(given, config), config)
        except (_Again, aiohttp.ClientError, TimeoutError) as error:
            cause = str(error) or cause or f"no answer within {config.timeout_s:g} s"
        if loop.time() + wait_s >= deadline:
            return RewardOutput(reward=None, reason=f"{config.url}: {cause}", cause="timeout")
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


async def _asked(given: RewardInput, config: RemoteConfig) -> bytes:
    """Returns the body of the server's answer."""
    import aiohttp

    row = {key: value for key, value in given.row.items() if key not in ("prompt", "answer")}
    question = {"prompt": given.row.get("prompt"), "response": given.response, "label": given.answer, "metadata": row}
    headers = {"Content-Type": "application/json"}
    if config.token_env is not None:
        headers["Authorization"] = f"Bearer {os.environ.get(config.token_env, '')}"
    body = json.dumps(_as_json(question), default=str, allow_nan=False)
    limit = aiohttp.ClientTimeout(total=config.timeout_s)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(config.url, data=body, headers=headers, allow_redirects=False) as answer,
    ):
        content = bytearray()
        async for part in answer.content.iter_chunked(1 << 16):
            content += part
            if len(content) > _MAX_BYTES:
                raise _Again(f"the response has more than {_MAX_BYTES:,} bytes")
        shown = bytes(content[:_SHOWN]).decode(errors="replace")
        if answer.status >= 500 or answer.status in _BUSY:
            raise _Again(f"status {answer.status}: {shown}")
        if 300 <= answer.status < 400:  # token and answer must not be sent to another address
            raise RewardUnusable(
                f"reward.url={config.url}: the server redirects the request, with status {answer.status}. Set the "
                "address that answers without a redirect."
            )
        if answer.status >= 400:
            raise RewardUnusable(
                f"reward.url={config.url}: the server refuses the request with status {answer.status}: {shown} "
                "Correct the URL or the server; a request is a POST with prompt, response, label and metadata."
            )
        return bytes(content)


def _as_json(value: Any) -> Any:
    """Converts numbers and bytes at any depth to values that JSON supports."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(name): _as_json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_as_json(element) for element in value]
    return _as_json(value.tolist()) if hasattr(value, "tolist") else value  # of numpy


def _output(body: bytes, config: RemoteConfig) -> RewardOutput:
    """Returns the score in a response body, or no reward if the body has no score."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    fields: Mapping[str, Any] = answer if isinstance(answer, dict) else {"score": answer}
    value: Any = fields.get("score")
    if not _is_number(value):
        message = str(fields.get("reason") or body[:_SHOWN].decode(errors="replace"))
        return RewardOutput(reward=None, reason=f"{config.url}: no score: {message}")
    known = ("score", "exact", "why", "reason")
    return RewardOutput(
        reward=float(value),
        exact=bool(fields.get("exact", value == 1)),
        parts={key: float(field) for key, field in fields.items() if key not in known and _is_number(field)} or None,
        why=str(fields.get("why", "")),
    )


def _is_number(value: Any) -> Any:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check(config: RemoteConfig) -> None:
    """Raises ValueError if the URL is invalid or the environment variable is not set."""
    if not config.url.startswith(("http://", "https://")):
        raise ValueError(
            f"reward.url={config.url!r}: the server's URL, such as reward.url=http://127.0.0.1:8000/score."
        )
    if config.token_env is not None and not os.environ.get(config.token_env):
        raise ValueError(
            f"reward.token_env={config.token_env}: this environment variable is not set. Set it, or drop it."
        )


SPEC = RewardSpec(
    name="remote",
    shadow="final_answer",
    summary="the score of your own server, by JSON over HTTP",
    config=RemoteConfig,
    score=score,
    check=check,
)
