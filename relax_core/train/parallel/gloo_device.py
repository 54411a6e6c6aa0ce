"""Lets all gloo groups of a process share one device, and with it one thread that waits for the network.

torch gives each group a device of its own, whose thread wakes up a hundred times a second. Megatron makes some twenty
groups, also for a single rank; their threads took 2% of a core while nothing happened, and 8% of a busy trainer's time.

A device listens on a TCP port and asks for no password. A connection that names the number of a pair of ranks, which is
small, takes the place of a rank, and torch unpickles what ranks send. So the device drops all requests to connect,
except while ranks join a group, and each group checks the users of its connections before anything is received.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

from relax_core.contracts.host.socket_owners import admit_clients, clients, is_loopback, listeners, refuse_clients

_INTERFACES = "GLOO_SOCKET_IFNAME"  # torch reads it as well: names of network interfaces, separated by commas


class ForeignRank(RuntimeError):
    """Says that another user of this host has connected in the place of a rank."""


class OneDeviceGloo(ProcessGroupGloo):
    """Is a gloo group on the devices of this process, which all such groups share."""

    _devices: list[ProcessGroupGloo.Device] = []
    _ports: set[int] = set()
    _admits = 0  # the number of open blocks of `admitting_ranks`

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if not self._devices:
            others = set(listeners())
            names = os.environ.get(_INTERFACES, "")
            self._devices.extend(
                [self.create_device(interface=name) for name in names.split(",")]
                if names
                else [self.create_default_device()]
            )
            self._ports.update(set(listeners()) - others)
            _admit(self._admits > 0)
        torch_class: Any = ProcessGroupGloo  # whose type annotations lack these options
        options = torch_class._Options()
        options._devices, options._timeout = self._devices, timeout
        super().__init__(store, rank, size, options)
        if size > 1:
            check_clients(self._ports)


def share_gloo_device() -> None:
    """Makes torch build `OneDeviceGloo` for each gloo group from now on; there is no public way to choose a device."""
    assert distributed_c10d.ProcessGroupGloo in (ProcessGroupGloo, OneDeviceGloo), "torch's own class is replaced"
    distributed_c10d.ProcessGroupGloo = OneDeviceGloo  # type: ignore[misc]


@contextmanager
def admitting_ranks() -> Iterator[None]:
    """Lets other ranks connect to this process while the block runs, in which all ranks make the same groups."""
    OneDeviceGloo._admits += 1
    _admit(True)
    try:
        yield
    finally:
        OneDeviceGloo._admits -= 1
        _admit(OneDeviceGloo._admits > 0)


def _admit(admits: bool) -> None:
    descriptors = listeners() if OneDeviceGloo._ports else {}
    for port in OneDeviceGloo._ports:
        (admit_clients if admits else refuse_clients)(descriptors[port])


def check_clients(ports: set[int]) -> None:
    """Raises `ForeignRank` unless all clients on this host of these ports belong to this user.

    A client that has closed its end already has no user, and what it sent could still be read.
    """
    for port in ports:
        for client in clients(port):
            if client.uid != os.getuid() and (client.uid is not None or is_loopback(client)):
                user = "that has gone" if client.uid is None else f"of user {client.uid}"
                raise ForeignRank(
                    f"a process {user} connected to port {port}, at which the trainer's ranks find each other. Its "
                    "data was not read. Ask that user to stop, or run on a machine of your own."
                )
