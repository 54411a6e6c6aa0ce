"""Answers every route except /generate: pause, abort, weights, memory, and the engine's state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from relax_core.contracts.engine import WeightManifest
from relax_core.engines.embedded.http.control_bodies import (
    AbortBody,
    DiskBody,
    DistributedBody,
    EndBody,
    GroupBody,
    InitGroupBody,
    PauseBody,
    VersionBody,
    decode,
    folder_of,
    group_address,
    version_of,
)
from relax_core.engines.embedded.http.health_generate import HealthGenerate
from relax_core.engines.embedded.model.weight_updates import WeightUpdates
from relax_core.engines.embedded.scheduler.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.http_server.asgi import HttpError

Handler = Callable[[bytes], Awaitable[Any]]


class ControlRoutes:
    """Holds the handlers of the control routes: path → coroutine of the request's body.

    ``changing`` holds the routes that need the bearer token, ``reporting`` those that do not.
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
        """Drops kept prefixes, and what the tower gave for images and videos; no other cache outlives a request.

        It is refused, as in SGLang, while samples hold cache.
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
        if version == str(NOTHING_ATTESTED):  # as a text, as SGLang writes versions
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
