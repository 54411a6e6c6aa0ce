"""Sends weights to an SGLang server through SGLang's routes. Relax's loader inside the server compares digests."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from relax_core.contracts.engine import EngineError, EngineUnreachable, PauseMode, TensorSpec, WeightManifest
from relax_core.contracts.private_folder import file_locked
from relax_core.engines.protocol.engine_client import EngineClient, group_body, tensors_body
from relax_core.engines.protocol.generate_messages import ModelInfo
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION, sglang_version
from relax_core.engines.sglang.weight_orders import (
    Attest,
    Confirm,
    LoadFile,
    Order,
    Outcome,
    Watch,
    not_written,
    order_payload,
)
from relax_core.weights.transports import WeightGroupAddress


class SenderLock:
    """Implements a file lock for all senders of weights to the server at ``url``, on any host.

    The lock file is in the folder of the versions. SGLang has no such lock: a sender could resume the server during
    another sender's update, which would then wait for all running samples. The kernel releases the lock when the
    process of its holder ends. Because a holder may be suspended, a sender waits at most ``timeout_s`` seconds.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._held = ExitStack()

    def take(self, folder: Path) -> None:
        """Acquires the lock in the folder of the versions. First releases a lock that this sender still has.

        Raises EngineUnreachable if another sender keeps the lock, and EngineError if the file cannot be created or
        locked.
        """
        self.give_back()
        path = folder / f"sending-{quote(self._url, safe='')}"
        try:
            self._held.enter_context(file_locked(path, deadline_s=self._timeout_s, makes="a weight update"))
        except TimeoutError:
            raise EngineUnreachable(
                f"engine {self._url}: another sender has been sending weights for {self._timeout_s:.0f} s"
            ) from None
        except OSError as error:  # the disk is full, the run's folder was removed, or its file system has no flock
            raise EngineError(f"engine {self._url}: weights cannot be sent: {error}") from error

    def give_back(self) -> None:
        """Releases the lock. Does nothing if this sender does not have the lock."""
        self._held.close()


LOADER = "relax_core.engines.sglang.weight_loader.follow"
ALREADY_OPEN = "already open"  # a part of SGLang's error text
_outcomes = msgspec.json.Decoder(Outcome)


class _RankChecksums(msgspec.Struct):
    checksums: dict[str, str]


class _Checksums(msgspec.Struct):
    ranks: list[_RankChecksums]


