"""Says which orders a run takes, and why it takes no others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_core.gateway.engine_urls import engine_address
from relax_core.gateway.gateway_settings import Limits
from relax_core.gateway.order_book import EngineRow, RunRow
from relax_core.gateway.problems import Refusal


class OrderChecks:
    """Refuses the orders that a run with these limits does not take."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

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
