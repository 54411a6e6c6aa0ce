"""Opens the TCPStore through which the ranks of a group find each other; it listens only on its own address."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(
    host: str, port: int, *, rank: int, world_size: int, timeout_s: float, listener: socket.socket | None = None
) -> dist.TCPStore:
    """Joins the store that rank 0 opens at ``host``:``port`` and returns when all ranks have joined.

    A single rank may use port 0. ``listener`` is rank 0's socket if its port is already bound, and the store owns it
    from then on. On a loopback host the gloo groups of this process also stay on loopback. Raises torch's
    DistStoreError after ``timeout_s`` seconds, and OSError if rank 0 cannot listen.
    """
    if host.startswith("127.") or host == "localhost":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # By default gloo listens on the host name's address.
    descriptor = None
    if rank == 0:
        # By default the store listens on every interface, and it requires no token.
        server = listener or socket.create_server((host, port))
        port, descriptor = server.getsockname()[1], server.detach()
    return dist.TCPStore(
        host, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=timeout_s), master_listen_fd=descriptor
    )
