"""Moves TransferQueue's sockets from the network into a folder of this user.

TransferQueue binds TCP ports at the node's address, authenticates no client, and unpickles what it reads. Unix sockets
in a folder that only this user may enter prevent that. The library has no setting for it, so this module replaces the
three helper functions that make its addresses: a server's "IP" becomes its folder, and its "ports" become names of
sockets in that folder.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path


def use_unix_sockets() -> None:
    """Replaces the library's addresses by Unix sockets. Call it before the first connection to a server."""
    # The library reads this at import. More threads make a get of 64 x 200 KB twenty times slower.
    os.environ["TQ_NUM_THREADS"] = "1"
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage
    from transfer_queue.utils import zmq_utils

    for module in (zmq_utils, controller, simple_storage):
        module.format_zmq_address = _unix_address


def serve_below(folder: Path) -> None:
    """Makes the server that this process starts next listen in ``folder``. Each server needs a folder of its own."""
    use_unix_sockets()
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage

    names = itertools.count()
    for module in (controller, simple_storage):
        module.get_node_ip_address = lambda: str(folder)
        module.get_free_port = lambda ip: next(names)


def _unix_address(ip: str, port: int) -> str:
    return f"ipc://{ip}/{port}"
