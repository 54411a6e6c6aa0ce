"""What the gateway cannot be reached under, and how many engines a run with a gateway may begin with."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from relax_core.config.schema import RelaxConfig

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def gateway_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for each problem of `gateway` and `engine.elastic`; none with gateway=none."""
    gateway, engine = config.gateway, config.engine
    if gateway.name == "none":
        return
    if engine.count > engine.elastic.max_count:
        yield (
            f"engine.count={engine.count} with engine.elastic.max_count={engine.elastic.max_count}: the run begins "
            f"with more engines than it may have. Use engine.elastic.max_count={engine.count} or more."
        )
    if not _is_address(gateway.host):
        yield f"gateway.host={gateway.host} is no IPv4 address. Use 127.0.0.1, or an address of this machine."
    for name in gateway.allowed_hosts:
        if not _HOST_NAME.fullmatch(name):
            yield f"gateway.allowed_hosts has {name!r}, which is no host name. Give it without scheme, port and path."


def _is_address(host: str) -> bool:
    try:
        return host == "localhost" or bool(ipaddress.IPv4Address(host))
    except ValueError:
        return False
