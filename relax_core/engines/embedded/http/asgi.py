"""The little of ASGI that the engine needs: read a body within a limit, answer, refuse in words."""

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
    """A refusal with its status; the text says key, value and fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


def headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The request's body; 413 past ``limit`` bytes."""
    announced = int(headers(scope).get(b"content-length", b"0"))
    if announced > limit:
        raise HttpError(413, f"{scope['path']}: body of {announced} bytes, at most {limit} are taken; send less")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise HttpError(413, f"{scope['path']}: body of more than {limit} bytes; send less at once")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def start_response(send: Send, *, status: int, content_type: bytes, length: int | None = None) -> None:
    fields = [(b"content-type", content_type)]
    if length is not None:
        fields.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": fields})


async def answer(send: Send, payload: Any, *, status: int = 200, msgpack: bool = False) -> None:
    """One whole response as JSON, or as msgpack where the client asked for it."""
    body = (msgspec.msgpack if msgpack else msgspec.json).encode(payload)
    content_type = b"application/msgpack" if msgpack else JSON
    await start_response(send, status=status, content_type=content_type, length=len(body))
    await send({"type": "http.response.body", "body": body})


def clipped(words: str, *, length: int = 200) -> str:
    """What a client sent, short enough to be told to it."""
    return words if len(words) <= length else f"{words[:length]}…"


def error_payload(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "code": status}}
