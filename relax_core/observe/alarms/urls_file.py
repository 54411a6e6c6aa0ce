"""Reads ``notify.urls_file``: one address of Apprise a line, in a file that only this user can read."""

from __future__ import annotations

import logging
import stat
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relax_core.observe.alarms.alarm_sender import Notify

KEY = "notify.urls_file"
INSTALL = "pip install 'relax-core[notify]'"


def read_receivers(path: Path) -> list[tuple[str, Notify]]:
    """Returns name and function of each receiver; empty lines and those that begin with # do not count.

    The name is the scheme and the host, and may stand in a log.

    Raises ValueError with the key, the number of a wrong line and the fix, and never with an address, which may hold
    a password. The import of Apprise takes half a second.
    """
    if find_spec("apprise") is None:
        raise ValueError(f"{KEY}={path} needs the package apprise: {INSTALL}")
    path = path.expanduser()
    try:
        mode = path.stat().st_mode
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{KEY}={path} cannot be read: {error}. Name a text file with one address a line.") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{KEY}={path} has the mode {stat.S_IMODE(mode):o}, but addresses hold passwords: chmod 600 it."
        )
    import apprise

    logging.getLogger("apprise").addHandler(logging.NullHandler())  # its lines have addresses in them
    logging.getLogger("apprise").propagate = False
    memory = apprise.PersistentStoreMode.MEMORY  # it writes no file of its own
    asset = apprise.AppriseAsset(app_id="Relax", app_desc="Relax", storage_mode=memory, secure_logging=True)
    found: list[tuple[str, Notify]] = []
    for number, line in enumerate(lines, 1):
        address = line.strip()
        if not address or address.startswith("#"):
            continue
        server = apprise.Apprise.instantiate(address, asset=asset)
        if server is None:
            scheme = address.partition("://")[0]
            words = f"scheme {scheme[:20]!r}" if "://" in address and scheme.isalnum() else "line"
            raise ValueError(
                f"{KEY}={path}, line {number}: Apprise knows no such address (its {words}). Its schemes are listed at "
                "https://appriseit.com, such as json://HOST, mailtos://USER:PASSWORD@HOST and slack://…"
            )
        host = getattr(server, "host", None) or ""
        found.append((f"{address.partition('://')[0]} {host}".strip(), partial(_notify, server)))
    if not found:
        raise ValueError(f"{KEY}={path} has no address. Write one a line, such as json://HOST/PATH.")
    return found


def _notify(server: Any, title: str, text: str) -> bool:
    return bool(server.notify(title=title, body=text))
