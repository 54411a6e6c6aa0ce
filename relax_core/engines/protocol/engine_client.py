"""The HTTP client of an engine: calls SGLang's routes, and reads compact frames, SGLang's events, and scores."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from relax_core.contracts.engine import (
    KV_CACHE,
    WEIGHTS,
    EngineError,
    EngineUnreachable,
    Generated,
    MalformedReply,
    PauseMode,
    PromptRequest,
    SamplingParams,
    TensorSpec,
    WeightManifest,
)
from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.contracts.media import Media
from relax_core.engines.protocol.generate_messages import (
    EVENT_STREAM,
    INT32,
    MAX_LOGPROB,
    MSGPACK,
    Finished,
    FrameReader,
    Grown,
    Loads,
    ModelInfo,
    OnTokens,
    OtherPrompt,
    ResponseCheck,
    StreamEnd,
    StreamFailure,
    Updated,
    check_times,
    checked_prompt_tokens,
    decoded,
    generate_body,
    media_fields,
    printable_text,
    reply_object,
    version_number,
)
from relax_core.engines.protocol.server_proof import ProvenConnection
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION, EventReader, ReceivedTokens
from relax_core.weights.transports import WeightGroupAddress

if TYPE_CHECKING:
    import aiohttp


CONNECT_S = 5.0  # engines are on this host or nearby: a slower connection will not succeed
CONTROL_BYTES = 16 << 20  # maximum size of the reply to a control call
REFUSAL_BYTES = 64 << 10  # maximum bytes that are read from the body of an error reply
_encoder = msgspec.json.Encoder()


class EngineClient:
    """Calls one engine. For the embedded engine, the class is also the `WeightReceiver`.

    ``request_timeout_s`` is the maximum silence in `generate` and `score`, in seconds. ``control_timeout_s`` is the
    maximum duration of every other call. `generate` belongs to one event loop, all other calls to one thread at a time.
    On each connection, the server first proves that it knows ``token``. External servers (``attached``) do not support
    this proof, so no proof is requested. ``vocab_size``, if given, is the model's vocabulary size, and the token ids of
    responses are checked against it. ``group_ranks`` is the number of ranks with which the engine joins a group for
    broadcasts of weights. Calls raise EngineUnreachable if the process does not answer, its subclass MalformedReply if
    the answer violates the protocol, and EngineError with the engine's text if the engine refuses.
    """

    group_ranks = 1

    def __init__(
        self,
        url: str,
        token: str,
        *,
        request_timeout_s: float,
        control_timeout_s: float,
        attached: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.url = url
        self._proven_token = None if attached else token
        self._vocab_size = vocab_size
        self._authorization = f"Bearer {token}"
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._session_loop: asyncio.AbstractEventLoop | None = None
        address = urlsplit(url)
        self._connection = ProvenConnection(address.hostname or "", address.port, token=self._proven_token)
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

        A prompt gets the responses that its `PromptRequest.samples` selects; by default, ``params.n`` responses.
        ``on_end`` gets the times that the engine measured; only the embedded engine reports times. ``on_tokens`` gets
        the tokens of this call while they are sampled; the last tokens may be missing. If the caller stops the
        iteration early, the connection is closed, and the engine aborts the samples that still run.
        """
        check = ResponseCheck(prompts, params, vocab_size=self._vocab_size)
        told = {} if on_tokens is None else {"reports_tokens": True}
        body = generate_body(prompts, params, **told)
        async for generated in self._streamed(
            body,
            params,
            lambda response: self._responses(response, prompts, params, check, on_end, on_tokens),
            check,
        ):
            yield generated

    async def _streamed(
        self,
        body: dict[str, Any],
        params: SamplingParams,
        read: Callable[[aiohttp.ClientResponse], AsyncIterator[Generated]],
        check: ResponseCheck,
    ) -> AsyncIterator[Generated]:
        """Posts ``body`` to /generate. Checks and yields the responses that ``read`` finds in the reply."""
        import aiohttp

        posting = self._http_session().post(
            f"{self.url}/generate",
            data=_encoder.encode(body),
            headers={"Content-Type": "application/json", "Accept": f"{MSGPACK}, {EVENT_STREAM}"},
            allow_redirects=False,  # the token must not reach another address
        )
        try:
            async with asyncio.timeout(2 * self._request_timeout_s):  # sends the body, waits for the reply's head
                response = await posting
            async with response:
                if response.status != 200:
                    raise self._refusal("/generate", response.status, await self._beginning(response))
                async for generated in read(response):
                    with self._replying("/generate"):
                        check.finished(generated)
                    if (
                        params.return_routed_experts
                        and generated.response_experts is None
                        and generated.finish_reason != "abort"
                    ):
                        raise EngineError(
                            f"engine {self.url} /generate: the answer has no routed experts, but "
                            "algo.routing_replay=true needs them. SGLang returns them if it is started with "
                            "--enable-return-routed-experts."
                        )
                    if params.return_kept_tokens and generated.kept is None and generated.output_ids.size:
                        raise EngineError(
                            f"engine {self.url} /generate: the answer does not say which tokens top_p, top_k and min_p "
                            "kept, and the trainer needs them. Use rollout.top_p=1 rollout.top_k=-1 rollout.min_p=0, "
                            "or an engine that returns them."
                        )
                    yield generated
        except TimeoutError as error:
            raise EngineUnreachable(
                f"engine {self.url} /generate: silent for {self._request_timeout_s:.0f} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"engine {self.url} /generate: {error_text(error)}") from error
        if check.owed:
            found = check.expected - len(check.owed)
            raise EngineUnreachable(
                f"engine {self.url} /generate: closed the connection after {found} of {check.expected} responses"
            )

    @contextmanager
    def _replying(self, route: str) -> Iterator[None]:
        """Converts a ValueError from the check of a reply to MalformedReply with engine and route."""
        try:
            yield
        except OtherPrompt as error:
            raise EngineError(f"engine {self.url} {route}: {error}") from error
        except ValueError as error:
            message = printable_text(str(error))
            raise MalformedReply(f"engine {self.url} {route}: a reply that cannot be read: {message}") from error

    async def _beginning(self, response: aiohttp.ClientResponse) -> bytes:
        """Returns the first `REFUSAL_BYTES` bytes of a body."""
        data = bytearray()
        async with asyncio.timeout(self._control_timeout_s):
            async for part in response.content.iter_any():
                data += part
                if len(data) >= REFUSAL_BYTES:
                    break
        return bytes(data[:REFUSAL_BYTES])

    async def _parts(
        self, response: aiohttp.ClientResponse, reader: FrameReader | EventReader, check: ResponseCheck
    ) -> AsyncIterator[bytes]:
        """Yields the bytes of a stream for ``reader``.

        Raises EngineUnreachable if a frame or event is incomplete for ``request_timeout_s``, because a server may send
        single bytes forever.
        """
        progress, parts = time.monotonic(), 0
        async for data in response.content.iter_any():
            yield data
            now = time.monotonic()
            if reader.parts > parts or not reader.pending:
                with self._replying("/generate"):
                    check.news(reader.parts - parts)
                progress, parts = now, reader.parts
            elif now - progress > self._request_timeout_s:
                message = f"a part of its reply has not ended for {self._request_timeout_s:.0f} s"
                raise EngineUnreachable(f"engine {self.url} /generate: {message}")

    async def _responses(
        self,
        response: aiohttp.ClientResponse,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        check: ResponseCheck,
        on_end: Callable[[StreamEnd], None] | None,
        on_tokens: OnTokens | None = None,
    ) -> AsyncIterator[Generated]:
        """Reads a response stream: the embedded engine's frames, or server-sent events."""
        if response.content_type == MSGPACK:
            reader = FrameReader()
            prompt_experts: dict[int, np.ndarray] = {}
            async for data in self._parts(response, reader, check):
                with self._replying("/generate"):
                    frames = list(reader.feed(data))
                for frame in frames:
                    match frame:
                        case Finished():
                            with self._replying("/generate"):
                                check.place(frame.prompt, frame.sample)
                                generated = self._response(frame, prompts, prompt_experts)
                            yield generated
                        case StreamFailure(message):
                            raise EngineError(f"engine {self.url} /generate: {printable_text(message)}")
                        case StreamEnd() if on_end is not None:
                            with self._replying("/generate"):
                                check_times(frame.held_ms, frame.prefill_ms, frame.decode_ms)
                            on_end(frame)
                        case Grown() if on_tokens is not None:
                            with self._replying("/generate"):
                                ids = np.frombuffer(frame.output_ids, dtype=INT32).tolist()
                                check.check_new_tokens(frame.prompt, frame.sample, frame.start, ids)
                            on_tokens(frame.prompt, frame.sample, frame.start, ids)
            return
        if params.banned_token_ids:
            raise EngineError(f"engine {self.url} /generate: this engine does not support banned_token_ids")
        samples = [(index, sample) for index in range(len(prompts)) for sample in range(params.n)]
        events = EventReader(prompts, samples=samples, reports_tokens=on_tokens is not None)
        async for generated in self._events(response, events, check, on_tokens):
            yield generated

    async def _events(
        self,
        response: aiohttp.ClientResponse,
        reader: EventReader,
        check: ResponseCheck,
        on_tokens: OnTokens | None,
    ) -> AsyncIterator[Generated]:
        """Reads SGLang's server-sent events and yields finished responses."""
        if response.content_type != EVENT_STREAM:
            with self._replying("/generate"):
                raise ValueError(f"Content-Type {response.content_type}")
        async for data in self._parts(response, reader, check):
            with self._replying("/generate"):
                events = list(reader.feed(data))
            for event in events:
                match event:
                    case str():
                        raise EngineError(f"engine {self.url} /generate: {printable_text(event)}")
                    case ReceivedTokens():
                        with self._replying("/generate"):
                            check.check_new_tokens(*event)
                        if on_tokens is not None:
                            on_tokens(*event)
                    case _:
                        yield event

    def _response(self, frame: Finished, prompts: Sequence[PromptRequest], known: dict[int, np.ndarray]) -> Generated:
        """Returns the response of a frame, with the experts of its prompt.

        The engine sends the experts of a prompt with only one of the prompt's responses. ``known`` maps the index of a
        prompt to its experts. Raises ValueError if the parts of the frame are inconsistent, or if the number of prompt
        tokens differs from the sent number.
        """
        if frame.prompt_experts is not None:
            known[frame.prompt] = frame.prompt_experts.array()
        tokens = checked_prompt_tokens(frame.prompt_tokens, prompts[frame.prompt])
        experts = None if frame.response_experts is None else known.get(frame.prompt)
        return frame.response(prompt_tokens=tokens, prompt_experts=experts)

    async def answers(self, *, timeout_s: float) -> None:
        """Waits until the engine's process has answered, with any status.

        Raises EngineUnreachable without an answer within ``timeout_s`` seconds. Call it in the event loop of
        `generate`.
        """
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http_session().get(f"{self.url}/ready", timeout=timeout, allow_redirects=False):
                return
        except TimeoutError as error:
            raise EngineUnreachable(f"engine {self.url} /ready: no answer within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"engine {self.url} /ready: {error_text(error)}") from error

    def _http_session(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._session_loop is not loop:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._request_timeout_s)
            options: dict[str, Any] = {"limit": 0, "keepalive_timeout": 3600.0}
            if self._proven_token is None:
                connector = aiohttp.TCPConnector(**options)
            else:
                from relax_core.engines.protocol.proving_connector import ProvingConnector

                connector = ProvingConnector(self._proven_token, **options)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                headers={"Authorization": self._authorization},
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # engines do not compress; decompression could turn a few bytes into gigabytes
                read_bufsize=1 << 20,
            )
            self._session_loop = loop
        return self._session

    async def aclose(self) -> None:
        """Closes the connections of `generate`. Call it in the event loop of `generate`."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- control ----------------------------------------------------------------------------------------------------
    def ready(self) -> bool:
        """Returns True, because an embedded engine is ready when it answers. Raises EngineUnreachable."""
        self._call("GET", "/ready")
        return True

    def model_info(self) -> dict[str, Any]:
        """Returns ``weight_version``, the current version, and ``model_path``."""
        info = self._call("GET", "/model_info", needs=ModelInfo)
        return {**info, "weight_version": str(self._version_of(info["weight_version"]))}

    def _version_of(self, version: str | int) -> int:
        """Returns the number of a weight version; -1 means no version."""
        number = version_number(version)
        if number is None:
            with self._replying("/model_info"):
                raise ValueError("weight_version is not a number")
        assert number is not None
        return number

    def server_info(self) -> dict[str, Any]:
        """Returns the settings of the engine's start; for SGLang, also its ``version``."""
        return self._call("GET", "/server_info")

    def loads(self) -> dict[str, Any]:
        """Returns the engine's load: ``running``, ``queued`` and ``held`` samples, ``busy_s``, and further metrics."""
        load: dict[str, Any] = self._call("GET", "/v1/loads", needs=Loads)["loads"][0]
        return {"running": load["num_running_reqs"], "queued": load["num_waiting_reqs"], "held": 0} | load

    def score(
        self, items: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int] = ()
    ) -> list[TokenScores]:
        """Returns the log-probs of given tokens under the engine's weights, and the ``top_k`` tokens at each position.

        The log-probs come from logits / ``temperature``, over each token's kept set without the banned tokens. The
        embedded engine supports all these options. SGLang scores only at temperature 1 over the whole vocabulary.
        """
        body = self._score_body(items, top_k=top_k, temperature=temperature, banned_token_ids=banned_token_ids)
        status, data = self._answer(
            "POST", "/generate", body, timeout_s=self._request_timeout_s, max_bytes=max_bytes(items, top_k=top_k)
        )
        if status != 200:
            raise self._refusal("/generate", status, data)
        with self._replying("/generate"):
            return read_scores(
                data,
                items,
                top_k=top_k,
                vocab_size=self._vocab_size,
                fewer="kept_tokens" in body or "banned_token_ids" in body,
            )

    def _score_body(self, items: Sequence[TokensToScore], **options: Any) -> dict[str, Any]:
        return score_body(items, **options)

    def pause(self, mode: PauseMode) -> dict[str, Any]:
        """Stops decoding until `resume`. ``mode`` selects what happens to running samples."""
        return self._call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> dict[str, Any]:
        """Ends a pause."""
        return self._call("POST", "/continue_generation", {})

    def abort(self, rid: str | None = None) -> dict[str, Any]:
        """Ends the prompts with this rid, or all prompts. Returns their tokens so far with finish reason abort."""
        return self._call("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def flush_cache(self) -> None:
        """Drops the engine's cache of finished prompts. The engine refuses while samples run."""
        self._call("POST", "/flush_cache", {})

    def forget_weights(self) -> None:
        """Resets an engine that another run has used. The engine ends all samples, and needs weights to serve again."""
        self._call("POST", "/update_weight_version", {"new_version": str(UNKNOWN_VERSION)})

    def release_memory(self, *, weights: bool = False) -> dict[str, Any]:
        """Frees the KV cache and, with ``weights``, the memory of the weights (`EngineSpec.releases_weights`)."""
        return self._call("POST", "/release_memory_occupation", {"tags": [KV_CACHE, WEIGHTS]} if weights else {})

    def resume_weights(self) -> dict[str, Any]:
        """Allocates the memory of the weights again after `release_memory`; their values come with the next update."""
        return self._call("POST", "/resume_memory_occupation", {"tags": [WEIGHTS]})

    def resume_memory(self) -> dict[str, Any]:
        """Makes the engine decode again after `release_memory`."""
        return self._call("POST", "/resume_memory_occupation", {})

    # -- weights ----------------------------------------------------------------------------------------------------
    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Loads a published version from shared memory. Returns when the version is served.

        The reply has ``weight_version``, ``digest`` and ``stall_ms``.
        """
        return self._call("POST", "/update_weights_from_shared_memory", manifest, needs=Updated)

    def update_weights_from_disk(self, manifest: WeightManifest) -> dict[str, Any]:
        """Loads a published version from its folder, as a Hugging Face model.

        The reply has the fields of `update_weights`. The route of SGLang has a single digest for one file. A version
        with frozen tensors is therefore read by its manifest, from the same folder.
        """
        if manifest.frozen is not None:
            return self.update_weights(manifest)
        folder = str(Path(manifest.path).parent)
        body = {"model_path": folder, "weight_version": str(manifest.version), "digest": manifest.digest}
        return self._call("POST", "/update_weights_from_disk", body, needs=Updated)

    def join_weight_group(self, address: WeightGroupAddress) -> dict[str, Any]:
        """Joins the group as ranks 1 to ``group_ranks``. Returns when all ranks have joined."""
        body = group_body(address) | {"timeout_s": address.timeout_s}
        return self._call("POST", "/init_weights_update_group", body)

    def leave_weight_group(self, name: str) -> dict[str, Any]:
        """Leaves the group with this name."""
        return self._call("POST", "/destroy_weights_update_group", {"group_name": name})

    def begin_weight_update(self) -> dict[str, Any]:
        """Opens a session. If a session is already open, its tensors are discarded."""
        return self._call("POST", "/begin_weight_update", {})

    def receive_weights(self, tensors: Sequence[TensorSpec], *, group: str, version: int) -> dict[str, Any]:
        """Receives one broadcast from rank 0 of the group: the concatenated bytes of ``tensors``."""
        body = tensors_body(tensors, group=group) | {"weight_version": str(version)}
        return self._call("POST", "/update_weights_from_distributed", body)

    def abandon_weight_update(self) -> dict[str, Any]:
        """Ends a failed session.

        Sends nothing to the embedded engine: it serves its old weights until a session succeeds, and the next session
        discards the received tensors.
        """
        return {}

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Ends the session and serves its weights. Raises EngineError if their digest differs."""
        body = {"weight_version": str(version), "digest": digest}
        return self._call("POST", "/end_weight_update", body, needs=Updated)

    def close(self) -> None:
        """Closes the control connection."""
        with self._control:
            self._connection.close()

    def _call(
        self, method: str, route: str, payload: Any = None, *, needs: type[msgspec.Struct] | None = None
    ) -> dict[str, Any]:
        """Returns the JSON object of the reply. Raises an error if the object lacks fields of ``needs``."""
        status, data = self._answer(method, route, payload, timeout_s=self._control_timeout_s)
        if status != 200:
            raise self._refusal(route, status, data)
        with self._replying(route):
            return reply_object(data, needs)

    def _answer(
        self, method: str, route: str, payload: Any, *, timeout_s: float, max_bytes: int = CONTROL_BYTES
    ) -> tuple[int, bytes]:
        body = b"" if payload is None else _encoder.encode(payload)
        headers = {"Content-Type": "application/json", "Authorization": self._authorization}
        with self._control:
            try:
                return self._connection.call(method, route, body, headers, timeout_s=timeout_s, max_bytes=max_bytes)
            except TimeoutError as error:
                raise EngineUnreachable(f"engine {self.url} {route}: no answer within {timeout_s:.0f} s") from error
            except OSError as error:
                raise EngineUnreachable(f"engine {self.url} {route}: {error_text(error)}") from error
            except http.client.HTTPException as error:
                raise MalformedReply(f"engine {self.url} {route}: {error_text(error)}") from error

    def _refusal(self, route: str, status: int, body: bytes) -> EngineError:
        """Returns the error for a reply with this status. Only 4xx and 5xx are refusals of a request."""
        message = f"engine {self.url} {route}: {status}: {printable_text(_message(body))}"
        return EngineError(message) if 400 <= status <= 599 else MalformedReply(message)


def group_body(address: WeightGroupAddress) -> dict[str, Any]:
    """Returns SGLang's body of /init_weights_update_group."""
    return {
        "master_address": address.address,
        "master_port": address.port,
        "rank_offset": 1,
        "world_size": address.world_size,
        "group_name": address.name,
        "backend": address.backend,
    }


def tensors_body(tensors: Sequence[TensorSpec], *, group: str) -> dict[str, Any]:
    """Returns SGLang's body of /update_weights_from_distributed: one broadcast of all ``tensors``."""
    return {
        "names": [spec.name for spec in tensors],
        "dtypes": [spec.dtype for spec in tensors],
        "shapes": [spec.shape for spec in tensors],
        "group_name": group,
        "load_format": "flattened_bucket",
    }


def error_text(error: BaseException) -> str:
    """Returns the name and the text of an error. The text may come from a server."""
    return printable_text(f"{type(error).__name__}: {error}")


def _message(body: bytes) -> str:
    """Returns the message of an error reply, or the start of the body if there is no message.

    Both the embedded engine and SGLang send {"error": {"message"}} or {"message"}.
    """
    try:
        found = decoded(body, object)
    except ValueError:
        return body[:500].decode(errors="replace")
    if isinstance(found, dict):
        error = found.get("error", found)
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        return str(error)
    return str(found)


RETRY_S = 0.5


def wait_ready(client: EngineClient, *, timeout_s: float) -> None:
    """Waits until the server is ready.

    Raises EngineError if the server is not ready within ``timeout_s`` seconds, or refuses the token.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if client.ready():
                return
            message = f"engine {client.url} is not ready"
        except EngineUnreachable as error:
            message = str(error)
        if time.monotonic() > deadline:
            raise EngineError(f"engine.urls: no server for {timeout_s:g} s: {message}")
        time.sleep(RETRY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensToScore:
    """Describes a sequence with tokens to score from position ``first`` on.

    ``first`` is 1 or more, because the token at position 0 is not predicted. ``kept`` has the set that each scored
    token was sampled from; None means the whole vocabulary. ``media`` has the sequence's media items with their
    positions.
    """

    input_ids: list[int]
    first: int
    kept: KeptTokens | None = None
    media: Sequence[Media] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Holds the scores of one sequence.

    ``logprobs`` is float32 ``[tokens]``, one log-prob for each scored token. ``top_ids`` int32 and ``top_logprobs``
    float32, both ``[tokens, top_k]``, are the top-k tokens at each scored position, most likely first. If a kept set
    has fewer tokens, its ids are padded with -1 and its log-probs with `OUTSIDE`. ``version`` is the weight version in
    force, or -1 if the engine reports no number.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    version: int = -1


class _Entry(msgspec.Struct, array_like=True, gc=False):
    """Holds the log-prob of a given token; None for the first token. SGLang's token id and text are not read."""

    logprob: float | None


class _TopEntry(msgspec.Struct, array_like=True, gc=False):
    logprob: float
    token_id: Annotated[int, msgspec.Meta(ge=0, le=np.iinfo(np.int32).max)]


class _Meta(msgspec.Struct):
    input_token_logprobs: list[_Entry]
    prompt_tokens: int = 0
    weight_version: str = ""
    input_top_logprobs: list[list[_TopEntry] | None] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta


_ENTRY_BYTES = 512  # maximum for one scored or top-k token, including SGLang's text of the token
_OTHER_BYTES = 1 << 20  # maximum for the rest of a reply


def max_bytes(items: Sequence[TokensToScore], *, top_k: int) -> int:
    """Returns the maximum size in bytes of a reply with the scores of ``items``."""
    return _OTHER_BYTES + _ENTRY_BYTES * (top_k + 1) * sum(len(item.input_ids) + 16 for item in items)


def score_body(
    items: Sequence[TokensToScore], *, top_k: int, temperature: float, banned_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Returns the JSON body that requests the scores of ``items``.

    ``logprob_start_len`` is the position before the first scored token, because SGLang returns an empty entry there.
    Only the embedded engine accepts kept sets and banned tokens in such a request.
    """
    truncated: dict[str, Any] = {"banned_token_ids": list(banned_token_ids)} if banned_token_ids else {}
    if any(item.kept is not None for item in items):
        truncated["kept_tokens"] = [item.kept for item in items]
    return (
        truncated
        | media_fields([item.media for item in items])
        | {
            "input_ids": [item.input_ids for item in items],
            "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
            "return_logprob": True,
            "logprob_start_len": [item.first - 1 for item in items],
            "top_logprobs_num": [top_k for _ in items],
        }
    )


def read_scores(
    data: bytes,
    items: Sequence[TokensToScore],
    *,
    top_k: int,
    vocab_size: int | None = None,
    fewer: bool = False,
) -> list[TokenScores]:
    """Reads the scores of ``items`` from a reply. Raises ValueError if a score is missing or impossible.

    ``vocab_size`` is the model's vocabulary size, or None if it is unknown. With ``fewer``, a position may have fewer
    than ``top_k`` tokens, because banned tokens and tokens outside the kept set are excluded.
    """
    replies = decoded(data, list[_Reply])
    if len(replies) != len(items):
        raise ValueError(f"{len(replies)} replies to {len(items)} prompts")
    fewer = fewer and top_k > 0
    found = [
        _scores(reply.meta_info, item, top_k=top_k, fewer=fewer) for reply, item in zip(replies, items, strict=True)
    ]
    for scores in found:
        for values in (scores.logprobs, scores.top_logprobs):
            if values.size and not (np.isfinite(values).all() and float(values.max()) <= MAX_LOGPROB):
                raise ValueError("a log-prob is not finite, or is above 0")
        if vocab_size is not None and scores.top_ids.size and int(scores.top_ids.max()) >= vocab_size:
            raise ValueError(f"token id {int(scores.top_ids.max())}, outside the vocabulary")
    return found


def _scores(meta: _Meta, item: TokensToScore, *, top_k: int, fewer: bool) -> TokenScores:
    if meta.prompt_tokens not in (0, len(item.input_ids)):
        raise ValueError(f"the engine saw {meta.prompt_tokens} tokens and the request has {len(item.input_ids)}")
    expected = len(item.input_ids) - item.first
    logprobs = [entry.logprob for entry in meta.input_token_logprobs[1:] if entry.logprob is not None]
    tops = [top or [] for top in (meta.input_top_logprobs or [])[1:]] if top_k else [[]] * expected
    found = np.array([len(top) for top in tops], dtype=np.int64)
    fits = len(found) == expected and bool(((found >= min(1, top_k)) if fewer else (found == top_k)).all())
    if len(logprobs) != expected or not fits or (found > top_k).any():
        raise ValueError(f"{len(logprobs)} log-probs and {len(tops)} lists of top-k tokens for {expected} tokens")
    entries = list(chain.from_iterable(tops))
    present = np.arange(top_k) < found[:, None]
    ids = np.full((expected, top_k), -1, dtype=np.int32)
    values = np.full((expected, top_k), OUTSIDE, dtype=np.float32)
    with np.errstate(over="ignore"):  # infinities are refused in `read_scores`
        given = np.array(logprobs, dtype=np.float32)
        values[present] = [entry.logprob for entry in entries]
    ids[present] = [entry.token_id for entry in entries]
    version = version_number(meta.weight_version)
    return TokenScores(
        logprobs=given,
        top_ids=ids,
        top_logprobs=values,
        version=-1 if version is None else version,
    )
