"""Tests that the committed picture of a step equals the output of the command."""

from __future__ import annotations

import re
from pathlib import Path

from relax_core.tools.draw_step import WAY, main

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs/one_step.svg"


def test_the_committed_picture_is_what_the_command_writes(tmp_path: Path) -> None:
    main([str(tmp_path / "drawn.svg")])
    assert (tmp_path / "drawn.svg").read_bytes() == COMMITTED.read_bytes(), (
        "run python -m relax_core.tools.draw_step docs/one_step.svg, look at it, and commit it"
    )


def test_every_file_that_is_named_exists() -> None:
    page = (ROOT / "docs/one_step.md").read_text(encoding="utf-8")
    files = re.findall(r"`([a-z_/]+\.py)`", page)
    assert len(files) >= 10, "each of the ten lines must name its file"
    files += [f"relax_core/{stop.file}" for stop in WAY]
    assert [file for file in files if not (ROOT / file).is_file()] == []
