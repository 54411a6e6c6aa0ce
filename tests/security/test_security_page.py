"""Checks that every promise on the security page is tested: each row of its table names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def promises() -> list[tuple[str, str]]:
    """Returns each promise of the page with the table cell that names its tests."""
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    return [(row[0].strip(), row[1]) for row in rows if len(row) == 2 and "tests/" in row[1]]


def test_the_page_has_promises() -> None:
    assert len(promises()) > 30


@pytest.mark.parametrize(("promise", "cell"), promises(), ids=lambda text: text[:60])
def test_each_promise_names_tests_that_exist(promise: str, cell: str) -> None:
    named = TEST.findall(cell)
    assert named, promise
    for path, function in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not function or re.search(rf"^(async )?def {function}\b", text, re.MULTILINE), f"{path}::{function}"
