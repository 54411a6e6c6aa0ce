"""Messages between bus process, clients and TransferQueue's servers; they locate payloads and contain none."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping

import msgspec

from relax_core.contracts.bus import Group, Lease

GRACE_S = 60.0  # a call may reach the bus this long after its deadline


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Is a server of TransferQueue. ``title`` is its name in errors; ``folder`` and ``ports`` locate its sockets."""

    title: str
    pid: int
    server_id: str
    folder: str
    ports: dict[str, int]


class PlaneAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Is the address of a data plane.

    All processes must use the same order of ``units``, which says which unit has a sample.
    """

    controller: Server
    units: list[Server]

    @property
    def servers(self) -> tuple[Server, ...]:
        """Returns all servers, the controller first."""
        return (self.controller, *self.units)


class PayloadLocation(msgspec.Struct, frozen=True):
    """Is the location of a bus's payloads: a partition of a data plane."""

    plane: PlaneAddress
    partition: str


class StoredColumns(msgspec.Struct, frozen=True, array_like=True):
    """Holds one sample of TransferQueue: the columns that one call wrote for one group.

    ``key`` identifies the sample for good. ``index`` is its index in the partition; a later sample gets the index once
    this one was cleared. ``sizes`` maps each column to its bytes.
    """

    key: str
    index: int
    sizes: dict[str, int]


# Groups travel with the payloads that the ledger persists or that are small; beside each group are its samples.
PutMessage = list[tuple[Group, list[StoredColumns]]]
WriteMessage = dict[str, tuple[dict[str, bytes], list[StoredColumns]]]  # by group_uid
LeaseMessage = tuple[Lease, list[list[StoredColumns]]]


def new_key(group_uid: str, *, timeout_s: float) -> str:
    """Returns a key that no other sample has.

    It contains the time after which its writer has surely given up. If the bus does not know the sample by then, it
    never will.
    """
    return f"{group_uid}:{secrets.token_hex(4)}:{time.time() + timeout_s + GRACE_S:.0f}"


def abandoned(keys: Iterable[str], known: Mapping[str, object], *, now: float) -> list[str]:
    """Returns the keys whose writers never reported them to the bus and no longer can."""
    return [key for key in keys if key not in known and float(key.rpartition(":")[2]) < now]
