"""A real HTTP server on loopback, with OpenAI's chat route and scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

Answer = Callable[[dict[str, Any]], Awaitable[str | web.Response] | str | web.Response]


class StubServer:
    """Answers each chat request with ``answer(body)``. `asked` holds the bodies. Use it as a context manager."""

    def __init__(self, answer: Answer, *, port: int = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._answer = answer
        self._port = port
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        said = self._answer(body)
        if asyncio.iscoroutine(said):
            said = await said
        if isinstance(said, web.Response):
            return said
        message = {"role": "assistant", "content": said}
        return web.json_response(
            {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {"total_tokens": 7}}
        )
