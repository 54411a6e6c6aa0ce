"""Checks the addresses of the gateway, and the keys of engines that come and go and of the autoscaler."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from relax_core.config.choices import ModeName
from relax_core.config.schema import RelaxConfig

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def gateway_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for each problem of `gateway`, `engine.elastic` and `engine.autoscaler`."""
    gateway, engine = config.gateway, config.engine
    if engine.autoscaler.enabled and (why := _no_autoscaler(config)):
        yield f"engine.autoscaler.enabled=true {why}"
    if gateway.name == "none":
        return
    if engine.autoscaler.min_count > engine.elastic.max_count:
        yield (
            f"engine.autoscaler.min_count={engine.autoscaler.min_count} is more than "
            f"engine.elastic.max_count={engine.elastic.max_count}. Lower the first one or raise the second one."
        )
    if not _is_address(gateway.host):
        yield f"gateway.host={gateway.host} is no IPv4 address. Use 127.0.0.1, or an address of this machine."
    for name in gateway.allowed_hosts:
        if not _HOST_NAME.fullmatch(name):
            yield f"gateway.allowed_hosts has {name!r}, which is no host name. Give it without scheme, port and path."


def _no_autoscaler(config: RelaxConfig) -> str:
    """Returns why the autoscaler cannot order engines in this run, "" if it can."""
    if config.gateway.name == "none":
        return "with gateway=none: it orders engines through the gateway's order book. Use gateway=local."
    if config.mode.name is ModeName.colocate:
        return "with mode=colocate, in which no engine comes or goes. Use mode=async."
    if config.engine.urls:
        return "with engine.urls: the run starts no engines. Drop one of the two."
    if config.placement.gpus_per_node:
        return "with engines on GPUs, which are placed at the start. Leave it off."
    return ""


def _is_address(host: str) -> bool:
    try:
        return host == "localhost" or bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False
