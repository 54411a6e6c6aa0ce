"""What crosses between bus process, clients and TransferQueue's servers, beside the payloads."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping

import msgspec

GRACE_S = 60.0  # a call may reach the bus this much after its deadline


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server of TransferQueue. ``title``: how errors name it; ``folder``, ``ports``: where its sockets are."""

    title: str
    pid: int
    server_id: str
    folder: str
    ports: dict[str, int]


class PlaneAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a data plane is. The order of ``units`` says which unit has which sample: all must use the same."""

    controller: Server
    units: list[Server]

    @property
    def servers(self) -> tuple[Server, ...]:
        return (self.controller, *self.units)


class PayloadLocation(msgspec.Struct, frozen=True):
    """Where a bus has its payloads: a partition of a data plane."""

    plane: PlaneAddress
    partition: str


class StoredColumns(msgspec.Struct, frozen=True, array_like=True):
    """One sample of TransferQueue: columns that one call wrote for one row. ``sizes``: column → bytes.

    ``key`` names it for good; ``index`` is its place, which a later sample gets once this one was cleared.
    """

    key: str
    index: int
    sizes: dict[str, int]


class StoredRow(msgspec.Struct, frozen=True, array_like=True):
    """A row on its way in or out. ``columns``: payloads that the books keep and that travel along."""

    group_uid: str
    index: int
    uids: list[str]
    versions: list[int]
    columns: dict[str, bytes]
    stored: list[StoredColumns]
    dropped: dict[str, str] = {}


class WrittenColumns(msgspec.Struct, frozen=True, array_like=True):
    """Columns that a task wrote for one row."""

    columns: dict[str, bytes]
    stored: StoredColumns | None


class StoredLease(msgspec.Struct, frozen=True, array_like=True):
    lease_id: int
    task: str
    rows: list[StoredRow]
    waited_s: float


def new_key(group_uid: str, *, timeout_s: float) -> str:
    """A name that no other sample has. It carries when its writer has surely given up: a sample that the bus does not
    know by then never gets known."""
    return f"{group_uid}:{secrets.token_hex(4)}:{time.time() + timeout_s + GRACE_S:.0f}"


def abandoned(keys: Iterable[str], known: Mapping[str, object], *, now: float) -> list[str]:
    """The keys whose writers never told the bus of them, and no longer can."""
    return [key for key in keys if key not in known and float(key.rpartition(":")[2]) < now]
