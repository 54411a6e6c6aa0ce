"""The ASGI application: routes requests to handlers, and implements every route except /generate."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec

from relax_core.contracts.engine import PauseMode, WeightManifest
from relax_core.engines import asgi_server as asgi
from relax_core.engines.asgi_server import ClientDisconnected, HttpError, Receive, Scope, Send, clipped
from relax_core.engines.embedded.decoder import ScoreItem
from relax_core.engines.embedded.generate_route import GenerateRoute
from relax_core.engines.embedded.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.token_sampler import NonFiniteLogits
from relax_core.engines.embedded.weight_updates import WeightUpdates
from relax_core.weights.transports import WeightGroupAddress

GROUP_TIMEOUT_S = 60.0  # maximum wait of a gloo group for its ranks, and for a broadcast
MAX_GROUP_TIMEOUT_S = 3600.0
MAX_NAME = 256  # characters
MAX_PATH = 4096  # characters, as in Linux
MAX_VERSION = (1 << 63) - 1
HOST = re.compile(r"[0-9A-Za-z._:%-]{1,253}")

S = TypeVar("S", bound=msgspec.Struct)


class AbortBody(msgspec.Struct):
    """Holds the body of /abort_request: the ``rid`` of one prompt, or ``abort_all``."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    """Holds the body of /pause_generation."""

    mode: PauseMode = "abort"


class DiskBody(msgspec.Struct):
    """Holds the body of /update_weights_from_disk; an empty ``digest`` is not compared."""

    model_path: str
    weight_version: str | int
    digest: str = ""


class DistributedBody(msgspec.Struct):
    """Holds the body of /update_weights_from_distributed: one broadcast of the bytes of all named tensors."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: Literal["flattened_bucket"]


class EndBody(msgspec.Struct):
    """Holds the body of /end_weight_update; an empty ``digest`` is not compared."""

    weight_version: str | int
    digest: str = ""


class GroupBody(msgspec.Struct):
    """Holds the body of /destroy_weights_update_group."""

    group_name: str


class InitGroupBody(msgspec.Struct):
    """Holds the body of /init_weights_update_group; ``rank_offset`` is the engine's rank in the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "gloo"
    timeout_s: float = GROUP_TIMEOUT_S


class VersionBody(msgspec.Struct):
    """Holds the body of /update_weight_version."""

    new_version: str | int


def decode(body: bytes, kind: type[S]) -> S:
    """Decodes a JSON body as ``kind``; an empty body means {}. Raises HttpError 400 if the body does not fit."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"body: {error}") from error
    except RecursionError as error:
        raise HttpError(400, "body: nested too deep; send flat values") from error


def version_of(value: str | int) -> int:
    """Returns the weight version as an integer. Raises HttpError 400 for negative numbers and other text."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
        value = int(value)
    if isinstance(value, int) and 0 <= value <= MAX_VERSION:
        return value
    raise HttpError(
        400, f"weight_version={clipped(repr(value))}: versions are integers from 0 on; send the train step's number"
    )


def folder_of(body: DiskBody) -> str:
    """Returns the path of the model's folder. Raises HttpError 400 if the value is not a valid path."""
    path = body.model_path
    if not path or len(path) > MAX_PATH or "\0" in path:
        raise HttpError(400, f"model_path={clipped(repr(path))}: not a path; give the path of a Hugging Face folder")
    return path


def group_address(body: InitGroupBody) -> WeightGroupAddress:
    """Returns the address of the group. Raises HttpError 400 for an invalid value."""
    checks = {
        "backend": (body.backend, body.backend == "gloo", "gloo, because the embedded engine runs on the CPU"),
        "group_name": (body.group_name, 0 < len(body.group_name) <= MAX_NAME, f"1 to {MAX_NAME} characters"),
        "master_address": (body.master_address, HOST.fullmatch(body.master_address), "a host's name or address"),
        "master_port": (body.master_port, 0 < body.master_port < 1 << 16, "1 to 65535"),
        "world_size": (body.world_size, 1 < body.world_size < 1 << 16, "2 or more: rank 0, which sends, and engines"),
        "rank_offset": (body.rank_offset, 0 < body.rank_offset < body.world_size, "1 or more, below world_size"),
        "timeout_s": (
            body.timeout_s, 0.0 < body.timeout_s <= MAX_GROUP_TIMEOUT_S, f"above 0, at most {MAX_GROUP_TIMEOUT_S:g}"
        ),
    }  # fmt: skip
    for key, (value, fits, words) in checks.items():
        if not fits:
            raise HttpError(400, f"{key}={clipped(repr(value))}: give {words}")
    return WeightGroupAddress(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        world_size=body.world_size,
        backend=body.backend,
        timeout_s=body.timeout_s,
    )


