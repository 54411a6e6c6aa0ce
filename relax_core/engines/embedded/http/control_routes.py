"""Every route but /generate: pause, abort, weights, memory, and what the engine tells of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from relax_core.contracts.engine import WeightManifest
from relax_core.engines.embedded.http.asgi import HttpError
from relax_core.engines.embedded.http.control_bodies import (
    AbortBody,
    DiskBody,
    DistributedBody,
    EndBody,
    GroupBody,
    InitGroupBody,
    PauseBody,
    TensorBody,
    VersionBody,
    decode,
    folder_of,
    place_of,
    version_of,
)
from relax_core.engines.embedded.http.health_generate import HealthGenerate
from relax_core.engines.embedded.model.weight_updates import WeightUpdates
from relax_core.engines.embedded.scheduler.scheduler import Scheduler

Handler = Callable[[bytes], Awaitable[Any]]


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
            "/health_generate": HealthGenerate(scheduler),
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/v1/loads": self._loads,
        }

    async def _on_decode_thread(self, action: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._scheduler.post(action))

    # -- what changes something ---------------------------------------------------------------------------------------
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
        manifest = decode(body, WeightManifest)
        version_of(manifest.version)
        return await self._updates.from_shared_memory(manifest)

    async def _from_disk(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, DiskBody)
        version = version_of(asked.weight_version)
        assert version is not None
        return await self._updates.from_disk(folder_of(asked), version, asked.digest)

    async def _begin(self, body: bytes) -> dict[str, Any]:
        return await self._updates.begin()

    async def _from_tensor(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, TensorBody)
        return await self._updates.from_tensor(asked.serialized_named_tensors, version_of(asked.weight_version))

    async def _from_distributed(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, DistributedBody)
        return await self._updates.from_distributed(
            asked.group_name,
            names=asked.names,
            dtypes=asked.dtypes,
            shapes=asked.shapes,
            version=version_of(asked.weight_version),
            flattened=asked.load_format == "flattened_bucket",
        )

    async def _end(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, EndBody)
        return await self._updates.end(version_of(asked.weight_version), asked.digest)

    async def _rename(self, body: bytes) -> dict[str, Any]:
        version = version_of(decode(body, VersionBody).new_version)
        assert version is not None
        return await self._updates.rename(version)

    async def _init_group(self, body: bytes) -> dict[str, Any]:
        asked = decode(body, InitGroupBody)
        return await self._updates.join_group(place_of(asked), rank=asked.rank_offset)

    async def _destroy_group(self, body: bytes) -> dict[str, Any]:
        return await self._updates.leave_group(decode(body, GroupBody).group_name)

    # -- what tells ---------------------------------------------------------------------------------------------------
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
