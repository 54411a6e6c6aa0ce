"""Tests conventions of the repository: folders, names, replaced words, links and docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.docstrings import has_verb, public_docstrings

ROOT = Path(__file__).resolve().parents[1]
CODE = ("relax_core", "algorithms", "rewards", "envs", "data_sources", "launchers", "hydra_plugins")

# Pattern of replaced words → the field's terms. No file may match the pattern.
REPLACED = {
    "gang": "worker group",
    "incarnation": "attempt",
    "turnover": "weight-update handler",
    "culprit": "blocker, wait graph",
    "leftover": "stale run",
    "laggard": "straggler",
    "noted_": "traced_",
    "knob": "config, setting or hyperparameter",
    "likeliest": "top-k",
    "made_by": "provenance",
    "retarget": "patch_cuda_calls",
    "row_cut": "context parallelism",
    "steady_files": "synced stream",
    "stored_pieces": "checkpoint shards",
    "adopt_orphans": "become_subreaper",
    "only_run": "run lock",
    "owned_folder": "lock file",
    "CatchUp": "weight reconciler",
    "burst": "prompt batch",
    "RoleFront": "Serve deployment",
    "patience_s": "timeout_s, retry policy",
}
# Files that may contain replaced words: this list, the glossary and the changelog.
WORDS_ALLOWED = {
    "tests/test_conventions.py",
    "docs/glossary.md",
    "CHANGELOG.md",
}


@cache
def files(*suffixes: str) -> tuple[Path, ...]:
    """Returns the files with one of ``suffixes`` that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = (ROOT / name for name in listed)
    return tuple(file for file in found if file.suffix in suffixes and file.is_file())


def packages() -> dict[str, Path]:
    """Returns the ``__init__.py`` of each package of the code by the package's path from the root."""
    return {
        str(file.parent.relative_to(ROOT)): file
        for file in files(".py")
        if file.name == "__init__.py" and file.relative_to(ROOT).parts[0] in CODE
    }


def table(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table below ``heading`` of a page in docs/, without the head."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    below = f"\n{text}".split(f"\n{heading}\n", 1)[1].splitlines()
    start = next(index for index, line in enumerate(below) if line.startswith("|"))
    rows = []
    for line in below[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[2:]


def test_every_folder_has_a_docstring_with_purpose_and_first_file() -> None:
    for folder, file in packages().items():
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        assert len(text.splitlines()) >= 2, f"{folder}: two lines: the folder's purpose, and the file to read first"
        start = re.search(r"`([\w/]+\.py)`", text)
        assert start, f"{folder}: name the file to start with, such as `module.py`"
        assert (file.parent / start[1]).is_file(), f"{folder}: {start[1]} is not there"


def test_a_base_name_has_one_meaning() -> None:
    """A text search cannot distinguish two modules of relax_core with the same base name."""
    places: dict[str, list[str]] = {}
    for file in files(".py"):
        if file.relative_to(ROOT).parts[0] == "relax_core" and not file.name.startswith("__"):
            places.setdefault(file.name, []).append(str(file.parent.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("word", REPLACED)
def test_a_replaced_word_is_gone(word: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z]){word}(?![a-rt-z])", re.IGNORECASE if word.islower() else 0)
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file in files(".py", ".md", ".yaml", ".yml", ".toml")
        if str(file.relative_to(ROOT)) not in WORDS_ALLOWED
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"say {REPLACED[word]}:\n" + "\n".join(found)


def test_a_search_for_a_term_of_the_field_finds_a_name() -> None:
    rows = table("where_is.md", "# Where is what")
    assert len(rows) >= 20
    for word, cell, *_ in rows:
        paths = re.findall(r"`([\w./]+)`", cell)
        assert paths, f"{word}: no path"
        for path in paths:
            assert (ROOT / path).exists(), f"{word}: {path} is not there"


def test_links_and_paths_in_pages_lead_somewhere() -> None:
    for page in files(".md"):
        if page.parent.name == "plugins":
            continue  # the paths on this page are examples of the reader's files
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            made = (
                (page.parent / target).resolve().is_relative_to(ROOT / "docs" / "reference")
            )  # `make docs` checks these links
            if result := re.fullmatch(r"results/(\w+)\.md", target):
                assert result[1] == "index" or (ROOT / f"benchmarks/results/{result[1]}.json").exists(), target
            elif not made and "://" not in target and not target.startswith("mailto:"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target} is not there"
        for path in re.findall(
            r"`((?:relax_core|algorithms|rewards|envs|launchers|tests|docs|conf|examples|benchmarks)/[\w./]+)`", text
        ):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)}: {path} is not there"


def test_docstrings_name_files_that_exist() -> None:
    for file in files(".py"):
        if file.relative_to(ROOT).parts[0] not in (*CODE, "tests", "benchmarks", "examples"):
            continue
        if file.name == "test_workers.py":
            continue  # the test ids on this page are examples
        for path in re.findall(
            r"\b((?:relax_core|launchers|tests|docs|benchmarks)/[\w/]+\.(?:py|md|yaml))\b",
            file.read_text(encoding="utf-8"),
        ):
            assert (ROOT / path).exists(), f"{file.relative_to(ROOT)}: {path} is not there"


def test_public_docstrings_begin_with_a_sentence() -> None:
    assert [f"{name}: {text}" for name, text in public_docstrings() if not has_verb(text)] == []
