"""The client of every engine calls SGLang's HTTP routes and reads compact frames or SGLang's events."""

from __future__ import annotations

import asyncio
import http.client
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from relax_core.contracts.engine import (
    EngineError,
    EngineUnreachable,
    Generated,
    PauseMode,
    PromptRequest,
    SamplingParams,
)
from relax_core.engines.protocol.frames import (
    EVENT_STREAM,
    INT32,
    MSGPACK,
    Finished,
    FrameReader,
    Grown,
    StreamEnd,
    StreamFailure,
)
from relax_core.engines.protocol.request_body import OnTokens, checked_prompt_tokens, generate_body
from relax_core.engines.protocol.score_calls import TokenScores, TokensToScore, read_scores, score_body
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION, EventReader
from relax_core.engines.protocol.weight_calls import WeightCalls

if TYPE_CHECKING:
    import aiohttp

CONNECT_S = 5.0  # an engine is on this host or in this rack, so a connection that takes longer will not succeed
_encoder = msgspec.json.Encoder()


class EngineClient(WeightCalls):
    """Calls one engine.

    ``request_timeout_s`` is the longest silence in `generate` and `score`, in seconds; ``control_timeout_s`` is the
    longest duration of every other call. `generate` belongs to one event loop, the other calls to one thread at a time.
    Calls raise EngineUnreachable if the process does not answer, and EngineError with the engine's own text if it
    refuses.
    """

    def __init__(self, url: str, token: str, *, request_timeout_s: float, control_timeout_s: float) -> None:
        self.url = url
        self._authorization = f"Bearer {token}"
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._session_loop: asyncio.AbstractEventLoop | None = None
        self._connection: http.client.HTTPConnection | None = None
        self._control = threading.Lock()

    # -- generate -------------------------------------------------------------------------------------------------
    async def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        on_end: Callable[[StreamEnd], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncIterator[Generated]:
        """Sends one request for all prompts and yields each response as soon as it is finished.

        The responses are those of `PromptRequest.samples`, or ``params.n`` for each prompt. ``on_end`` gets the
        engine's own times; only the embedded engine reports them. ``on_tokens`` gets the tokens of this call while they
        are sampled, and may miss the last ones. If the caller leaves the iteration early, the connection is closed and
        the engine aborts the samples that still run.
        """
        expected = sum(params.n if prompt.samples is None else len(prompt.samples) for prompt in prompts)
        told = {} if on_tokens is None else {"tells_tokens": True}
        body = generate_body(prompts, params, **told)
        async for one in self._streamed(
            body,
            params,
            lambda response: self._responses(response, prompts, params, on_end, on_tokens),
            expected=expected,
        ):
            yield one

    async def _streamed(
        self,
        body: dict[str, Any],
        params: SamplingParams,
        read: Callable[[aiohttp.ClientResponse], AsyncIterator[Generated]],
        *,
        expected: int,
    ) -> AsyncIterator[Generated]:
        """Posts ``body`` to /generate and yields the ``expected`` responses that ``read`` finds in the answer."""
        import aiohttp

        found = 0
        try:
            async with self._http_session().post(
                f"{self.url}/generate",
                data=_encoder.encode(body),
                headers={"Content-Type": "application/json", "Accept": f"{MSGPACK}, {EVENT_STREAM}"},
                allow_redirects=False,  # the token is for this address
            ) as response:
                if response.status != 200:
                    raise self._refusal("/generate", response.status, await response.read())
                async for one in read(response):
                    found += 1
                    if params.return_routed_experts and one.response_experts is None and one.finish_reason != "abort":
                        raise EngineError(
                            f"engine {self.url} /generate: the answer has no routed experts, but "
                            "algo.routing_replay=true needs them. SGLang returns them if it is started with "
                            "--enable-return-routed-experts."
                        )
                    if params.return_kept_tokens and one.kept is None and one.output_ids.size:
                        raise EngineError(
                            f"engine {self.url} /generate: the answer does not say which tokens top_p, top_k and min_p "
                            "kept, and the trainer needs them. Use rollout.top_p=1 rollout.top_k=-1 rollout.min_p=0, "
                            "or an engine that returns them."
                        )
                    yield one
        except TimeoutError as error:
            raise EngineUnreachable(
                f"engine {self.url} /generate: silent for {self._request_timeout_s:.0f} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"engine {self.url} /generate: {_words(error)}") from error
        if found != expected:
            raise EngineUnreachable(
                f"engine {self.url} /generate: closed the connection after {found} of {expected} responses"
            )

    async def _responses(
        self,
        response: aiohttp.ClientResponse,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        on_end: Callable[[StreamEnd], None] | None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncIterator[Generated]:
        """Reads an answer: the embedded engine's frames, or the events of another engine."""
        if response.content_type == MSGPACK:
            frames = FrameReader()
            prompt_experts: dict[int, np.ndarray] = {}
            async for data in response.content.iter_any():
                for frame in frames.feed(data):
                    match frame:
                        case Finished():
                            yield self._response(frame, prompts, prompt_experts)
                        case StreamFailure(message):
                            raise EngineError(f"engine {self.url} /generate: {message}")
                        case StreamEnd() if on_end is not None:
                            on_end(frame)
                        case Grown() if on_tokens is not None:
                            ids = np.frombuffer(frame.output_ids, dtype=INT32).tolist()
                            on_tokens(frame.prompt, frame.sample, frame.start, ids)
            return
        if params.banned_token_ids:
            raise EngineError(f"engine {self.url} /generate: this engine does not support banned_token_ids")
        samples = [(index, sample) for index in range(len(prompts)) for sample in range(params.n)]
        async for one in self._events(response, EventReader(prompts, samples=samples, on_tokens=on_tokens)):
            yield one

    async def _events(self, response: aiohttp.ClientResponse, reader: EventReader) -> AsyncIterator[Generated]:
        """Reads SGLang's server-sent events and yields the responses that they finish."""
        async for data in response.content.iter_any():
            try:
                events = list(reader.feed(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise EngineError(f"engine {self.url} /generate: an event that cannot be read: {error}") from error
            for event in events:
                if isinstance(event, str):
                    raise EngineError(f"engine {self.url} /generate: {event}")
                yield event

    def _response(self, frame: Finished, prompts: Sequence[PromptRequest], known: dict[int, np.ndarray]) -> Generated:
        """Returns the response of a frame, with the experts of its prompt.

        The engine sends a prompt's experts with one of its responses only. ``known`` maps the index of a prompt to its
        experts. Raises EngineError if the engine saw another number of prompt tokens.
        """
        if frame.prompt_experts is not None:
            known[frame.prompt] = frame.prompt_experts.array()
        try:
            tokens = checked_prompt_tokens(frame.prompt_tokens, prompts[frame.prompt])
        except ValueError as error:
            raise EngineError(f"engine {self.url} /generate: {error}") from error
        experts = None if frame.response_experts is None else known[frame.prompt]
        return frame.response(prompt_tokens=tokens, prompt_experts=experts)

    async def answers(self, *, timeout_s: float) -> None:
        """Returns once the engine's process has answered, with any status.

        Raises EngineUnreachable if there is no answer within ``timeout_s`` seconds. The call belongs to the event loop
        of `generate`.
        """
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http_session().get(f"{self.url}/ready", timeout=timeout, allow_redirects=False):
                return
        except TimeoutError as error:
            raise EngineUnreachable(f"engine {self.url} /ready: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"engine {self.url} /ready: {_words(error)}") from error

    def _http_session(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._session_loop is not loop:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._request_timeout_s)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                headers={"Authorization": self._authorization},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3600.0),
                read_bufsize=1 << 20,
            )
            self._session_loop = loop
        return self._session

    async def aclose(self) -> None:
        """Closes the connections of `generate`; call it in the event loop of `generate`."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- control ----------------------------------------------------------------------------------------------------
    def ready(self) -> bool:
        """Returns True if the engine answers; an embedded engine that answers is ready. Raises EngineUnreachable."""
        self._call("GET", "/ready")
        return True

    def model_info(self) -> dict[str, Any]:
        """Returns ``weight_version``, the weights in force, and ``model_path``."""
        return self._call("GET", "/model_info")

    def server_info(self) -> dict[str, Any]:
        """Returns the settings that the engine was started with; SGLang's also hold its ``version``."""
        return self._call("GET", "/server_info")

    def loads(self) -> dict[str, Any]:
        """Returns the engine's load: ``running``, ``queued``, ``held`` samples, ``busy_s``, ``decode_steps``, more."""
        loads: dict[str, Any] = self._call("GET", "/v1/loads")["loads"][0]
        return loads

    def score(
        self, items: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Returns log-probs of given tokens under the engine's weights, and the ``top_k`` tokens at each position.

        The log-probs are those of logits / ``temperature`` over each token's kept set, without the banned tokens. The
        embedded engine honours all of these; SGLang scores at temperature 1 over the whole vocabulary only.
        """
        body = self._score_body(items, top_k=top_k, temperature=temperature, banned_token_ids=banned_token_ids)
        status, data = self._answer("POST", "/generate", body, timeout_s=self._request_timeout_s)
        if status != 200:
            raise self._refusal("/generate", status, data)
        try:
            return read_scores(data, items, top_k=top_k, fewer="kept_tokens" in body or "banned_token_ids" in body)
        except (ValueError, msgspec.DecodeError) as error:
            raise EngineError(f"engine {self.url} /generate: scores that cannot be read: {error}") from error

    def _score_body(self, items: Sequence[TokensToScore], **options: Any) -> dict[str, Any]:
        return score_body(items, **options)

    def pause(self, mode: PauseMode) -> dict[str, Any]:
        """Stops decoding until `resume`; ``mode`` says what becomes of the samples that run."""
        return self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> dict[str, Any]:
        """Ends a pause."""
        return self._call("POST", "/continue_generation", {})

    def abort(self, rid: str | None = None) -> dict[str, Any]:
        """Ends the prompt with this rid, or all prompts; the tokens so far come back with finish reason abort."""
        return self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def flush_cache(self) -> None:
        """Drops what the engine keeps of finished prompts; it refuses while samples run."""
        self._call("POST", "/flush_cache", {})

    def forget_weights(self) -> None:
        """Resets an engine that another run has used: it ends what runs, and serves nothing until it gets weights."""
        self._call("POST", "/update_weight_version", {"new_version": str(UNKNOWN_VERSION)})

    def release_memory(self) -> dict[str, Any]:
        """Frees the KV cache; the weights stay."""
        return self._call("POST", "/release_memory_occupation", {})

    def resume_memory(self) -> dict[str, Any]:
        """Lets the engine decode again after `release_memory`."""
        return self._call("POST", "/resume_memory_occupation", {})

    def close(self) -> None:
        """Closes the control connection."""
        with self._control:
            self._hang_up()

    def _call(self, method: str, route: str, payload: Any = None) -> dict[str, Any]:
        status, data = self._answer(method, route, payload, timeout_s=self._control_timeout_s)
        if status != 200:
            raise self._refusal(route, status, data)
        reply: dict[str, Any] = msgspec.json.decode(data) if data else {}
        return reply

    def _answer(self, method: str, route: str, payload: Any, *, timeout_s: float) -> tuple[int, bytes]:
        body = b"" if payload is None else _encoder.encode(payload)
        with self._control:
            reused = self._connection is not None
            try:
                status, data = self._exchange(method, route, body, timeout_s)
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
                self._hang_up()
                if not reused:
                    raise EngineUnreachable(f"engine {self.url} {route}: {_words(error)}") from error
                # The engine was restarted since the last call.
                status, data = self._exchange_anew(method, route, body, timeout_s)
            except TimeoutError as error:
                self._hang_up()
                raise EngineUnreachable(f"engine {self.url} {route}: no answer within {timeout_s:.0f} s") from error
            except (OSError, http.client.HTTPException) as error:
                self._hang_up()
                raise EngineUnreachable(f"engine {self.url} {route}: {_words(error)}") from error
        return status, data

    def _exchange_anew(self, method: str, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        try:
            return self._exchange(method, route, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self._hang_up()
            raise EngineUnreachable(f"engine {self.url} {route}: {_words(error)}") from error

    def _exchange(self, method: str, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        if self._connection is None:
            address = urlsplit(self.url)
            self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        headers = {"Content-Type": "application/json", "Authorization": self._authorization}
        self._connection.request(method, route, body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _refusal(self, route: str, status: int, body: bytes) -> EngineError:
        return EngineError(f"engine {self.url} {route}: {status}: {_message(body)}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _message(body: bytes) -> str:
    """Returns the message of an error reply; if it has none, the start of its body.

    Both the embedded engine and SGLang send {"error": {"message"}} or {"message"}.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:500].decode(errors="replace")
    if isinstance(found, dict):
        error = found.get("error", found)
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        return str(error)
    return str(found)
