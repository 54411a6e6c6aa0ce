"""Reads docs/metrics.md: the described tags, and the tags that every run has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def rows() -> list[tuple[str, str, str]]:
    """Returns (tag, unit, when) of each tag. In a tag, ``<part>`` means any name."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            assert len(cells) == 4, f"four cells, and no bar within one: {line}"
            found += [(tag, cells[1], cells[2]) for tag in re.findall(r"`([^`]+)`", cells[0])]
    return found


def not_described(tags: Iterable[str]) -> set[str]:
    """Returns the tags in ``tags`` ("<source>/<name>") that the page does not describe."""
    patterns = [re.compile(re.sub(r"<\w+>", r"[^/]+", re.escape(tag))) for tag, _, _ in rows()]
    return {tag for tag in tags if not any(pattern.fullmatch(tag) for pattern in patterns)}


def always() -> set[str]:
    """Returns the tags that every run with evaluations has."""
    return {tag for tag, _, when in rows() if when in ("always", "`eval.every`") and "<" not in tag}
