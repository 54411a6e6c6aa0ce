"""Finds the lines of the source that read a key of the configuration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from relax_core.config.schema_keys import section_types
from relax_core.registry import KINDS

_ROOT = Path(__file__).resolve().parents[2]
_TOPS = ("relax_core", "launchers", "algorithms", "rewards", "envs", "data_sources")
_CHECKED_IN = "relax_core/config/"  # its lines count only if no other folder reads the key


def readers(key: str) -> dict[str, list[int]]:
    """Maps each file to the lines that read the key as an attribute, or that check it if no line reads it.

    A section is followed through assignments such as ``settings = config.run``, and through parameters of its type.
    """
    holder, _, leaf = key.rpartition(".")
    holder = holder.rpartition(".")[2] or "config"
    lines = {str(file.relative_to(_ROOT)): _reads_in(file, holder=holder, leaf=leaf) for file in _sources()}
    found = {file: numbers for file, numbers in lines.items() if numbers}
    return {file: numbers for file, numbers in found.items() if not file.startswith(_CHECKED_IN)} or found


def _sources() -> Iterator[Path]:
    for top in _TOPS:
        yield from sorted((_ROOT / top).rglob("*.py"))


def _reads_in(file: Path, *, holder: str, leaf: str) -> list[int]:
    text = file.read_text(encoding="utf-8")
    if f".{leaf}" not in text or (holder not in text and holder not in KINDS):
        return []
    tree = ast.parse(text)
    names = {holder, *_names_of(tree, holder)}
    return sorted(
        {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr == leaf and _last(node.value) in names
        }
    )


def _names_of(tree: ast.Module, holder: str) -> Iterator[str]:
    """Yields the names that a module gives to the section."""
    if holder in KINDS:
        yield "config"
    section = section_types()[holder].__name__ if holder in section_types() else None
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from _assigned(node, holder)
        elif isinstance(node, ast.arg) and node.annotation is not None and _last(node.annotation) == section:
            yield node.arg


def _assigned(node: ast.Assign, holder: str) -> Iterator[str]:
    """Yields ``a`` for ``a = x.holder`` and for ``a, b = x.holder, y``."""
    (target, *_) = node.targets
    pairs = [(target, node.value)]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = list(zip(target.elts, node.value.elts, strict=False))
    for name, value in pairs:
        if isinstance(value, ast.Attribute) and value.attr == holder and (last := _last(name)):
            yield last


def _last(node: ast.AST) -> str | None:
    """Returns the last name of an expression such as ``self._settings`` or ``config.run``, or None."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
