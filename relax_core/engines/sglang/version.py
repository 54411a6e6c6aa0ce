"""Defines which versions of SGLang are supported."""

from __future__ import annotations

TESTED = "0.5.23"
FROM, BEFORE = (0, 5, 23), (0, 6)  # earlier versions lack /begin_weight_update and per-token weight versions


def version_problem(found: str) -> str | None:
    """Returns why this version is refused, or None. Suffixes such as .post1 or rc2 do not count."""
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdecimal())
    if FROM <= numbers < BEFORE:
        return None
    return (
        f"SGLang {found} is not supported. Install {TESTED}, which is tested; versions from "
        f"{'.'.join(map(str, FROM))} to before {'.'.join(map(str, BEFORE))} are accepted."
    )
