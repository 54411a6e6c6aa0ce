"""Opens addresses: no redirect is followed, because a token is for one address, and loopback needs no proxy."""

from __future__ import annotations

import ipaddress
import os
import urllib.request
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error."""

    def redirect_request(self, *arguments: Any) -> None:
        """Returns no request, so that the opener raises HTTPError with the status of the redirect."""


def opener(url: str) -> urllib.request.OpenerDirector:
    """Returns an opener that follows no redirect; for a loopback address it also uses no proxy."""
    direct = [urllib.request.ProxyHandler({})] if is_loopback_url(url) else []
    return urllib.request.build_opener(NoRedirect(), *direct)


def is_loopback_url(url: str) -> bool:
    """Returns whether an address is on this host."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def proxy_words(url: str) -> str:
    """Returns words that name the proxy by which an address is asked, without its password; empty without a proxy."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy is None or is_loopback_url(url) or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    where = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return (
        f" (by the proxy {where.scheme}://{where.netloc.rpartition('@')[2]} of the variable {parts.scheme}_proxy; the "
        "variable no_proxy excepts hosts)"
    )


def except_loopback(environ: MutableMapping[str, str] | None = None) -> None:
    """Excepts loopback from the proxies that the variables name, for libraries and child processes."""
    variables = os.environ if environ is None else environ
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in variables):
        return
    for name in ("no_proxy", "NO_PROXY"):
        given = [one.strip() for one in variables.get(name, variables.get(name.swapcase(), "")).split(",")]
        if "*" not in given:
            variables[name] = ",".join([*filter(None, given), *(one for one in LOOPBACK if one not in given)])
