"""Network helpers: finds the users of local connections, checks interface names, and opens URLs without redirects.

The user of a local connection is read from the kernel's tables. A listening socket can drop new clients. URL openers
follow no redirect, because a token is meant for one address only. They use no proxy for loopback addresses.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import urllib.request
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # a kernel without IPv6 has no second table
_ESTABLISHED, _CLOSED_BY_CLIENT, _LISTENS = "01", "08", "0A"
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # from asm-generic/socket.h; Python's socket module does not define them
_RETURN = 0x06  # BPF_RET | BPF_K of linux/filter.h: returns how many bytes of a packet pass the filter


@dataclass(frozen=True)
class Client:
    """Describes the client of a connection; ``uid`` is None if the client's end is closed or on another host."""

    address: str
    uid: int | None


def _rows() -> Iterator[list[str]]:
    for table in _TABLES:
        if table.exists():
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                yield line.split()


def _own_sockets() -> dict[str, int]:
    """Returns the file descriptors of this process's sockets, by socket inode."""
    inodes: dict[str, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:["):
            inodes[target[len("socket:[") : -1]] = int(entry)
    return inodes


def listeners() -> dict[int, int]:
    """Maps each TCP port that this process listens on to a descriptor of the listening socket."""
    own = _own_sockets()
    return {_port(fields[1]): own[fields[9]] for fields in _rows() if fields[3] == _LISTENS and fields[9] in own}


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def clients(port: int) -> list[Client]:
    """Returns the clients that are connected to ``port``, a TCP port of this process.

    The kernel's table is not read atomically, so one call may miss an existing client.
    """
    own = _own_sockets()
    rows = list(_rows())
    ends = {(fields[1], fields[2]): fields for fields in rows}
    found = []
    for fields in rows:
        if fields[3] in (_ESTABLISHED, _CLOSED_BY_CLIENT) and fields[9] in own and _port(fields[1]) == port:
            far_end = ends.get((fields[2], fields[1]))
            # After its process has closed a socket, the table shows no inode and uid 0 for it.
            uid = int(far_end[7]) if far_end is not None and far_end[9] != "0" else None
            found.append(Client(fields[2], uid))
    return found


def is_loopback(client: Client) -> bool:
    """Returns whether a client has a loopback address and therefore runs on this host."""
    address = client.address.rpartition(":")[0]
    return address[-2:] == "7F" or address == "00000000000000000000000001000000"


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def refuse_clients(descriptor: int) -> None:
    """Makes a listening socket drop all connection requests until `admit_clients` is called."""
    drop = _Instruction(_RETURN, 0, 0, 0)
    program = _Program(1, ctypes.pointer(drop))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))


def admit_clients(descriptor: int) -> None:
    """Makes a listening socket accept connections again."""
    # The kernel returns this error (FileNotFoundError) for a socket without a filter.
    with socket.socket(fileno=os.dup(descriptor)) as listener, suppress(FileNotFoundError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"  # names of interfaces, separated by commas; torch reads this variable, too


def network_interfaces() -> list[str]:
    """Returns the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def missing_interface(names: str) -> str | None:
    """Returns why gloo cannot listen on the interfaces ``names`` (GLOO_SOCKET_IFNAME); None if all exist."""
    existing = network_interfaces()
    missing = next((name for name in names.split(",") if name not in existing), None)
    if missing is None:
        return None
    return (
        f"{GLOO_INTERFACES}={names}: {missing!r} is not a network interface of this machine ({', '.join(existing)}). "
        "Unset the variable or name another interface."
    )


LOOPBACK = ("127.0.0.1", "localhost", "::1")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error."""

    def redirect_request(self, *arguments: Any) -> None:
        """Returns None, which makes the opener raise HTTPError with the status of the redirect."""


def opener(url: str) -> urllib.request.OpenerDirector:
    """Returns an opener that follows no redirect and uses no proxy for a loopback address."""
    direct = [urllib.request.ProxyHandler({})] if is_loopback_url(url) else []
    return urllib.request.build_opener(NoRedirect(), *direct)


def is_loopback_url(url: str) -> bool:
    """Returns whether an address is on this host."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def proxy_description(url: str) -> str:
    """Describes the proxy for requests to a URL, without the proxy's password, for errors; empty without a proxy."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or is_loopback_url(url) or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    where = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return (
        f" (by the proxy {where.scheme}://{where.netloc.rpartition('@')[2]} of the variable {parts.scheme}_proxy; the "
        "variable no_proxy excepts hosts)"
    )


def exempt_loopback_from_proxy(environ: MutableMapping[str, str] | None = None) -> None:
    """Adds loopback to no_proxy if proxy variables are set, for libraries and child processes."""
    variables = os.environ if environ is None else environ
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in variables):
        return
    for name in ("no_proxy", "NO_PROXY"):
        given = [part.strip() for part in variables.get(name, variables.get(name.swapcase(), "")).split(",")]
        if "*" not in given:
            variables[name] = ",".join([*filter(None, given), *(host for host in LOOPBACK if host not in given)])
