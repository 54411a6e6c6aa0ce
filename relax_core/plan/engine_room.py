"""Plans the engines that may come while a run trains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from relax_core.config.schema import RelaxConfig
from relax_core.control.engines.engine_limits import autoscaler_bounds, limits_of, usable_engines
from relax_core.plan.batch import plural
from relax_core.plan.memory.memory_terms import GIB, Holder
from relax_core.server.gateway_settings import EngineRoom

OF_ENGINES = ("engine", "owner of an engine")  # holders of the plan


def engine_room(config: RelaxConfig, memory: Sequence[Holder], *, here: bool) -> EngineRoom | None:
    """Returns what a further engine takes, None if the run starts none while it trains.

    ``memory`` is that of the plan, and ``here`` says that the run has no other machine.
    """
    limits = limits_of(config)
    if config.gateway.name == "none" or limits.refusal or limits.no_more or not memory:
        return None
    return EngineRoom(
        usable=usable_engines(config),
        engine_bytes=sum(holder.peak.bytes for holder in memory if holder.name in OF_ENGINES),
        engine_cores=config.engine.threads,
        machine_cores=os.cpu_count() if here else None,
    )


def room_words(config: RelaxConfig, room: EngineRoom | None, *, free: int | None) -> Iterator[str]:
    """Yields what is planned for engines that come and go; ``free`` is this machine's free memory in bytes."""
    if config.gateway.name == "none":
        return
    limits = limits_of(config)
    if why := limits.refusal or limits.no_more:
        yield why
        return
    start = plural(limits.start, "engine")
    if room is None:
        yield f"{start} at the start, and up to {limits.most} by order"
        return
    yield (
        f"{start} at the start, and up to {limits.most} by order; the samples in flight can fill "
        f"{plural(room.usable, 'engine')}"
    )
    left = "" if free is None else f" of {free / GIB:.1f} GiB that are free"
    cores = "" if room.machine_cores is None else f" of this machine's {room.machine_cores}"
    yield (
        f"each engine that comes takes {room.engine_bytes / GIB:.1f} GiB{left}, and "
        f"{plural(room.engine_cores, 'core')}{cores}"
    )
    if config.engine.autoscaler.enabled:
        least, most = autoscaler_bounds(config)
        yield (
            f"the autoscaler orders {least} to {most} engines"
            if most > least
            else f"the autoscaler orders no engine, since {plural(least, 'engine')} are all that samples can fill"
        )
