"""Checks the names of network interfaces that environment variables give."""

from __future__ import annotations

import socket

GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"  # torch reads it as well: names of interfaces, separated by commas


def network_interfaces() -> list[str]:
    """Returns the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def missing_interface(names: str) -> str | None:
    """Returns why gloo cannot listen on ``names``, the value of GLOO_SOCKET_IFNAME, or None if all exist."""
    existing = network_interfaces()
    missing = next((name for name in names.split(",") if name not in existing), None)
    if missing is None:
        return None
    return (
        f"{GLOO_INTERFACES}={names}: {missing!r} is no network interface of this machine ({', '.join(existing)}). "
        "Unset the variable or name another interface."
    )
