"""Says which orders a run takes, why it takes no others, and what engines that an order would start take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from relax_core.config.host_memory import available_bytes
from relax_core.server.engine_urls import engine_address
from relax_core.server.gateway_settings import EngineRoom, Limits
from relax_core.server.json_bodies import DryRun
from relax_core.server.order_book import EngineRow, RunRow
from relax_core.server.problems import Refusal

GIB = 1 << 30


class OrderChecks:
    """Refuses the orders that a run with these limits does not take; ``room`` is what its plan says of more engines."""

    def __init__(self, limits: Limits, room: EngineRoom | None) -> None:
        self.limits = limits
        self.room = room

    def check(self, run: RunRow | None) -> None:
        """Refuses an order for engines that this run never takes, or not now."""
        if self.limits.refusal:
            raise Refusal("not-in-this-run", self.limits.refusal)
        if run is None:
            raise Refusal(
                "run-starts", "the run is starting", headers={"Retry-After": "5"}, fix="ask again in a few seconds"
            )
        if run.stopping:
            raise Refusal("run-ends", "the run is ending", headers={"Retry-After": "60"})

    def check_more(self) -> None:
        """Refuses to start engines in a run that starts none."""
        if self.limits.no_more:
            raise Refusal("not-in-this-run", self.limits.no_more)

    async def addresses(self, urls: Sequence[str]) -> list[str]:
        """Returns the addresses of servers that are to join, each once; refuses those that this run does not take."""
        if self.limits.no_urls:
            raise Refusal("not-in-this-run", self.limits.no_urls)
        found = await asyncio.gather(*(engine_address(url, allowed_hosts=self.limits.hosts) for url in urls))
        return list(dict.fromkeys(found))

    def check_room(self, engines: Sequence[EngineRow], more: int) -> None:
        """Refuses so many engines more than there are if the run cannot have them."""
        present = sum(row.present for row in engines)
        if present + more > self.limits.most:
            raise Refusal(
                "no-room",
                f"the run has {present} engines, and engine.elastic.max_count={self.limits.most}",
                key="engine_urls",
                value=str(more),
                fix="send fewer addresses, or raise the key and start again",
            )

    def check_target(self, engines: int) -> None:
        """Refuses a number of engines that this run cannot have."""
        if engines < self.limits.start:
            raise Refusal(
                "too-few-engines",
                f"the run keeps the {self.limits.start} engines of its start",
                key="num_replicas",
                value=str(engines),
                fix=f"send at least {self.limits.start}",
            )
        if engines > self.limits.most:
            raise Refusal(
                "too-many-engines",
                f"engine.elastic.max_count={self.limits.most} is the largest number of engines",
                key="num_replicas",
                value=str(engines),
                fix=f"send at most {self.limits.most}, or raise the key and start again",
            )

    def newest(self, engines: Sequence[EngineRow], *, target: int) -> list[int]:
        """Returns the engines that go if so few stay; the newest go first."""
        present = [row.number for row in engines if row.present]
        return [number for number in present if number >= self.limits.start][max(0, target - self.limits.start) :]

    def at(self, engines: Sequence[EngineRow], addresses: Sequence[str]) -> list[int]:
        """Returns the newest engine that has or had each address; refuses an address that no engine had."""
        newest = {row.url: row.number for row in engines if row.origin == "external"}
        for address in addresses:
            if address not in newest:
                raise Refusal(
                    "unknown-id", f"no engine of this run joined by {address}", key="engine_urls", value=address
                )
        return [newest[address] for address in addresses]

    def added(self, engines: Sequence[EngineRow], numbers: Sequence[int]) -> list[int]:
        """Returns those of these engines that are present; refuses unknown ones and those of the start."""
        rows = {row.number: row for row in engines}
        for number in numbers:
            name = f"engine-{number}"
            if number not in rows:
                raise Refusal("unknown-id", f"{name} is no engine of this run", key="engine_ids", value=name)
            if rows[number].origin == "start":
                raise Refusal(
                    "engine-of-the-start",
                    f"{name} is an engine of the start, which stays",
                    key="engine_ids",
                    value=name,
                    fix="leave it out",
                )
        return [number for number in dict.fromkeys(numbers) if rows[number].present]


def with_room(dry: DryRun, room: EngineRoom | None, *, more: int) -> DryRun:
    """Returns the answer with what ``more`` engines take, and with warnings where that is too much or of no use."""
    if room is None:
        return dry
    here = room.machine_cores is not None
    told = dry.model_copy(
        update={
            "memory_bytes": more * room.engine_bytes,
            "free_memory_bytes": available_bytes() if here else None,
            "cores": more * room.engine_cores,
            "machine_cores": room.machine_cores,
            "usable_engines": room.usable,
        }
    )
    return told.model_copy(update={"warnings": list(_warnings(told))})


def _warnings(dry: DryRun) -> Iterator[str]:
    assert dry.memory_bytes is not None and dry.usable_engines is not None and dry.cores is not None
    if dry.engines_then > dry.usable_engines:
        yield f"the samples in flight can fill {dry.usable_engines} engines, so more of them would get none"
    if dry.free_memory_bytes is not None and dry.memory_bytes > dry.free_memory_bytes:
        yield (
            f"they take {dry.memory_bytes / GIB:.1f} GiB at their peaks, and "
            f"{dry.free_memory_bytes / GIB:.1f} GiB of this machine are free"
        )
    if dry.machine_cores is not None and dry.cores >= dry.machine_cores:
        yield f"they compute on {dry.cores} cores, and the whole run has {dry.machine_cores} on this machine"
