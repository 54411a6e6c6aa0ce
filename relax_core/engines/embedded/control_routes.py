"""Every route but /generate: pause, abort, weights, memory, and what the engine tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec

from relax_core.contracts.engine import PauseMode, WeightManifest
from relax_core.engines.embedded.asgi import HttpError
from relax_core.engines.embedded.calls import Call, Progress, Prompt, waiting_prompts
from relax_core.engines.embedded.sampler import SamplingSettings
from relax_core.engines.embedded.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.weight_updates import WeightUpdates
from relax_core.weights.transports.base import WeightGroupPlace

HEALTH_GENERATE_S = 5.0  # how long /health_generate waits for its token
GROUP_TIMEOUT_S = 60.0  # how long a gloo group waits for its members and for a broadcast

Handler = Callable[[bytes], Awaitable[Any]]
S = TypeVar("S", bound=msgspec.Struct)


class AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: PauseMode = "abort"


class DiskBody(msgspec.Struct):
    model_path: str
    weight_version: str | int
    digest: str = ""


class TensorBody(msgspec.Struct):
    serialized_named_tensors: list[str]
    weight_version: str | int | None = None


class DistributedBody(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    weight_version: str | int | None = None
    load_format: Literal["flattened_bucket"] | None = None


class EndBody(msgspec.Struct):
    weight_version: str | int | None = None
    digest: str = ""


class GroupBody(msgspec.Struct):
    group_name: str


class InitGroupBody(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "gloo"
    timeout_s: float = GROUP_TIMEOUT_S


class VersionBody(msgspec.Struct):
    new_version: str | int


def _decode(body: bytes, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"body: {error}") from error


def _version(value: str | int | None) -> int | None:
    if value is None or (isinstance(value, int) and value >= 0):
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise HttpError(400, f"weight_version={value!r}: versions are integers from 0 on; send the train step's number")


class ControlRoutes:
    """``changing`` want the bearer token, ``telling`` do not; path → handler of the body."""

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
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/end_weight_update": self._end,
            "/update_weight_version": self._rename,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
        }
        self.telling: dict[str, Handler] = {
            "/ready": self._ready,
            "/health": self._ready,
            "/health_generate": self._health_generate,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
        }

    async def _on_decode_thread(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._scheduler.post(action))

    # -- what changes something ---------------------------------------------------------------------------------------
    async def _abort(self, body: bytes) -> dict[str, Any]:
        asked = _decode(body, AbortBody)
        if not asked.rid and not asked.abort_all:
            raise HttpError(400, "rid: missing; give the request's rid, or abort_all=true")
        count = await self._on_decode_thread(
            lambda: self._scheduler.abort(lambda sample: asked.abort_all or sample.prompt.rid == asked.rid)
        )
        return {"success": True, "aborted_samples": count}

    async def _pause(self, body: bytes) -> dict[str, Any]:
        mode = _decode(body, PauseBody).mode
        await self._on_decode_thread(lambda: self._scheduler.pause(mode))
        return {"success": True, "status": "ok", "mode": mode}

    async def _continue(self, body: bytes) -> dict[str, Any]:
        await self._on_decode_thread(self._scheduler.resume)
        return {"success": True, "status": "ok"}

    async def _flush_cache(self, body: bytes) -> dict[str, Any]:
        """There is no cache between requests: only tells, as SGLang, whether samples hold cache now."""
        load = await self._on_decode_thread(self._scheduler.load)
        if load.running:
            raise HttpError(400, f"/flush_cache: {load.running} samples hold cache; pause with retract or abort first")
        return {"success": True}

    async def _release(self, body: bytes) -> dict[str, Any]:
        await self._on_decode_thread(self._scheduler.release_memory)
        return {"success": True}

    async def _resume(self, body: bytes) -> dict[str, Any]:
        await self._on_decode_thread(self._scheduler.resume_memory)
        return {"success": True}

    # -- weights ----------------------------------------------------------------------------------------------------
    async def _from_shared_memory(self, body: bytes) -> dict[str, Any]:
        manifest = _decode(body, WeightManifest)
        _version(manifest.version)
        return await self._updates.from_shared_memory(manifest)

    async def _from_disk(self, body: bytes) -> dict[str, Any]:
        asked = _decode(body, DiskBody)
        version = _version(asked.weight_version)
        assert version is not None
        return await self._updates.from_disk(asked.model_path, version, asked.digest)

    async def _begin(self, body: bytes) -> dict[str, Any]:
        return await self._updates.begin()

    async def _from_tensor(self, body: bytes) -> dict[str, Any]:
        asked = _decode(body, TensorBody)
        return await self._updates.from_tensor(asked.serialized_named_tensors, _version(asked.weight_version))

    async def _from_distributed(self, body: bytes) -> dict[str, Any]:
        asked = _decode(body, DistributedBody)
        return await self._updates.from_distributed(
            asked.group_name,
            names=asked.names,
            dtypes=asked.dtypes,
            shapes=asked.shapes,
            version=_version(asked.weight_version),
            flattened=asked.load_format == "flattened_bucket",
        )

    async def _end(self, body: bytes) -> dict[str, Any]:
        asked = _decode(body, EndBody)
        return await self._updates.end(_version(asked.weight_version), asked.digest)

    async def _rename(self, body: bytes) -> dict[str, Any]:
        version = _version(_decode(body, VersionBody).new_version)
        assert version is not None
        return await self._updates.rename(version)

    async def _init_group(self, body: bytes) -> dict[str, Any]:
        asked = _decode(body, InitGroupBody)
        if asked.backend != "gloo":
            raise HttpError(400, f"backend={asked.backend}: the embedded engine is on the CPU; send gloo")
        place = WeightGroupPlace(
            name=asked.group_name,
            address=asked.master_address,
            port=asked.master_port,
            world_size=asked.world_size,
            backend=asked.backend,
            timeout_s=asked.timeout_s,
        )
        return await self._updates.join_group(place, rank=asked.rank_offset)

    async def _destroy_group(self, body: bytes) -> dict[str, Any]:
        return await self._updates.leave_group(_decode(body, GroupBody).group_name)

    # -- what tells ---------------------------------------------------------------------------------------------------
    async def _ready(self, body: bytes) -> dict[str, Any]:
        return {"status": "ok", "weight_version": str(self._scheduler.version)}

    async def _health_generate(self, body: bytes) -> dict[str, Any]:
        """Generates one token."""
        if self._scheduler.version == NOTHING_ATTESTED:
            raise HttpError(503, "/health_generate: no weights are in yet")
        done = asyncio.Event()
        failed: list[str] = []
        loop = asyncio.get_running_loop()

        def sink(news: list[Progress]) -> None:
            loop.call_soon_threadsafe(done.set)

        def fail(message: str) -> None:
            failed.append(message)
            loop.call_soon_threadsafe(done.set)

        call = Call(sink, fail)
        greedy = SamplingSettings(
            max_new_tokens=1, temperature=0.0, top_p=1.0, top_k=-1, stop_token_ids=(), banned_token_ids=()
        )
        self._scheduler.submit(waiting_prompts([Prompt(call, 0, "health", [0], greedy, 0, 0)], n=1))
        try:
            await asyncio.wait_for(done.wait(), HEALTH_GENERATE_S)
        except TimeoutError as error:
            self._scheduler.post(lambda: self._scheduler.abort(lambda sample: sample.prompt.call is call))
            raise HttpError(503, f"/health_generate: no token in {HEALTH_GENERATE_S} s; paused or full?") from error
        if failed:
            raise HttpError(503, f"/health_generate: {failed[0]}")
        return {"status": "ok"}

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
