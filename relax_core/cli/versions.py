"""Finds which versions of Relax's libraries are installed and which were tested, without importing the libraries."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class LibraryVersion:
    """Holds the versions of one library.

    ``found`` is None if it is not installed. ``tested`` is None if constraints.txt does not exist or does not name it.
    """

    name: str
    found: str | None
    tested: str | None


def versions() -> list[LibraryVersion]:
    """Returns the versions of the libraries that Relax depends on, without those of its extras."""
    tested = _tested()
    return [
        LibraryVersion(name=name, found=_found(name), tested=tested.get(_normal(name))) for name in sorted(_required())
    ]


def _required() -> set[str]:
    lines = importlib.metadata.requires("relax-core") or []
    plain = [line for line in lines if "extra ==" not in line]
    return {match[0] for line in plain if (match := _NAME.match(line))}


def _tested() -> dict[str, str]:
    """Maps names to tested versions; it is empty in an installed wheel, which has no constraints.txt."""
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
