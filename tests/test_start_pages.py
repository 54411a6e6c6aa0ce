"""Tests that the plug-ins in docs/start/your_task.md equal the plug-ins in README.md and pass all checks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.preflight import CHECKS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/start/your_task.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`(my_\w+\.py)`:\n\n```python\n((?s:.*?))```\n\n {4}(python -m relax_core .*)$", PAGE, re.M)


@pytest.mark.parametrize(("name", "code", "command"), FILES, ids=[name for name, *_ in FILES])
def test_a_file_of_the_page_passes_the_checks_of_its_command(
    name: str, code: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[3:]
    assert any(word.endswith(f"name={name}") for word in words)
    load_config(words, checks=CHECKS)


def test_the_readme_has_the_same_files() -> None:
    assert len(FILES) == 3
    for name, code, command in FILES:
        assert f"```python\n# {name}:  {command}\n{code}```" in README


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
