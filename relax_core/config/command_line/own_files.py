"""Finds texts in the user's own YAML files that YAML reads as numbers, and lengths that exclude each other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

IsText = Callable[[str, str], bool]  # whether a key is of text, for a value of it


def own_file_problems(folder: Path, words: Sequence[str], is_text: IsText) -> Iterator[str]:
    """Yields the problems of the chosen files below a folder of --config-dir; Hydra reports a file that is no YAML."""
    for group, _, option in (word.partition("=") for word in words):
        file = folder / group / f"{option}.yaml"
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        prefix = "" if re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE) else group
        try:
            root = yaml.compose(text, Loader=get_yaml_loader())
        except yaml.YAMLError:
            continue
        scalars = dict(_scalars(root, prefix))
        where = f"in {group}/{file.name}"
        for node, key in scalars.items():
            read = yaml.load(node.value, Loader=get_yaml_loader()) if node.style is None else node.value
            if isinstance(read, bool | int | float) and str(read) != node.value and is_text(key, node.value):
                yield (
                    f"{where}, line {node.start_mark.line + 1}: {key}: {node.value} is read as {read}, and the key is "
                    f'of text. Put it in quotes: "{node.value}".'
                )
        given = {key: node.value for node, key in scalars.items() if node.value not in ("null", "~", "")}
        if {"run.steps", "run.epochs"} <= given.keys():
            yield f"{where}: run.steps={given['run.steps']} with run.epochs={given['run.epochs']}. Drop one of them."


def _scalars(node: Any, key: str) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """Yields each scalar of a file with its dotted key; the items of a list have the key of the list with ``.0``."""
    if isinstance(node, yaml.MappingNode):
        for name, below in node.value:
            yield from _scalars(below, f"{key}.{name.value}" if key else str(name.value))
    elif isinstance(node, yaml.SequenceNode):
        for below in node.value:
            yield from _scalars(below, f"{key}.0")
    elif isinstance(node, yaml.ScalarNode):
        yield node, key
