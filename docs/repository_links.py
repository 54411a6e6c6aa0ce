"""Lets pages link to files of the repository that are not pages: mkdocs shows them as paths.

A hook of mkdocs.yml. A link to a missing file is left as it is, so that ``mkdocs build --strict`` reports it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the page with links to other files of the repository replaced by their text and path."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        if "://" in link["target"] or target.is_relative_to(ROOT / "docs") or not target.exists():
            return link[0]
        path = f"`{target.relative_to(ROOT)}`"
        return path if link["text"].strip("`") in (path.strip("`"), target.name) else f"{link['text']} ({path})"

    return _LINK.sub(replaced, markdown)
