"""What docs/datum.md says of a sample's forms and files is what one real step shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FORMS = 11
MOST_FILES = 31  # with reply_checks.py, which checks an engine's reply where it enters
LONG_S = 300.0


def test_the_forms_and_files_of_a_sample_are_those_of_the_page() -> None:
    traced = subprocess.run(
        [sys.executable, str(ROOT / "tests/trace_forms.py")], capture_output=True, text=True, timeout=LONG_S
    )
    assert traced.returncode == 0, traced.stderr
    met = json.loads(traced.stdout.splitlines()[-1])
    page = (ROOT / "docs/datum.md").read_text(encoding="utf-8")
    section = page.split("## The forms of a sample")[1].split("\n## ")[0]
    told = re.findall(r"^\| \d+ \| `(\w+)` \|", section, flags=re.MULTILINE)
    assert sorted(told) == met["forms"] and len(told) <= MOST_FORMS
    files = re.search(r"(\d+) files meet", section)
    assert files is not None and int(files[1]) == len(met["files"]) <= MOST_FILES, met["files"]
