"""Loads new weights into the embedded engine from shared memory, a folder, or gloo broadcasts; never from a pickle.

Bytes are read and checked outside the decode thread, which stops only for the copy into the model. If the digest of a
version differs, the previous version stays active.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from relax_core.contracts.engine import WeightManifest
from relax_core.engines.asgi_server import HttpError, clipped
from relax_core.engines.embedded.fused_weights import FusedWeights
from relax_core.engines.embedded.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.weights.call_queues import CallQueues
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.transports import WeightGroupAddress
from relax_core.weights.version_file import DigestMismatch, cut_tensors, read_weights, tensors_digest
from relax_core.weights.weight_group import WeightGroup

MAX_GROUPS = 16
# A file may have an arbitrary header, and torch and safetensors then raise many kinds of errors.
UNREADABLE = (ValueError, TypeError, KeyError, RuntimeError, OSError, MemoryError, AssertionError, SafetensorError)

T = TypeVar("T")


class WeightUpdates:
    """Loads new weights and activates them, one update at a time.

    Each method implements one route. If a method raises HttpError 400 or 409, the current weights are unchanged.
    """

    def __init__(self, weights: FusedWeights, scheduler: Scheduler) -> None:
        self._weights = weights
        self._scheduler = scheduler
        self._lock = asyncio.Lock()
        self._session: dict[str, Tensor] | None = None  # tensors since /begin_weight_update, in order of arrival
        self._groups: dict[str, WeightGroup] = {}
        self._joining: set[str] = set()
        self._calls = CallQueues()  # one queue for each group
        self._digest = ""  # digest of the current weights; empty if the sender gave no digest
        self._frozen = ""  # `WeightManifest.kept_key` of the current frozen tensors; empty without frozen tensors
        self._frozen_names: frozenset[str] = frozenset()

    async def from_shared_memory(self, manifest: WeightManifest) -> dict[str, Any]:
        """Maps the published file, checks its digests, and serves the version.

        Also reads the frozen tensors, if they differ from the current frozen tensors.
        """
        async with self._lock:
            if self._is_in_force(manifest.version, manifest.digest):
                return _report(manifest.version, manifest.digest, stall_ms=0.0)
            held = manifest.frozen is not None and manifest.kept_key == self._frozen
            names = self._frozen_names if held else frozenset()
            checked = await self._checked(lambda: dict(read_weights(manifest, with_frozen=not held)), held=names)
            report = await self._apply(checked, manifest.version, manifest.digest, keep_frozen=held)
            if not held:
                self._frozen, self._frozen_names = manifest.kept_key, manifest.kept
            return report

    async def from_disk(self, model_path: str, version: int, digest: str) -> dict[str, Any]:
        """Reads a Hugging Face folder, checks its digest, if given, and serves the version."""
        async with self._lock:
            if self._is_in_force(version, digest):
                return _report(version, digest, stall_ms=0.0)
            checked = await self._checked(
                lambda: dict(read_safetensors(Path(model_path), wanted=lambda name: not self._weights.is_copied(name)))
            )
            await self._attest(checked, version, digest)
            return await self._apply(checked, version, digest)

    async def begin(self) -> dict[str, Any]:
        """Opens a session for broadcasts. If a session is already open, its tensors are discarded."""
        async with self._lock:
            replaced = self._session is not None
            self._session = {}
            return {"success": True, "message": "an open session was discarded" if replaced else ""}

    async def from_distributed(
        self, group_name: str, *, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> dict[str, Any]:
        """Receives one broadcast from rank 0 into the open session: the concatenated bytes of all named tensors.

        ``dtypes`` are torch's names of the dtypes. Raises HttpError 400 for tensors that the model does not have.
        """
        async with self._lock:
            session = self._open_session("/update_weights_from_distributed")
            if not len(names) == len(dtypes) == len(shapes):
                counts = f"{len(names)}, {len(dtypes)}, {len(shapes)}"
                raise HttpError(400, f"names, dtypes, shapes: {counts} entries; give one of each for a tensor")
            kinds = _dtypes(names, dtypes)
            for name, shape, kind in zip(names, shapes, kinds, strict=True):
                self._refuse_unknown(name, shape, kind)
            if len(set(names)) < len(names):
                raise HttpError(400, "names: a name occurs twice; send each tensor once")
            group = self._group(group_name)
            data = torch.empty(sum(map(_nbytes, kinds, shapes)), dtype=torch.uint8)
            await self._collective(group_name, lambda: group.receive([data]), "broadcast")
            session.update(cut_tensors(data, zip(names, kinds, shapes, strict=True)))
            return {"success": True, "message": f"{len(session)} tensors so far"}

    async def end(self, version: int, digest: str) -> dict[str, Any]:
        """Closes the session, checks that all weights arrived, and their digest, if given; then serves the version."""
        async with self._lock:
            session, self._session = self._open_session("/end_weight_update"), None
            if self._is_in_force(version, digest):
                return _report(version, digest, stall_ms=0.0)
            checked = await self._checked(lambda: session)
            await self._attest(session, version, digest)
            return await self._apply(checked, version, digest)

    async def rename(self, version: int) -> dict[str, Any]:
        """Changes the version number of the current weights."""
        async with self._lock:
            if self._scheduler.version == NOTHING_ATTESTED:
                raise HttpError(400, f"new_version={version}: no weights are loaded yet; send weights first")
            await asyncio.wrap_future(self._scheduler.post(lambda: self._scheduler.replace_weights(None, version)))
            return {"success": True, "new_version": str(version)}

    async def forget(self) -> dict[str, Any]:
        """Ends all samples, a pause and an open session. No request is served until other weights are loaded."""
        async with self._lock:
            self._session = None
            self._digest, self._frozen, self._frozen_names = "", "", frozenset()
            await asyncio.wrap_future(self._scheduler.post(self._scheduler.forget_weights))
            return {"success": True, "new_version": str(NOTHING_ATTESTED)}

    async def join_group(self, address: WeightGroupAddress, *, rank: int) -> dict[str, Any]:
        """Joins a group for broadcasts. Other updates may run while this waits for the group's other ranks."""
        if address.name in self._groups or address.name in self._joining:
            raise HttpError(400, f"group_name={address.name}: exists already; /destroy_weights_update_group first")
        if len(self._groups) + len(self._joining) >= MAX_GROUPS:
            raise HttpError(
                400, f"group_name={address.name}: {MAX_GROUPS} groups exist; /destroy_weights_update_group first"
            )
        self._joining.add(address.name)
        try:
            self._groups[address.name] = await self._collective(
                address.name,
                lambda: WeightGroup.join(address, rank=rank),
                f"rank {rank} of {address.world_size} joining at {address.address}:{address.port}",
            )
        finally:
            self._joining.remove(address.name)
        return {"success": True, "message": ""}

    async def leave_group(self, name: str) -> dict[str, Any]:
        """Removes a group. Raises HttpError 400 for an unknown name."""
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

    async def _collective(self, name: str, action: Callable[[], T], action_name: str) -> T:
        """Runs a call of a group in the group's thread, because the call may wait until the group's deadline.

        Raises HttpError 400 if the call fails.
        """
        try:
            return await asyncio.wrap_future(self._calls.put(name, action))
        except (RuntimeError, OSError) as error:
            raise HttpError(400, f"group {name}: {action_name} failed: {clipped(str(error))}") from error

    def _open_session(self, route: str) -> dict[str, Tensor]:
        if self._session is None:
            raise HttpError(400, f"{route}: no session is open; POST /begin_weight_update first")
        return self._session

    def _refuse_unknown(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raises HttpError 400 for a tensor that the model does not have. This limits the memory of a session."""
        if (fault := self._weights.fault(name, shape, dtype)) is not None:
            raise HttpError(400, f"{fault}; send the model's own tensors")

    def _is_in_force(self, version: int, digest: str) -> bool:
        """Returns whether these weights are already active: trainer and engine owner may push the same version.

        Raises HttpError 409 for a published version that is older than the current version.
        """
        if digest and version < self._scheduler.version:
            raise HttpError(409, f"weights version {version} is older; {self._kept()}")
        return bool(digest) and (version, digest) == (self._scheduler.version, self._digest)

    def _kept(self) -> str:
        return f"weights version {self._scheduler.version} stays in force"

    async def _checked(self, read: Callable[[], dict[str, Tensor]], *, held: Collection[str] = ()) -> dict[str, Tensor]:
        """Reads and checks weights in a thread other than the event loop's and the decode thread."""
        try:
            return await asyncio.to_thread(lambda: self._weights.checked(read().items(), held=held))
        except (DigestMismatch, FileNotFoundError) as error:
            raise HttpError(409, f"{error}; {self._kept()}") from error
        except UNREADABLE as error:
            raise HttpError(400, f"{clipped(str(error), length=4000)}; {self._kept()}") from error

    async def _attest(self, tensors: dict[str, Tensor], version: int, digest: str) -> None:
        """Raises HttpError 409 if ``digest`` is given and differs from the tensors' digest."""
        if digest:
            found = await asyncio.to_thread(tensors_digest, tensors.items())
            if found != digest:
                raise HttpError(409, f"weights version {version}: digest {found}, sent as {digest}; {self._kept()}")

    async def _apply(
        self, tensors: dict[str, Tensor], version: int, digest: str, *, keep_frozen: bool = False
    ) -> dict[str, Any]:
        def copy() -> None:
            self._weights.apply(tensors)

        if not keep_frozen:
            self._frozen, self._frozen_names = "", frozenset()
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
            message = f"{clipped(repr(dtype))} of {clipped(name)}"
            raise HttpError(400, f"dtypes: {message} is not a torch dtype; send float32 or bfloat16")
        kinds.append(kind)
    return kinds


def _nbytes(dtype: torch.dtype, shape: list[int]) -> int:
    return math.prod(shape) * dtype.itemsize
