"""Reads request bodies within a limit and writes responses: the part of ASGI that the engine needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = b"application/json"


class HttpError(Exception):
    """Refuses a request with an HTTP status; the text names the key, its value and the fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientDisconnected(Exception):
    """The client closed the connection before its request had arrived, so no answer is sent."""


def headers(scope: Scope) -> dict[bytes, bytes]:
    """Returns the request's headers by lower-case name."""
    return dict(scope["headers"])


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """Returns the request's body. Raises HttpError 413 past ``limit`` bytes, ClientDisconnected if the client left."""
    announced = int(headers(scope).get(b"content-length", b"0"))
    if announced > limit:
        raise HttpError(413, f"{scope['path']}: body of {announced} bytes, at most {limit} are taken; send less")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise HttpError(413, f"{scope['path']}: body of more than {limit} bytes; send less at once")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def start_response(send: Send, *, status: int, content_type: bytes, length: int | None = None) -> None:
    """Sends the response's head; ``length`` is the body's length in bytes if it is known."""
    fields = [(b"content-type", content_type)]
    if length is not None:
        fields.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": fields})


async def answer(send: Send, payload: Any, *, status: int = 200) -> None:
    """Sends one whole response as JSON."""
    body = msgspec.json.encode(payload)
    await start_response(send, status=status, content_type=JSON, length=len(body))
    await send({"type": "http.response.body", "body": body})


def clipped(words: str, *, length: int = 200) -> str:
    """Returns the first ``length`` characters of a client's text, short enough for an error message."""
    return words if len(words) <= length else f"{words[:length]}…"


def error_payload(status: int, message: str) -> dict[str, Any]:
    """Returns the JSON body of a refusal, in SGLang's shape."""
    return {"error": {"message": message, "code": status}}