class SglangWeightCalls(EngineClient):
    """Implements `WeightReceiver` for SGLang.

    SGLang loads directly into the served model, so each update pauses the server in place. Running samples then
    continue with their cache. A model with recurrent states (`has_states`) prefills them again, as in the embedded
    engine: states would keep the effect of the old weights. ``group_ranks`` is the number of the server's ranks; all
    ranks load. ``weights_folder`` is the folder of the run's versions, which contains the senders' lock; it is None if
    there is no other sender.
    """

    has_loader = True
    has_states = False
    weights_folder: Path | None = None
    _lock: SenderLock
    _memory_released = False
    _weights_lost = False  # whether the memory of the weights was released, and no update has filled it since
    _received = False  # whether tensors of the open session may be in the model
    _session_start = 0.0

    def update_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Makes each rank of the server map the published file, compare all digests, and then load the file."""
        start = time.perf_counter()
        with self._sending(self.weights_folder or Path(manifest.path).parents[1]):
            if self._version_in_force() >= manifest.version:
                return _done(manifest, 0.0)
            self._load(manifest)
        return _done(manifest, 1e3 * (time.perf_counter() - start))

    def update_weights_from_disk(self, manifest: WeightManifest) -> dict[str, Any]:
        """Does the same as `update_weights`, because SGLang's loader of folders compares no digests.

        On all nodes of the server, the file and its folder must have the same path.
        """
        return self.update_weights(manifest)

    def _load(self, manifest: WeightManifest) -> None:
        if not self.has_loader:
            return self._load_at_attached(manifest)
        self._begin()
        with self._loading():
            self._received = True
            outcomes = self._outcome(lambda outcome: LoadFile(manifest, outcome), folder=Path(manifest.path).parents[1])
            if all(outcome.error and not outcome.changed for outcome in outcomes):  # no rank has changed its model
                self._received = False
                raise EngineError(
                    f"{self._where}: {outcomes[0].error}; version {self._version_in_force()} stays in force"
                )
            self._refuse(outcomes)
            self._order(Confirm(), version=str(manifest.version))
            self._weights_lost = False

    # -- an external server -------------------------------------------------------------------------------------------
    def _load_at_attached(self, manifest: WeightManifest) -> None:
        """Makes SGLang load the published file's folder. Compares the file's digests here, before and after the load.

        For the first version, also checks that the server's loader writes all parameters. Later versions have the same
        tensor names.
        """
        if manifest.factors:  # SGLang's loader of folders would load only the base model.
            raise EngineError(f"{self._where}: an attached server cannot load LoRA factors; send merged weights")
        self._check_file(manifest)
        with self._standing_still():
            try:
                if self._version_in_force() == UNKNOWN_VERSION:
                    self._check_all_written(manifest)
                    self._rename_weights(manifest.version)
                else:
                    self._load_folder(manifest, version=manifest.version)
                self._check_file(manifest)
            except EngineUnreachable:
                raise
            except EngineError:
                self._give_up()
                raise

    def _check_all_written(self, manifest: WeightManifest) -> None:
        """Loads the folder twice, the second time over random numbers. Raises EngineError if the results differ.

        SGLang's loaders skip tensors with unknown names, and elements without a new value keep their old value. During
        the check, the weight version is unknown, so that no prompt is sent.
        """
        self._load_folder(manifest, version=UNKNOWN_VERSION)
        loaded = self._checksums()
        computed = sorted({name for _, name in loaded if not _is_parameter(name)})
        self._call(
            "POST", "/weights_checker", {"action": "reset_tensors", "skip_tensor_list": computed, "selector": "target"}
        )
        self._load_folder(manifest, version=UNKNOWN_VERSION)
        again = self._checksums()
        changed = {name for (place, name), digest in loaded.items() if again.get((place, name)) != digest}
        if missing := sorted(changed.difference(computed)):
            raise EngineError(f"engine {self.url} /update_weights_from_disk: {not_written(missing)}")

    def _checksums(self) -> dict[tuple[int, str], str]:
        """Returns (index of the rank in the reply, tensor name) → checksum, for all tensors of the server."""
        asked = {"action": "checksum", "selector": "target"}
        ranks = self._call("POST", "/weights_checker", asked, needs=_Checksums)["ranks"]
        return {(place, name): digest for place, rank in enumerate(ranks) for name, digest in rank["checksums"].items()}

    def _load_folder(self, manifest: WeightManifest, *, version: int) -> None:
        body = {
            "model_path": str(Path(manifest.path).parent),
            "weight_version": str(version),
            "load_format": "safetensors",
            "flush_cache": False,
        }
        self._call("POST", "/update_weights_from_disk", body)

    def _check_file(self, manifest: WeightManifest) -> None:
        from relax_core.weights.version_file import DigestMismatch, read_weights

        try:
            next(read_weights(manifest), None)
        except (DigestMismatch, OSError) as error:
            raise EngineError(f"engine {self.url} /update_weights_from_disk: {error}") from error

    # -- a collective group -------------------------------------------------------------------------------------------
    def join_weight_group(self, address: WeightGroupAddress) -> dict[str, Any]:
        """Joins the group. SGLang has no deadline for joining, so only the deadline of the call applies."""
        with self._released_if_unreachable():
            return self._call("POST", "/init_weights_update_group", group_body(address))

    def begin_weight_update(self) -> dict[str, Any]:
        """Pauses the server, opens a session, and starts to compute the digest of received tensors."""
        self._session_start = time.perf_counter()
        if self.weights_folder is not None:
            self._lock.take(self.weights_folder)
        try:
            self._begin()
        except EngineError:  # no session is open
            self._lock.give_back()
            raise
        try:
            with self._released_if_unreachable():
                self._order(Watch())
        except EngineUnreachable:
            raise
        except EngineError:
            self.abandon_weight_update()
            raise
        return {}

    def receive_weights(self, tensors: Sequence[TensorSpec], *, group: str, version: int) -> dict[str, Any]:
        """Makes the server receive one broadcast. `end_weight_update` sets the version, after comparing the digest."""
        self._received = True
        body = tensors_body(tensors, group=group) | {"flush_cache": False}
        with self._released_if_unreachable():
            return self._call("POST", "/update_weights_from_distributed", body)

    def abandon_weight_update(self) -> dict[str, Any]:
        """Ends a failed session. If tensors were received, the server serves nothing until other weights are loaded."""
        try:
            self._abandon()
        finally:
            self._lock.give_back()
        return {}

    def end_weight_update(self, *, version: int, digest: str) -> dict[str, Any]:
        """Compares the digest and serves the weights.

        If the digest differs, the model already contains wrong tensors. The server then serves nothing until other
        weights are loaded.
        """
        try:
            with self._loading():
                self._refuse(self._outcome(lambda outcome: Attest(digest, outcome)))
                self._order(Confirm(), version=str(version))
                self._weights_lost = False
        finally:
            self._lock.give_back()
        stall_ms = 1e3 * (time.perf_counter() - self._session_start)
        return {"weight_version": version, "digest": digest, "stall_ms": stall_ms}

    @contextmanager
    def _released_if_unreachable(self) -> Iterator[None]:
        """Releases the lock if the server does not answer. The next sender then closes the open session."""
        try:
            yield
        except EngineUnreachable:
            self._lock.give_back()
            raise

    @contextmanager
    def _sending(self, folder: Path) -> Iterator[None]:
        self._lock.take(folder)
        try:
            yield
        finally:
            self._lock.give_back()

    # -- one session --------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        """Pauses the server and opens a session.

        An open session of a failed sender is closed first. The model may contain tensors of this session.
        """
        self._received = False
        self._stop_samples()
        try:
            self._call("POST", "/begin_weight_update", {})
        except EngineError as error:
            if ALREADY_OPEN not in str(error):
                self._go_on()
                raise
            self._give_up()
            self._call("POST", "/end_weight_update", {})
            self._call("POST", "/begin_weight_update", {})

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Ends the session after the block.

        If the block fails and the model contains new tensors, the server serves nothing until other weights are loaded.
        A server that does not answer stays paused with an open session, which the next sender closes.
        """
        try:
            yield
        except EngineUnreachable:
            raise
        except EngineError:
            self._abandon()
            raise
        self._end()

    def _abandon(self) -> None:
        if self._received:
            self._give_up()
        self._end()

    def _refuse(self, outcomes: list[Outcome]) -> None:
        if error := next((outcome.error for outcome in outcomes if outcome.error), None):
            raise EngineError(f"{self._where}: {error}; it serves nothing until other weights are loaded")

    def _end(self) -> None:
        self._call("POST", "/end_weight_update", {})
        self._go_on()

    def _stop_samples(self) -> None:
        self.pause("retract" if self.has_states else "in_place")

    def pause(self, mode: PauseMode) -> dict[str, Any]:
        """Implements `EngineClient.pause`. Retracted samples are prefilled again, so the cache is emptied.

        SGLang would otherwise find these samples' keys and values in the cache, also after new weights.
        """
        answer = super().pause(mode)
        if mode == "retract":
            try:
                self._flush(wait_s=0.0)  # SGLang would also wait for the retracted samples
            except EngineError:
                self._go_on()
                raise
        return answer

    def flush_cache(self) -> None:
        """Drops the engine's cache of finished prompts. The engine refuses while samples run."""
        self._flush(wait_s=self._control_timeout_s / 2)

    def _flush(self, *, wait_s: float) -> None:
        """Flushes the cache. SGLang flushes only when idle, and waits ``wait_s`` seconds for running requests."""
        status, data = self._answer("POST", f"/flush_cache?timeout={wait_s:g}", None, timeout_s=self._control_timeout_s)
        if status != 200:  # SGLang's reply is not JSON
            raise self._refusal("/flush_cache", status, data)

    def _go_on(self) -> None:
        if not self._memory_released:
            self._call("POST", "/continue_generation", {})

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        self._stop_samples()
        try:
            yield
        except EngineUnreachable:
            raise
        except EngineError:
            self._go_on()
            raise
        self._go_on()

    def _give_up(self) -> None:
        """Aborts all requests and sets the weight version to unknown, because the model has no complete version."""
        self._call("POST", "/abort_request", {"abort_all": True})
        self._rename_weights(UNKNOWN_VERSION)

    def _rename_weights(self, version: int) -> None:
        self._call("POST", "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _order(self, order: Order, *, version: str | None = None) -> None:
        body = {
            "serialized_named_tensors": [order_payload(order)] * self.group_ranks,
            "load_format": LOADER,
            "flush_cache": False,
            "weight_version": version,
        }
        self._call("POST", "/update_weights_from_tensor", body)

    def _outcome(self, order: Callable[[str], Order], *, folder: Path | None = None) -> list[Outcome]:
        """Sends an order and returns the outcome at each rank of the server. The ranks write outcomes below ``folder``.

        The default of ``folder`` is this host's folder for temporary files.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="relax-weights-", dir=folder) as outcomes:
                self._order(order(f"{outcomes}/outcome"))
                files = [Path(f"{outcomes}/outcome.{rank}") for rank in range(self.group_ranks)]
                return [_outcomes.decode(file.read_bytes()) for file in files]
        except OSError as error:
            raise EngineError(
                f"{self._where}: a rank of the server has not written its outcome; all ranks must have access to this "
                f"folder: {error}"
            ) from error

    def _version_in_force(self) -> int:
        return sglang_version(str(self._call("GET", "/model_info", needs=ModelInfo)["weight_version"]))

    @property
    def _where(self) -> str:
        return f"engine {self.url} /update_weights_from_tensor"


def _is_parameter(name: str) -> bool:
    """Returns whether a tensor of SGLang's model is loaded from weights.

    All other tensors, such as tables of rotary positions and scales of quantization, are computed.
    """
    last = name.rpartition(".")[2]
    return ("weight" in last or "bias" in last or last == "A_log") and not last.endswith("_scale")


def _done(manifest: WeightManifest, stall_ms: float) -> dict[str, Any]:
    return {"weight_version": manifest.version, "digest": manifest.digest, "stall_ms": stall_ms}
