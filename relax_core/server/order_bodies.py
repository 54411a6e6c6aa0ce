"""Declares the JSON bodies that the routes of orders take, and checks addresses of engines in them.

Types are strict: 0 is no false, and "1" is no 1. Nothing is sent to an address before it was checked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from relax_core.server.orders import State
from relax_core.server.problems import Refusal

MOST_SECONDS = 86400.0
RESOLVE_S = 5.0  # how long a name may take to be resolved
_KEY = "engine_urls"


def _whole(value: object) -> object:
    """Returns a number without a fraction as an integer, as JSON Schema reads it: 2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Replicas = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]
EngineUrls = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=64)]
EngineIds = Annotated[list[Annotated[str, Field(pattern=r"^engine-[0-9]{1,9}$")]], Field(min_length=1, max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dry_run: bool = False


class _Out(_Body):
    """Adds engines. ``partial`` says what happens to the others if one of the new engines fails."""

    model_name: Literal["default"] = "default"
    timeout_secs: Seconds = 600.0
    partial: Literal["rollback_all", "keep_partial"] = "rollback_all"


class _In(_Body):
    """Takes engines out.

    With ``force`` samples under way are moved to other engines at once, and otherwise after ``timeout_secs`` seconds,
    by default engine.elastic.drain_timeout_s.
    """

    force: bool = False
    timeout_secs: Seconds | None = None


class ScaleOutTo(_Out):
    """Asks for so many engines in all, those of the start included."""

    num_replicas: Replicas


class ScaleOutBy(_Out):
    """Asks servers of somebody else, named by ``http://HOST:PORT``, to join. Those that are in are left out."""

    engine_urls: EngineUrls


class ScaleInTo(_In):
    """Asks for so few engines in all, those of the start included; the newest ones go."""

    num_replicas: Replicas


class ScaleInOf(_In):
    """Asks these engines to go."""

    engine_ids: EngineIds


class ScaleInAt(_In):
    """Asks the servers with these addresses, which joined by them, to go."""

    engine_urls: EngineUrls


TAGS = ("by_number", "by_name", "by_address")  # of the kinds of target, which an error's place then names


def _kind(body: object) -> str:
    """Tells the kinds of target apart by their own key, so that errors are about the right one."""
    keys = body if isinstance(body, dict) else ()
    return TAGS[2] if "engine_urls" in keys else TAGS[1] if "engine_ids" in keys else TAGS[0]


ScaleOut = Annotated[
    Annotated[ScaleOutTo, Tag(TAGS[0])] | Annotated[ScaleOutBy, Tag(TAGS[2])],
    Discriminator(_kind),
]
ScaleIn = Annotated[
    Annotated[ScaleInTo, Tag(TAGS[0])] | Annotated[ScaleInOf, Tag(TAGS[1])] | Annotated[ScaleInAt, Tag(TAGS[2])],
    Discriminator(_kind),
]


class CancelMany(_Body):
    """Asks for the cancellation of the open orders that add engines, or of those in the state ``status_filter``."""

    status_filter: State | None = None


class AutoscalerSwitch(BaseModel):
    """Turns the autoscaler on or off."""

    model_config = ConfigDict(strict=True, extra="forbid")
    enabled: bool


# -- addresses ---------------------------------------------------------------------------------------------------------
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
