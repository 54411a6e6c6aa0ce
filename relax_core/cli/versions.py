"""Which versions of Relax's libraries are installed, and which were tested together. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class LibraryVersion:
    """``found``: None where it is missing. ``tested``: None where constraints.txt is not there or does not name it."""

    name: str
    found: str | None
    tested: str | None


def versions() -> list[LibraryVersion]:
    """Of what Relax itself depends on; extras aside."""
    tested = _tested()
    return [
        LibraryVersion(name=name, found=_found(name), tested=tested.get(_normal(name))) for name in sorted(_required())
    ]


def _required() -> set[str]:
    lines = importlib.metadata.requires("relax-core") or []
    plain = [line for line in lines if "extra ==" not in line]
    return {match[0] for line in plain if (match := _NAME.match(line))}


def _tested() -> dict[str, str]:
    """Name → version. A wheel comes without the file."""
    if not _CONSTRAINTS.is_file():
        return {}
    pins = [line.split("#")[0].strip().split("==") for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines()]
    return {_normal(pin[0]): pin[1].split(";")[0].strip() for pin in pins if len(pin) == 2}


def _found(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
