"""The ASGI application of the endpoint: finds the session of a request, and sends the answer complete or as a stream.

`served` serves the application on a port of this host, in the event loop of the rollout.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import uvicorn

from relax_core.data.tokenizer import LARGE_TEXT, PromptTokenizer
from relax_core.engines.asgi_server import (
    JSON,
    ClientDisconnected,
    Connection,
    HttpError,
    OpenConnections,
    Receive,
    Scope,
    Send,
    connection_limit,
    headers,
    read_body,
    start_response,
)
from relax_core.engines.held_port import BACKLOG, listening_socket
from relax_core.engines.protocol.generate_messages import EVENT_STREAM
from relax_core.rollout.agents.agent_session import AgentSession, OpenTurn, SessionTable
from relax_core.rollout.agents.answer_reading import IncrementalDetokenizer, Piece, StreamedReply
from relax_core.rollout.agents.anthropic_messages import MessagesEvents, messages_error, messages_reply, read_messages
from relax_core.rollout.agents.chat_completions import ChatEvents, chat_error, chat_reply, read_chat
from relax_core.rollout.agents.chat_messages import RequestRefused, TurnAnswer, TurnRequest
from relax_core.rollout.agents.external_agents import SESSIONS, ExternalAgents
from relax_core.rollout.agents.openai_responses import ResponsesEvents, read_responses, responses_reply
from relax_core.rollout.prompt_tokens import off_loop

if TYPE_CHECKING:
    from relax_core.engines.asgi_server import Connection


QUIET_S = 15.0  # seconds between comments in an idle stream, which prevent timeouts of clients
RETRIES = b"x-stainless-retry-count"  # header in which OpenAI's and Anthropic's clients count the retries of a request
MAX_BODY_BYTES = 16 << 20


class Events(Protocol):
    """Makes the server-sent events of one streamed answer."""

    def begin(self) -> bytes:
        """Returns the events before the text."""

    def piece(self, piece: Piece) -> bytes:
        """Returns the events of new text."""

    def end(self, answer: TurnAnswer) -> bytes:
        """Returns the events after the text."""

    def failure(self, error: RequestRefused) -> bytes:
        """Returns the event that ends a stream with an error."""


@dataclass(frozen=True, kw_only=True)
class ApiProtocol:
    """Defines one protocol: functions that parse a body, and make a reply, the events of a stream, and an error."""

    read: Callable[[bytes], TurnRequest]
    reply: Callable[[TurnRequest, TurnAnswer, str], Mapping[str, Any]]
    events: Callable[[TurnRequest, OpenTurn, str], Events]
    error: Callable[[RequestRefused], Mapping[str, Any]]


CHAT = ApiProtocol(
    read=read_chat,
    reply=lambda request, answer, session: chat_reply(request, answer, session=session),
    events=lambda request, turn, session: ChatEvents(
        request, number=turn.asked.number, created_s=int(turn.began_s), session=session
    ),
    error=chat_error,
)
MESSAGES = ApiProtocol(
    read=read_messages,
    reply=lambda request, answer, session: messages_reply(request, answer, session=session),
    events=lambda request, turn, session: MessagesEvents(
        request, number=turn.asked.number, prompt_tokens=len(turn.asked.prompt_ids), session=session
    ),
    error=messages_error,
)
RESPONSES = ApiProtocol(
    read=read_responses,
    reply=lambda request, answer, session: responses_reply(request, answer, session=session),
    events=lambda request, turn, session: ResponsesEvents(
        request, number=turn.asked.number, created_s=int(turn.began_s), session=session
    ),
    error=chat_error,
)
API_PROTOCOLS: Mapping[str, ApiProtocol] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}


@dataclass(frozen=True, eq=False)
class _Client:
    """Holds the client of one request.

    ``send`` sends to the client. The task ``watcher`` ends when the event loop notices that the client has closed the
    connection.
    """

    connection: Connection
    send: Send
    watcher: asyncio.Task[None]

    def has_hung_up(self) -> bool:
        """Returns whether the client has closed the connection by now.

        ``watcher`` notices a closed connection only some iterations of the event loop later, so the connection itself
        is checked, too. Otherwise an answer that ends in this time would be trained although the agent never received
        the answer.
        """
        return self.watcher.done() or self.connection.has_hung_up()

    async def takes(self, body: bytes) -> bool:
        """Sends the rest of an answer; returns True if the kernel accepted all bytes while the connection was open.

        The wait for the kernel ends when the client reads or hangs up, or when the server's sweep closes a connection
        with a client that reads nothing. A kernel that receives bytes for a closed socket resets the connection. If the
        client runs on the same machine, the reset happens before the write returns; this reveals a client that hung up
        after the check by `has_hung_up`. Two cases remain unnoticed: a client that hangs up with unread bytes in the
        kernels' buffers, and a client on another machine if the packet about its end has not arrived.
        """
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        await self.connection.flow.drain()
        # Checked before the response ends, because the server may close the connection at the end. A client that
        # closes the connection later has read all bytes.
        taken = not self._was_reset()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        return taken

    def _was_reset(self) -> bool:
        transport = self.connection.transport
        if transport.is_closing():  # a write failed, or the client hung up before the kernel had all bytes
            return True
        errors = select.poll()
        errors.register(transport.get_extra_info("socket").fileno(), 0)  # poll always reports errors
        return bool(errors.poll(0))


class EndpointApp:
    """Answers requests of agents. ``model`` is the name of the policy in the list of models.

    ``outside`` opens sessions for external agents; with None, external agents are refused.
    """

    def __init__(
        self,
        sessions: SessionTable,
        tokenizer: PromptTokenizer,
        *,
        model: str,
        max_body_bytes: int = MAX_BODY_BYTES,
        outside: ExternalAgents | None = None,
    ) -> None:
        self._sessions = sessions
        self._tokenizer = tokenizer
        self._model = model
        self._max_body_bytes = max_body_bytes
        self._outside = outside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        key, path = _path_key(scope["path"])
        shape = API_PROTOCOLS.get(path, CHAT)
        try:
            await self._route(scope, path, shape, key or _header_key(scope), receive=receive, send=send)
        except ClientDisconnected:
            return
        except HttpError as error:
            await _refuse(send, shape, RequestRefused(error.status, str(error)))
        except RequestRefused as error:
            await _refuse(send, shape, error)

    async def _route(
        self, scope: Scope, path: str, shape: ApiProtocol, key: str, *, receive: Receive, send: Send
    ) -> None:
        if self._outside is not None and (path == SESSIONS or path.startswith(f"{SESSIONS}/")):
            self._outside.check(scope["method"], path, token=key)
            body = await read_body(scope, receive, limit=self._max_body_bytes)
            await _send_json(send, self._outside.answer(path, body))
            return
        models = path == "/v1/models" or path.startswith("/v1/models/")
        if path not in API_PROTOCOLS and not models:
            known = ", ".join((*API_PROTOCOLS, "/v1/models", *(() if self._outside is None else (SESSIONS,))))
            raise RequestRefused(404, f"there is no route {path[:80]!r}; the routes are {known}", code="not_found")
        wanted = "GET" if models else "POST"
        if scope["method"] != wanted:
            raise RequestRefused(405, f"{path}: takes {wanted}, not {scope['method']}")
        session = self._sessions.find(key)
        if not scope["connection"].showed_token():
            raise RequestRefused(503, "too many requests are under way; ask again", retry_after_s=1)
        if models:
            await self._models(path, send)
            return
        body = await read_body(scope, receive, limit=self._max_body_bytes)
        request = await off_loop(len(body) > LARGE_TEXT, lambda: shape.read(body))
        turn = await session.ask(replace(request, size=len(body)), asked_again=_asked_again(scope))
        client = _Client(scope["connection"], send, asyncio.create_task(_disconnect(receive)))
        await self._answer(session, turn, request, shape, client=client)

    async def _models(self, path: str, send: Send) -> None:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "relax"}
        payload = model if path != "/v1/models" else {"object": "list", "data": [model]}
        await _send_json(send, payload)

    async def _answer(
        self, session: AgentSession, turn: OpenTurn, request: TurnRequest, shape: ApiProtocol, *, client: _Client
    ) -> None:
        """Waits for an answer and sends the answer. An answer is sampled to its end even if the client hangs up."""
        name = session.record.uid
        client.watcher.add_done_callback(lambda done: turn.grew.set())
        turn.clients.append(client.has_hung_up)
        given = False
        try:
            if request.stream:
                events = shape.events(request, turn, name)
                given = await self._stream(turn, events, client)
            else:
                await _end(turn, client.watcher)
                if turn.failure is not None:
                    raise turn.failure
                if turn.answer is not None and not client.has_hung_up():
                    body = msgspec.json.encode(shape.reply(request, turn.answer, name))
                    await start_response(client.send, status=200, content_type=JSON, length=len(body))
                    given = await client.takes(body)
        finally:
            turn.clients.remove(client.has_hung_up)
            client.watcher.cancel()
            if given:
                turn.given()
            else:
                turn.hung_up()

    async def _stream(self, turn: OpenTurn, events: Events, client: _Client) -> bool:
        """Sends an answer while it is sampled; returns True if the client has received the complete answer."""

        async def write(body: bytes, *, more: bool = True) -> None:
            await client.send({"type": "http.response.body", "body": body, "more_body": more})

        growing, streamed = IncrementalDetokenizer(self._tokenizer), StreamedReply(turn.form)
        await start_response(client.send, status=200, content_type=EVENT_STREAM.encode())
        await write(events.begin())
        sent: list[int] = []
        while True:
            turn.grew.clear()
            if client.watcher.done():
                return False
            if turn.anew or turn.failure is not None or turn.tokens[: len(sent)] != sent:
                lost = RequestRefused(503, "an engine was lost in the middle of the answer; ask again")
                await write(events.failure(turn.failure or lost), more=False)
                return False
            new = turn.tokens[len(sent) :]
            if new:
                sent += new
                growing.add(new)
            if turn.answer is not None:
                if client.has_hung_up():
                    return False
                pieces = streamed.ended(turn.answer.reply)
                return await client.takes(b"".join(map(events.piece, pieces)) + events.end(turn.answer))
            if new and (pieces := streamed.grown(growing.text)):
                await write(b"".join(map(events.piece, pieces)))
            if not await _news(turn):
                await write(b": the answer is under way\n\n")


async def _end(turn: OpenTurn, watcher: asyncio.Task[None]) -> None:
    """Waits until an answer has ended or the client has hung up."""
    while True:
        turn.grew.clear()
        if turn.done or watcher.done():
            return
        await _news(turn)


async def _news(turn: OpenTurn) -> bool:
    """Waits until an answer grows or ends, or the client hangs up; returns False after `QUIET_S` seconds."""
    try:
        async with asyncio.timeout(QUIET_S):
            await turn.grew.wait()
    except TimeoutError:
        return False
    return True


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(
    send: Send, payload: Mapping[str, Any], *, status: int = 200, more: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    body = msgspec.json.encode(payload)
    fields = [(b"content-type", JSON), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def _refuse(send: Send, shape: ApiProtocol, error: RequestRefused) -> None:
    more = () if error.retry_after_s is None else ((b"retry-after", str(error.retry_after_s).encode()),)
    await _send_json(send, shape.error(error), status=error.status, more=more)


def _path_key(path: str) -> tuple[str, str]:
    """Returns a path's key and the path without the key. Clients that cannot set a key have a base URL with the key."""
    if not path.startswith("/s/"):
        return "", path
    key, slash, rest = path.removeprefix("/s/").partition("/")
    return key, slash + rest