DEADLINE_S = 20.0  # the deadline of SGLang's own probe
REUSE_S = 1.0  # seconds for which further probes get the same result


class HealthGenerate:
    """Answers health probes with a forward pass of two tokens. At most one pass per second runs, and probes share it.

    The route requires no bearer token. The pass runs in the decode thread between two steps, without a slot and without
    other samples in its batch. It therefore does not change the tokens of requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._check: asyncio.Task[str | None] | None = None
        self._ended = 0.0

    async def __call__(self, body: bytes) -> dict[str, Any]:
        """Raises HttpError 503 with the reason if the engine cannot generate tokens."""
        if self._check is None or (self._check.done() and time.monotonic() - self._ended > REUSE_S):
            self._check = asyncio.create_task(self._checked())
        problem = await asyncio.shield(self._check)
        if problem is not None:
            raise HttpError(503, f"/health_generate: {problem}")
        return {"status": "ok"}

    async def _checked(self) -> str | None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._problem()
        except TimeoutError:
            return f"the decode thread has not answered within {DEADLINE_S:g} s"
        finally:
            self._ended = time.monotonic()

    async def _problem(self) -> str | None:
        scheduler = self._scheduler
        if scheduler.version == NOTHING_ATTESTED:
            return "no weights are loaded yet"
        if scheduler.is_stopped:
            return "the engine is paused, or its memory is released"
        try:
            await asyncio.wrap_future(scheduler.score([ScoreItem(token_ids=[0, 0], start=0, top_k=0, temperature=1.0)]))
        except NonFiniteLogits as error:
            return f"weight version {scheduler.version}: {error}"
        return None


Handler = Callable[[bytes], Awaitable[Any]]


class ControlRoutes:
    """Implements the handlers of the control routes: path → coroutine function of the request's body.

    ``changing`` has the routes that require the bearer token. ``reporting`` has the routes that do not.
    """

    def __init__(self, scheduler: Scheduler, updates: WeightUpdates, info: dict[str, Any]) -> None:
        self._scheduler = scheduler
        self._updates = updates
        self._info = info
        self.changing: dict[str, Handler] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush_cache,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/update_weights_from_shared_memory": self._from_shared_memory,
            "/update_weights_from_disk": self._from_disk,
            "/begin_weight_update": self._begin,
            "/update_weights_from_distributed": self._from_distributed,
            "/end_weight_update": self._end,
            "/update_weight_version": self._rename,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
        }
        self.reporting: dict[str, Handler] = {
            "/ready": self._ready,
            "/health": self._ready,
            "/health_generate": HealthGenerate(scheduler),
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
        }

    async def _on_decode_thread(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._scheduler.post(action))

    # -- routes that change something ---------------------------------------------------------------------------------
    async def _abort(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, AbortBody)
        if not asked.rid and not asked.abort_all:
            raise HttpError(400, "rid: missing; give the request's rid, or abort_all=true")
        count = await self._on_decode_thread(
            lambda: self._scheduler.abort(lambda sample: asked.abort_all or sample.prompt.rid == asked.rid)
        )
        return {"success": True, "aborted_samples": count}

    async def _pause(self, body: bytes) -> dict[str, Any]:
        mode = decode(body, PauseBody).mode
        await self._on_decode_thread(lambda: self._scheduler.pause(mode))
        return {"success": True, "status": "ok", "mode": mode}

    async def _continue(self, body: bytes) -> dict[str, Any]:
        await self._on_decode_thread(self._scheduler.resume)
        return {"success": True, "status": "ok"}

    async def _flush_cache(self, body: bytes) -> dict[str, Any]:
        """Drops kept prefixes and the features of media items. These are the only caches that outlive a request.

        As in SGLang, the call is refused while samples use the KV cache.
        """
        load = await self._on_decode_thread(self._scheduler.load)
        if load.running:
            raise HttpError(400, f"/flush_cache: {load.running} samples hold cache; pause with retract or abort first")
        await self._on_decode_thread(self._scheduler.forget)
        return {"success": True}

    async def _release(self, body: bytes) -> dict[str, Any]:
        await self._on_decode_thread(self._scheduler.release_memory)
        return {"success": True}

    async def _resume(self, body: bytes) -> dict[str, Any]:
        await self._on_decode_thread(self._scheduler.resume_memory)
        return {"success": True}

    # -- weights ----------------------------------------------------------------------------------------------------
    async def _from_shared_memory(self, body: bytes) -> dict[str, Any]:
        manifest = decode(body, WeightManifest)
        version_of(manifest.version)
        return await self._updates.from_shared_memory(manifest)

    async def _from_disk(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, DiskBody)
        version = version_of(asked.weight_version)
        return await self._updates.from_disk(folder_of(asked), version, asked.digest)

    async def _begin(self, body: bytes) -> dict[str, Any]:
        return await self._updates.begin()

    async def _from_distributed(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, DistributedBody)
        return await self._updates.from_distributed(
            asked.group_name, names=asked.names, dtypes=asked.dtypes, shapes=asked.shapes
        )

    async def _end(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, EndBody)
        return await self._updates.end(version_of(asked.weight_version), asked.digest)

    async def _rename(self, body: bytes) -> dict[str, Any]:
        version = decode(body, VersionBody).new_version
        if version == str(NOTHING_ATTESTED):  # as text, like SGLang's versions
            return await self._updates.forget()
        return await self._updates.rename(version_of(version))

    async def _init_group(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, InitGroupBody)
        return await self._updates.join_group(group_address(asked), rank=asked.rank_offset)

    async def _destroy_group(self, body: bytes) -> dict[str, Any]:
        return await self._updates.leave_group(decode(body, GroupBody).group_name)

    # -- routes that report -------------------------------------------------------------------------------------------
    async def _ready(self, body: bytes) -> dict[str, Any]:
        return {"status": "ok", "weight_version": str(self._scheduler.version)}

    async def _model_info(self, body: bytes) -> dict[str, Any]:
        return {
            "model_path": self._info["model_path"],
            "is_generation": True,
            "weight_version": str(self._scheduler.version),
        }

    async def _server_info(self, body: bytes) -> dict[str, Any]:
        return {**self._info, "weight_version": str(self._scheduler.version)}

    async def _loads(self, body: bytes) -> dict[str, Any]:
        load = await self._on_decode_thread(self._scheduler.load)
        return {
            "loads": [
                {
                    "dp_rank": 0,
                    "num_running_reqs": load.running,
                    "num_waiting_reqs": load.queued + load.held,
                    **{name: getattr(load, name) for name in load.__dataclass_fields__},
                }
            ]
        }


CONTROL_BODY_BYTES = 16 << 20


class EngineApp:
    """Implements the ASGI application of one engine: /generate and all control routes."""

    def __init__(self, generate: GenerateRoute, control: ControlRoutes, *, token: str) -> None:
        self._generate = generate
        self._control = control
        self._authorization = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        assert scope["type"] == "http"
        try:
            await self._route(scope, receive, send)
        except HttpError as error:
            await asgi.answer(send, asgi.error_payload(error.status, str(error)), status=error.status)
        except ClientDisconnected:
            pass

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in self._control.reporting and method == "GET":
            if self._has_token(scope):
                scope["connection"].showed_token()  # new connections cannot replace this connection before the response
            await asgi.answer(send, await self._control.reporting[path](b""))
        elif path == "/generate" and method == "POST":
            self._authorize(scope)
            await self._generate(scope, receive, send)
        elif path in self._control.changing and (method == "POST" or (path, method) == ("/flush_cache", "GET")):
            self._authorize(scope)
            body = await asgi.read_body(scope, receive, limit=CONTROL_BODY_BYTES)
            await asgi.answer(send, await self._control.changing[path](body))
        else:
            known = sorted({"/generate", *self._control.reporting, *self._control.changing})
            asked = asgi.clipped(f"{method} {path}")
            raise HttpError(404, f"{asked}: no such route; known: {', '.join(known)}")

    def _has_token(self, scope: Scope) -> bool:
        return hmac.compare_digest(asgi.headers(scope).get(b"authorization", b""), self._authorization)

    def _authorize(self, scope: Scope) -> None:
        if not self._has_token(scope):
            raise HttpError(401, f"{scope['path']}: wants the run's bearer token in the Authorization header")
        if not scope["connection"].showed_token():
            raise HttpError(503, f"{scope['path']}: too many requests are in progress; retry when some have ended")
