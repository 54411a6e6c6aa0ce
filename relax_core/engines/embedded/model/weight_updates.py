"""How new weights come in: from shared memory, a folder, a request's body, or a gloo group; never as a pickle.

Whatever the way, bytes are read and checked beside the decode thread; it stops only for the copy. A version that fails
its digest is not served, and the one before stays in force.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from relax_core.contracts.engine import WeightManifest
from relax_core.engines.embedded.http.asgi import HttpError, clipped
from relax_core.engines.embedded.model.fused_weights import FusedWeights
from relax_core.engines.embedded.scheduler.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.weights.call_queues import CallQueues
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.group import WeightGroup
from relax_core.weights.transports.base import WeightGroupAddress
from relax_core.weights.version_file import DigestMismatch, cut_tensors, read_weights, tensors_digest

MAX_GROUPS = 16
# A file's or a body's header may say anything: what torch and safetensors raise then is of many kinds.
UNREADABLE = (ValueError, TypeError, KeyError, RuntimeError, OSError, MemoryError, AssertionError, SafetensorError)

T = TypeVar("T")


@dataclass
class Session:
    """What came in between /begin_weight_update and /end_weight_update, in order of arrival."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    version: int | None = None


class WeightUpdates:
    """One update at a time; the methods are the routes' bodies. Raises HttpError 400 and 409, with nothing changed."""

    def __init__(self, weights: FusedWeights, scheduler: Scheduler) -> None:
        self._weights = weights
        self._scheduler = scheduler
        self._lock = asyncio.Lock()
        self._session: Session | None = None
        self._groups: dict[str, WeightGroup] = {}
        self._joining: set[str] = set()
        self._calls = CallQueues()  # by group
        self._digest = ""  # of the weights in force, where their sender gave one

    async def from_shared_memory(self, manifest: WeightManifest) -> dict[str, Any]:
        async with self._lock:
            if self._is_in_force(manifest.version, manifest.digest):
                return _report(manifest.version, manifest.digest, stall_ms=0.0)
            checked = await self._checked(lambda: dict(read_weights(manifest)))
            return await self._apply(checked, manifest.version, manifest.digest)

    async def from_disk(self, model_path: str, version: int, digest: str) -> dict[str, Any]:
        async with self._lock:
            if self._is_in_force(version, digest):
                return _report(version, digest, stall_ms=0.0)
            checked = await self._checked(lambda: dict(read_safetensors(Path(model_path))))
            await self._attest(checked, version, digest)
            return await self._apply(checked, version, digest)

    async def begin(self) -> dict[str, Any]:
        async with self._lock:
            replaced = self._session is not None
            self._session = Session()
            return {"success": True, "message": "an open session was thrown away" if replaced else ""}

    async def from_tensor(self, payloads: list[str], version: int | None) -> dict[str, Any]:
        """``payloads``: base64 of safetensors bytes."""
        async with self._lock:
            session = self._open_session("/update_weights_from_tensor")
            for payload in payloads:
                session.tensors.update(await asyncio.to_thread(self._safetensors, payload))
            session.version = session.version if version is None else version
            return {"success": True, "message": f"{len(session.tensors)} tensors so far"}

    async def from_distributed(
        self,
        group_name: str,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        version: int | None,
        flattened: bool,
    ) -> dict[str, Any]:
        """Takes one broadcast from rank 0 for each name; ``flattened``: one of all their bytes in a row."""
        async with self._lock:
            session = self._open_session("/update_weights_from_distributed")
            if not len(names) == len(dtypes) == len(shapes):
                counts = f"{len(names)}, {len(dtypes)}, {len(shapes)}"
                raise HttpError(400, f"names, dtypes, shapes: {counts} entries; give one of each for a tensor")
            kinds = _dtypes(names, dtypes)
            for name, shape, kind in zip(names, shapes, kinds, strict=True):
                self._refuse_strangers(name, shape, kind)
            if len(set(names)) < len(names):
                raise HttpError(400, "names: a tensor comes twice; send each once")
            group = self._group(group_name)
            if flattened:
                data = torch.empty(sum(map(_nbytes, kinds, shapes)), dtype=torch.uint8)
                await self._collective(group_name, lambda: group.receive([data]), "broadcast")
                session.tensors.update(cut_tensors(data, zip(names, kinds, shapes, strict=True)))
            else:
                buffers = [torch.empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
                await self._collective(group_name, lambda: group.receive(buffers), "broadcast")
                session.tensors.update(zip(names, buffers, strict=True))
            session.version = session.version if version is None else version
            return {"success": True, "message": f"{len(session.tensors)} tensors so far"}

    async def end(self, version: int | None, digest: str) -> dict[str, Any]:
        """Checks that all weights came, and their digest where one is given; then serves them."""
        async with self._lock:
            session, self._session = self._open_session("/end_weight_update"), None
            version = session.version if version is None else version
            if version is None:
                raise HttpError(400, "weight_version: missing in the whole session; send the integer version")
            if self._is_in_force(version, digest):
                return _report(version, digest, stall_ms=0.0)
            checked = await self._checked(lambda: session.tensors)
            await self._attest(session.tensors, version, digest)
            return await self._apply(checked, version, digest)

    async def rename(self, version: int) -> dict[str, Any]:
        """Gives the weights in force another version."""
        async with self._lock:
            if self._scheduler.version == NOTHING_ATTESTED:
                raise HttpError(400, f"new_version={version}: no weights are in yet; send weights first")
            await asyncio.wrap_future(self._scheduler.post(lambda: self._scheduler.replace_weights(None, version)))
            return {"success": True, "new_version": str(version)}

    async def join_group(self, place: WeightGroupAddress, *, rank: int) -> dict[str, Any]:
        """Waits for the group's other members, and meanwhile holds up no update."""
        if place.name in self._groups or place.name in self._joining:
            raise HttpError(400, f"group_name={place.name}: exists already; /destroy_weights_update_group first")
        if len(self._groups) + len(self._joining) >= MAX_GROUPS:
            raise HttpError(
                400, f"group_name={place.name}: {MAX_GROUPS} groups exist; /destroy_weights_update_group first"
            )
        self._joining.add(place.name)
        try:
            self._groups[place.name] = await self._collective(
                place.name,
                lambda: WeightGroup.join(place, rank=rank),
                f"rank {rank} of {place.world_size} joining at {place.address}:{place.port}",
            )
        finally:
            self._joining.remove(place.name)
        return {"success": True, "message": ""}

    async def leave_group(self, name: str) -> dict[str, Any]:
        async with self._lock:
            self._group(name)
            del self._groups[name]
            return {"success": True, "message": ""}

    def _group(self, name: str) -> WeightGroup:
        if name not in self._groups:
            raise HttpError(
                400,
                f"group_name={clipped(name)}: unknown, known: {sorted(self._groups)}; /init_weights_update_group first",
            )
        return self._groups[name]

    async def _collective(self, name: str, action: Callable[[], T], what: str) -> T:
        """Runs a call of a group in the group's own thread, for it may wait as long as the group's deadline is away.
        Raises HttpError 400 in words where it fails."""
        try:
            return await asyncio.wrap_future(self._calls.put(name, action))
        except (RuntimeError, OSError) as error:
            raise HttpError(400, f"group {name}: {what} failed: {clipped(str(error))}") from error

    def _open_session(self, route: str) -> Session:
        if self._session is None:
            raise HttpError(400, f"{route}: no session is open; POST /begin_weight_update first")
        return self._session

    def _safetensors(self, payload: str) -> dict[str, Tensor]:
        """``payload``: base64 of safetensors bytes. Raises HttpError 400 for what is not that, or not of the model."""
        try:
            found: dict[str, Tensor] = safetensors.torch.load(base64.b64decode(payload, validate=True))
        except UNREADABLE as error:
            words = f"{type(error).__name__}: {clipped(str(error))}"
            raise HttpError(
                400, f"serialized_named_tensors: {words}; send base64 of safetensors bytes (a pickle is never taken)"
            ) from error
        for name, tensor in found.items():
            self._refuse_strangers(name, tensor.shape, tensor.dtype)
        return found

    def _refuse_strangers(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """So a session never holds more than the model does."""
        if (fault := self._weights.fault(name, shape, dtype)) is not None:
            raise HttpError(400, f"{fault}; send the model's own tensors")

    def _is_in_force(self, version: int, digest: str) -> bool:
        """Two may push: the trainer, and the engine's owner. HttpError 409 for a published version that is older."""
        if digest and version < self._scheduler.version:
            raise HttpError(409, f"weights version {version} is older; {self._kept()}")
        return bool(digest) and (version, digest) == (self._scheduler.version, self._digest)

    def _kept(self) -> str:
        return f"weights version {self._scheduler.version} stays in force"

    async def _checked(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Reads and checks beside the event loop and the decode thread."""
        try:
            return await asyncio.to_thread(lambda: self._weights.checked(read().items()))
        except (DigestMismatch, FileNotFoundError) as error:
            raise HttpError(409, f"{error}; {self._kept()}") from error
        except UNREADABLE as error:
            raise HttpError(400, f"{clipped(str(error), length=4000)}; {self._kept()}") from error

    async def _attest(self, tensors: dict[str, Tensor], version: int, digest: str) -> None:
        """Refuses what is not what its sender published, where it gave a digest."""
        if digest:
            found = await asyncio.to_thread(tensors_digest, tensors.items())
            if found != digest:
                raise HttpError(409, f"weights version {version}: digest {found}, sent as {digest}; {self._kept()}")

    async def _apply(self, tensors: dict[str, Tensor], version: int, digest: str) -> dict[str, Any]:
        def copy() -> None:
            self._weights.apply(tensors)

        stall_ms = await asyncio.wrap_future(
            self._scheduler.post(lambda: self._scheduler.replace_weights(copy, version))
        )
        self._digest = digest
        return _report(version, digest, stall_ms=stall_ms)


def _report(version: int, digest: str, *, stall_ms: float) -> dict[str, Any]:
    return {"success": True, "message": "", "weight_version": version, "digest": digest, "stall_ms": stall_ms}


def _dtypes(names: list[str], dtypes: list[str]) -> list[torch.dtype]:
    kinds = []
    for name, dtype in zip(names, dtypes, strict=True):
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            words = f"{clipped(repr(dtype))} of {clipped(name)}"
            raise HttpError(400, f"dtypes: {words} is no torch dtype; send float32 or bfloat16")
        kinds.append(kind)
    return kinds


def _nbytes(dtype: torch.dtype, shape: list[int]) -> int:
    return math.prod(shape) * dtype.itemsize
