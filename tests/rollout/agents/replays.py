"""Loads recorded conversations of real clients: the request bodies of three turns and the engine's responses.

`make test-agents` runs these conversations with the real clients. With RELAX_RECORD_REPLAYS=1 it rewrites the files in
`tests/rollout/agents/replays/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.rollout.agents.endpoint_app import EndpointApp

FOLDER = Path(__file__).parent / "replays"
LONGEST_SYSTEM = 200  # maximum recorded characters of a system message; some libraries send 10 KB
CALL = '<tool_call>\n{"name": "calc", "arguments": {"expression":  "12*7"}}\n</tool_call>'
THOUGHT = f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}"
SAYS = {
    "tools": (THOUGHT, CALL.replace("12*7", "84*2"), "It is 168."),
    # smolagents' tool agent ends with a call. The code agent of smolagents writes code between <code> tags.
    "final_answer": (
        THOUGHT,
        CALL.replace("12*7", "84*2"),
        '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "It is 168."}}\n</tool_call>',
    ),
    "code": (
        "<think>\nhm\n</think>\n\nThought: 12*7 first.\n<code>\nn = calc(expression='12*7')\nprint(n)\n</code>",
        "Thought: twice that.\n<code>\nprint(calc(expression=f'{n}*2'))\n</code>",
        "<code>\nfinal_answer('It is 168.')\n</code>",
    ),
}
CONTEXT = 32768


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Defines one mode of a client: the engine's responses, and the number of segments of the episode."""

    client: str
    mode: str
    says: str = "tools"
    segments: int = 1

    @property
    def name(self) -> str:
        return f"{self.client}_{self.mode}"

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.json"


def _conversations() -> Iterator[Conversation]:
    modes = {
        "openai": "chat chat_stream responses responses_stream responses_by_id",
        "anthropic": "messages messages_stream",
        "openai_agents": "chat chat_stream responses responses_stream",
        "pydantic_ai": "chat chat_stream responses responses_stream messages messages_stream",
        "langgraph": "chat chat_stream responses responses_stream messages messages_stream",
    }
    for client, names in modes.items():
        for mode in names.split():
            yield Conversation(client=client, mode=mode)
    for mode in ("tools", "tools_stream"):
        yield Conversation(client="smolagents", mode=mode, says="final_answer", segments=3)
    for mode in ("code", "code_stream"):
        yield Conversation(client="smolagents", mode=mode, says="code")


CONVERSATIONS = tuple(_conversations())


class Recorder:
    """Wraps the endpoint's application and records the path and body of each request."""

    def __init__(self, app: EndpointApp) -> None:
        self._app = app
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = bytearray()

        async def read() -> Any:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                self.requests.append({"path": scope["path"], "body": json.loads(body)})
            return message

        await self._app(scope, read, send)

    def write(self, conversation: Conversation, *, version: str) -> None:
        """Writes the recorded requests. Cuts long system messages in the same way in all requests."""
        requests = [{"path": request["path"], "body": _short_system(request["body"])} for request in self.requests]
        told = {"client": version, "says": conversation.says, "segments": conversation.segments, "requests": requests}
        FOLDER.mkdir(exist_ok=True)
        text = json.dumps(told, indent=1, ensure_ascii=False)
        conversation.file.write_text(f"{text}\n", encoding="utf-8")


def _short_system(body: dict[str, Any]) -> dict[str, Any]:
    messages = [
        {**message, "content": _shortened(message["content"])} if message.get("role") == "system" else message
        for message in body.get("messages", [])
    ]
    return {**body, "messages": messages} if messages else body


def _shortened(content: Any) -> Any:
    if isinstance(content, str):
        return content[:LONGEST_SYSTEM]
    return [{**part, "text": part["text"][:LONGEST_SYSTEM]} if "text" in part else part for part in content]
