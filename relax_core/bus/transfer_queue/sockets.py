"""Puts TransferQueue's sockets into a folder of this user, and off the network.

TransferQueue binds TCP ports at the node's address, asks nobody who they are, and reads pickle. Unix sockets in a
folder that only this user may enter close that. The library has no setting for it, so the three helpers that make its
addresses are replaced: a server's "IP" becomes its folder, its "ports" are names of sockets in there.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path


def use_unix_sockets() -> None:
    """Call before the first connection. Whoever connects to a server of `serve_below` needs it."""
    # Read when the library is imported. More threads made a get of 64 x 200 KB twenty times slower.
    os.environ["TQ_NUM_THREADS"] = "1"
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage
    from transfer_queue.utils import zmq_utils

    for module in (zmq_utils, controller, simple_storage):
        module.format_zmq_address = _unix_address


def serve_below(folder: Path) -> None:
    """Makes the server that this process is about to start listen in ``folder``: one server a folder."""
    use_unix_sockets()
    from transfer_queue import controller
    from transfer_queue.storage import simple_storage

    names = itertools.count()
    for module in (controller, simple_storage):
        module.get_node_ip_address = lambda: str(folder)
        module.get_free_port = lambda ip: next(names)


def _unix_address(ip: str, port: int) -> str:
    return f"ipc://{ip}/{port}"
