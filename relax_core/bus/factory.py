"""Starts the configured bus process, and connects to the bus of a live run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from relax_core.bus.settings import BusSettings

if TYPE_CHECKING:
    from relax_core.bus.ray_bus import RayBus
    from relax_core.bus.transfer_queue_plane import DataPlane
    from relax_core.config.schema import BusConfig

BACKENDS = ("ray", "transfer_queue")

# Maximum number of the actor's concurrent calls. Waiting calls count, too, and the call that ends their wait needs a
# slot.
_MAX_CALLS = 10_000
START_TIMEOUT_S = 60.0


def create_bus(
    config: BusConfig,
    settings: BusSettings,
    *,
    ledger_path: Path,
    name: str,
    namespace: str,
    socket_folder: Path = Path("/tmp"),
    plane: DataPlane | None = None,
    node_options: Mapping[str, Any] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> RayBus:
    """Starts the bus process and waits up to ``timeout_s`` seconds for its first reply.

    `connect_bus` finds the bus by ``name`` and ``namespace``. The bus process ends with the process that called this
    function. ``plane`` stores the payloads of bus=transfer_queue. If ``plane`` is None, this function starts a data
    plane that ends with the bus, with sockets below ``socket_folder``. ``socket_folder`` must be short, because the
    path of a socket has at most 107 bytes. ``node_options`` are Ray's options that select the node of the bus process.
    Raises ValueError for an unknown backend.
    """
    if config.name not in BACKENDS:
        raise ValueError(f"bus={config.name} is not built. What exists for bus: {', '.join(BACKENDS)}")
    options: dict[str, Any] = {"name": name, "namespace": namespace, "num_cpus": 0, "max_restarts": 0}
    options |= {"max_concurrency": _MAX_CALLS, **(node_options or {})}
    if config.name == "transfer_queue":
        return _start_transfer_queue_bus(
            config,
            settings,
            ledger_path,
            options=options,
            plane=plane,
            socket_folder=socket_folder,
            timeout_s=timeout_s,
        )
    return _start_ray_bus(settings, ledger_path, options=options, timeout_s=timeout_s)


def _start_ray_bus(settings: BusSettings, ledger_path: Path, *, options: Mapping[str, Any], timeout_s: float) -> RayBus:
    import ray

    from relax_core.bus.bus_actor import BusActor
    from relax_core.bus.ray_bus import RayBus, describe

    remote = ray.remote(BusActor).options(**options)
    actor = remote.remote(msgspec.msgpack.encode(settings), str(ledger_path))
    describe(actor, timeout_s=timeout_s)
    return RayBus(actor, settings=settings)


def _start_transfer_queue_bus(
    config: BusConfig,
    settings: BusSettings,
    ledger_path: Path,
    *,
    options: dict[str, Any],
    plane: DataPlane | None,
    socket_folder: Path,
    timeout_s: float,
) -> RayBus:
    from relax_core.bus.transfer_queue_bus import start_bus
    from relax_core.bus.transfer_queue_plane import DataPlane

    owned = None
    if plane is None:
        plane = owned = DataPlane(folder=socket_folder)
    return start_bus(settings, ledger_path, options=options, plane=plane, owned=owned, timeout_s=timeout_s)


def connect_bus(name: str, namespace: str) -> RayBus:
    """Returns a client of a live run's bus. Raises ValueError if no bus has this name."""
    import ray

    from relax_core.bus.ray_bus import RayBus, describe

    try:
        actor = ray.get_actor(name, namespace=namespace)
    except ValueError:
        raise ValueError(f"no bus named {name!r} runs in namespace {namespace!r}: create it first") from None
    _, settings, payload_location = describe(actor, timeout_s=START_TIMEOUT_S)
    if msgspec.msgpack.decode(payload_location) is None:
        return RayBus(actor, settings=settings)

    from relax_core.bus.transfer_queue_bus import TransferQueueBus
    from relax_core.bus.transfer_queue_plane import PayloadLocation

    location = msgspec.msgpack.decode(payload_location, type=PayloadLocation)
    bus = TransferQueueBus(actor, settings=settings, location=location)
    bus.open()  # imports and connects during the run's start, because this takes seconds
    return bus
