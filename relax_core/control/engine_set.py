"""Holds the set of engines of a run over all attempts of the services, and computes limits on the number of engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from relax_core.config.choices import ModeName
from relax_core.config.engine_checks import engine_count, media_not_sent
from relax_core.config.schema import RelaxConfig
from relax_core.registry import find_engine
from relax_core.roles.role_context import ENGINE, worker_name
from relax_core.server.order_types import Limits
from relax_core.weights.engine_members import EngineMember, MemberState, start_members, write_members


class EngineSet:
    """Holds the engines of the configuration and the added engines. Engines of the configuration never leave.

    ``count`` is the number of engines of the configuration. ``added`` maps the numbers of engines that an earlier
    controller added to their addresses: the URL of an external engine, "" for an engine that the run started. ``used``
    is the largest number that any engine of the run has had. Larger numbers are free, and each number is used only
    once.
    """

    def __init__(self, count: int, *, added: Mapping[int, str] | None = None, used: int = -1) -> None:
        self.count = count
        self.failures: dict[int, str] = {}  # failed added engine → reason
        self._members = {member.number: member for member in start_members(count).members}
        self._members |= {number: _joining(number, url) for number, url in (added or {}).items()}
        self._next = max([used, *self._members]) + 1
        self._folder: Path | None = None

    def begin(self, folder: Path) -> None:
        """Writes the list of engines for a new attempt of the services, which publishes its weights in ``folder``.

        Leaving engines are removed. Added engines join again, because they must get the weights of the new attempt.
        """
        self._folder = folder
        kept = [member for member in self._members.values() if member.state in ("joining", "serving")]
        self._members = {
            member.number: member if member.origin == "start" else _joining(member.number, member.url)
            for member in kept
        }
        self._write()

    def reserve(self, engines: int) -> list[int]:
        """Reserves and returns the numbers of this many new engines."""
        first, self._next = self._next, self._next + engines
        return list(range(first, self._next))

    def add(self, number: int, url: str = "") -> None:
        """Adds a joining engine with a reserved number; ``url`` is the address of an external engine."""
        assert number < self._next and number not in self._members
        self._members[number] = _joining(number, url)
        self._write()

    def set_state(self, number: int, state: MemberState) -> None:
        """Changes the state of an added engine."""
        assert self._members[number].origin != "start"
        self._members[number] = msgspec.structs.replace(self._members[number], state=state)
        self._write()

    def remove(self, number: int, *, failure: str = "") -> None:
        """Removes an added engine; ``failure`` is the reason if it failed."""
        assert self._members.pop(number).origin != "start"
        if failure:
            self.failures[number] = failure
        self._write()

    def members(self) -> list[EngineMember]:
        """Returns all engines, ordered by number."""
        return [self._members[number] for number in sorted(self._members)]

    def url_of(self, number: int) -> str:
        """Returns the address of the external engine with this number, "" for any other number."""
        return self._members[number].url if number in self._members else ""

    def present(self) -> list[int]:
        """Returns the numbers of the engines that serve or join, in order."""
        return [member.number for member in self.members() if member.state in ("joining", "serving")]

    def lost(self) -> dict[str, str]:
        """Maps the worker names of added engines that failed to the reasons."""
        return {worker_name(ENGINE, number): why for number, why in self.failures.items()}

    def added(self, *states: MemberState) -> list[int]:
        """Returns the numbers of the added and external engines in these states."""
        return [member.number for member in self.members() if member.origin != "start" and member.state in states]

    def _write(self) -> None:
        if self._folder is not None:
            write_members(self._folder, self._members.values())


def _joining(number: int, url: str) -> EngineMember:
    return EngineMember(number=number, origin="external" if url else "added", state="joining", url=url)


# -- Limits: which orders for engines a run accepts, and how many engines its samples in flight can fill --------------


def limits_of(config: RelaxConfig) -> Limits:
    """Returns which orders for engines a run accepts."""
    engine, refusal, no_more, no_urls = config.engine, "", "", ""
    if engine_count(config) == 0:
        refusal = f"algo={config.algo.name}: this algorithm trains on data rows, without engines."
    elif config.mode.name is ModeName.colocate:
        refusal = "mode=colocate: engines and trainer alternate in the same memory, so their number is fixed."
    if engine.urls:
        no_more = "engine.urls: this run does not start its engines. Start another server and send engine_urls."
    elif config.placement.gpus_per_node:
        no_more = "placement.gpus_per_node: engines on GPUs are placed at the start. Send engine_urls of a server."
    if find_engine(engine.name).attach is None:
        no_urls = f"engine.name={engine.name}: this kind of engine cannot attach to a server. Send num_replicas."
    elif unseen := media_not_sent(config):
        no_urls = (
            f"a server that the run did not start gets no {' and no '.join(unseen)} of prompts. Send num_replicas."
        )
    return Limits(
        start=engine_count(config),
        most=max(engine_count(config), engine.elastic.max_count),
        refusal=refusal,
        no_more=no_more,
        no_urls=no_urls,
        hosts=engine.elastic.allowed_hosts,
    )


def usable_engines(config: RelaxConfig) -> int:
    """Returns how many engines the samples in flight can fill; more engines would be idle."""
    rollout = config.rollout
    groups = config.mode.versions_in_flight * rollout.prompts_per_step + rollout.spare_prompts
    return math.ceil(groups * config.algo.group_size / config.engine.max_running_samples)


def autoscaler_bounds(config: RelaxConfig) -> tuple[int, int]:
    """Returns the smallest and the largest number of engines that the autoscaler orders."""
    least = config.engine.count
    return least, max(least, min(config.engine.elastic.max_count, usable_engines(config)))
