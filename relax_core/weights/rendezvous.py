"""Where the ranks of a collective group meet: a TCPStore that listens on its own address alone, and gloo beside it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist


def open_store(
    host: str, port: int, *, rank: int, world_size: int, timeout_s: float, listener: socket.socket | None = None
) -> dist.TCPStore:
    """Joins the store that rank 0 opens at ``host``:``port``; alone, rank 0 may give port 0. Returns once all ranks are
    there. Raises torch's DistStoreError past ``timeout_s``, and OSError where rank 0 cannot listen there. ``listener``:
    rank 0's, where it has bound the port already; it is the store's from then on.

    On a loopback host it also keeps the gloo groups of this process on loopback.
    """
    if host.startswith("127.") or host == "localhost":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the host name's address
    descriptor = None
    if rank == 0:
        # Left alone the store listens on every interface, and it asks nobody for a token.
        server = listener or socket.create_server((host, port))
        port, descriptor = server.getsockname()[1], server.detach()
    return dist.TCPStore(
        host, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=timeout_s), master_listen_fd=descriptor
    )
