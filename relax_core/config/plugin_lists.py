"""Plug-ins that a key names in a list, or in a mapping from each name to its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_core.registry import is_file_plugin


def plugins_of(given: Any, *, key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns name or path, and configuration, of each plug-in that ``given`` names; None names none.

    Raises ValueError (key, value, fix) for what is neither a list of names nor a mapping.
    """
    if given is None:
        return []
    pairs = [(name, None) for name in given] if isinstance(given, list) else given
    pairs = list(pairs.items()) if isinstance(pairs, Mapping) else pairs
    if not isinstance(pairs, list):
        raise ValueError(f"{key}={given}: {_WANTED}")
    for name, values in pairs:
        if not isinstance(name, str) or not name or not (values is None or isinstance(values, Mapping)):
            raise ValueError(f"{key}: {name}={values}: {_WANTED}")
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{key}: {twice} is named twice. Name it once.")
    return [(name, values or {}) for name, values in pairs]


def with_absolute_paths(given: Any) -> Any:
    """Returns the same list or mapping with the paths of files absolute: services have working folders of their own."""
    if isinstance(given, list):
        return [_absolute(name) for name in given]
    return {_absolute(name): values for name, values in given.items()} if isinstance(given, Mapping) else given


def _absolute(name: Any) -> Any:
    if isinstance(name, str) and is_file_plugin(name):
        return str(Path(name).expanduser().absolute())
    return name


_WANTED = "Give a list, [NAME, /path/my_file.py], or a mapping, {/path/my_file.py: {key: value}}."
