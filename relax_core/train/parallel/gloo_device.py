"""Lets all gloo groups of a process share one device, and with it one thread that waits for the network.

torch gives each group a device of its own, whose thread wakes up a hundred times a second. Megatron makes some twenty
groups, also for a single rank; their threads took 2% of a core while nothing happened, and 8% of a busy trainer's time.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

_INTERFACES = "GLOO_SOCKET_IFNAME"  # torch reads it as well: names of network interfaces, separated by commas


class OneDeviceGloo(ProcessGroupGloo):
    """Is a gloo group on the devices of this process, which all such groups share."""

    _devices: list[ProcessGroupGloo.Device] = []

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if not self._devices:
            names = os.environ.get(_INTERFACES, "")
            self._devices.extend(
                [self.create_device(interface=name) for name in names.split(",")]
                if names
                else [self.create_default_device()]
            )
        torch_class: Any = ProcessGroupGloo  # whose type annotations lack these options
        options = torch_class._Options()
        options._devices, options._timeout = self._devices, timeout
        super().__init__(store, rank, size, options)


def share_gloo_device() -> None:
    """Makes torch build `OneDeviceGloo` for each gloo group from now on; there is no public way to choose a device."""
    assert distributed_c10d.ProcessGroupGloo in (ProcessGroupGloo, OneDeviceGloo), "torch's own class is replaced"
    distributed_c10d.ProcessGroupGloo = OneDeviceGloo  # type: ignore[misc]
