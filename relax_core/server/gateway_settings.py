"""Holds what the gateway of a run is started with, and where it says how to reach it. It imports no web framework."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

FILE = "gateway.json"  # in the run's folder
PLAN_FILE = "plan.json"  # in the run's folder


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the configuration says of engines that come and go.

    ``start`` is engine.count and ``most`` is engine.elastic.max_count. ``refusal`` says why this run can neither add
    nor take out engines, ``no_more`` why it starts no engines, and ``no_urls`` why it takes no servers of somebody
    else; each is "" if it can. ``hosts`` is engine.elastic.allowed_hosts.
    """

    start: int
    most: int
    refusal: str = ""
    no_more: str = ""
    no_urls: str = ""
    hosts: list[str] = []


@dataclass(frozen=True, kw_only=True)
class EngineRoom:
    """Is what the plan of a run says of engines that come while it trains.

    ``usable`` is how many engines the samples in flight can fill. An engine that comes takes ``engine_bytes`` of memory
    with its owner at their peaks, and ``engine_cores`` cores. ``machine_cores`` is what this machine has, None if the
    run's engines may be on others.
    """

    usable: int
    engine_bytes: int
    engine_cores: int
    machine_cores: int | None


class _PlanFile(msgspec.Struct):
    engine_room: EngineRoom | None = None


def read_room(folder: Path) -> EngineRoom | None:
    """Returns what the plan of the run in ``folder`` says of further engines, None if it can have none, or no plan."""
    file = folder / PLAN_FILE
    return msgspec.json.decode(file.read_bytes(), type=_PlanFile).engine_room if file.is_file() else None


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what the gateway of one run is started with.

    ``folder`` is the run's. ``listener`` is the descriptor of the listening socket and ``channel`` that of the way to
    the controller; the supervisor holds both.
    ``hosts`` are further names in the Host header. ``token`` is what its clients show.
    """

    folder: str
    host: str
    listener: int
    channel: int
    hosts: list[str]
    token: str
    limits: Limits


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Is the content of ``gateway.json``, which only the user may read.

    ``page`` is a link to the run's page that works once.
    """

    url: str
    token: str
    page: str
    pid: int


def read_address(folder: Path) -> GatewayAddress:
    """Returns where the gateway of a run is. Raises OSError, and msgspec.DecodeError for a file with other content."""
    return msgspec.json.decode((folder / FILE).read_bytes(), type=GatewayAddress)
