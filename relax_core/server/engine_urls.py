"""Checks the addresses of engines that somebody else started, before anything is sent to them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from relax_core.server.problems import Refusal

RESOLVE_S = 5.0  # how long a name may take to be resolved
_KEY = "engine_urls"


async def engine_address(url: str, *, allowed_hosts: Collection[str]) -> str:
    """Returns ``http://ADDRESS:PORT`` of an engine, with the one address to which its host is resolved here.

    The run then uses this address alone, so a name that is resolved to another one later leads nowhere else. Raises
    `Refusal` for what is no plain address of a server, for a host that is not in ``allowed_hosts``, and for addresses
    that belong to no engine, whatever is allowed.
    """
    host, port = _host_and_port(url)
    address = await _resolved(url, host)
    if address.is_link_local or address.is_multicast or address.is_unspecified or address.is_reserved:
        raise _refusal(url, f"{address} is no address of an engine")
    if not {host, str(address)} & {name.lower() for name in allowed_hosts}:
        raise _refusal(url, f"engine.elastic.allowed_hosts does not name {host}", fix="name the host there")
    return f"http://{address}:{port}"


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError as error:
        raise _refusal(url, "it is no address of a server") from error
    plain = parts.scheme == "http" and parts.path in ("", "/") and not parts.query and not parts.fragment
    if not plain or not host or not port or parts.username is not None or parts.password is not None:
        raise _refusal(url, "it is no address of a server")
    return host, port


async def _resolved(url: str, host: str) -> ipaddress.IPv4Address:
    try:
        return ipaddress.IPv4Address(host)
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a TimeoutError, too
        raise _refusal(url, f"{host} has no IPv4 address") from error
    return ipaddress.IPv4Address(found[0][4][0])


def _refusal(url: str, why: str, *, fix: str = "send http://HOST:PORT") -> Refusal:
    return Refusal("unfit-address", why, key=_KEY, value=url[:200], fix=fix)