def _header_key(scope: Scope) -> str:
    given = headers(scope)
    scheme, _, token = given.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else given.get(b"x-api-key", b"")
    return key.decode("latin-1")


def _asked_again(scope: Scope) -> bool:
    count = headers(scope).get(RETRIES, b"0")
    return count.isdigit() and int(count) > 0


KEEP_ALIVE_S = 600  # an agent may think or run tools between two requests
GRACE_S = 1  # seconds in which open requests may end when the server stops
POLL_S = 0.01


class _AgentConnection(Connection):
    """Defines a connection; its ``flow`` is drained only when the kernel has accepted all written bytes.

    By default, a drained connection may have bytes in a buffer of this process. These bytes are lost if the client
    hangs up.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Adds the connection to the open connections."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signal handling to the server's process."""
        yield


@asynccontextmanager
async def served(app: EndpointApp, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serves ``app`` while the context is open; yields the base URL. With port 0, any free port is used.

    Raises OSError if the address cannot be bound.
    """
    connections = OpenConnections(connection_limit())
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", partial(_AgentConnection, connections)),
        ws="none",
        lifespan="off",
        log_config=None,  # uvicorn's log could contain keys of clients
        log_level="error",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    listener = listening_socket(host, port)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sweeping = asyncio.create_task(connections.sweep())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        sweeping.cancel()
        await asyncio.wait([serving], timeout=GRACE_S + 5.0)
        listener.close()
