"""Finds a free port for a server that starts later in another process."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

FIRST = 20_000  # Ray's workers use 10,002 to 19,999
HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Returns a free port of loopback outside the kernel's ephemeral range, so no other process gets it meanwhile. The
    choice is random, so two concurrent sessions rarely choose the same port.
    """
    first_handed_out = int(HANDED_OUT.read_text().split()[0])
    end = first_handed_out if first_handed_out > FIRST + 1_000 else 60_000  # the ephemeral range has nearly all ports
    for _ in range(1_000):
        port = FIRST + secrets.randbelow(end - FIRST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # the port is in use
                continue
        return port
    raise RuntimeError(f"no free port from {FIRST} to {end - 1} on 127.0.0.1")
