"""Reads YAML that somebody else may have made: without aliases, within a depth and a number of nodes."""

from __future__ import annotations

import datetime
from typing import Any

import yaml

MOST_NODES, MOST_DEPTH, MOST_SCALAR = 20_000, 50, 20_000


class _Loader(yaml.SafeLoader):
    """Is yaml's safe loader with bounds; an alias would make a short text a large value."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Composes the next node. Raises ValueError beyond a bound."""
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias (*name), which no configuration of Relax has")
        self._nodes += 1
        self._depth += 1
        if self._nodes > MOST_NODES or self._depth > MOST_DEPTH:
            raise ValueError(f"it has more than {MOST_NODES} nodes, or some deeper than {MOST_DEPTH}")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MOST_SCALAR:
            node.tag = "tag:yaml.org,2002:str"  # no number or time is that long
        self._depth -= 1
        return node


def decode_yaml(text: str) -> dict[str, Any]:
    """Returns the mapping that a YAML text is, with text as keys and values of JSON. Raises ValueError."""
    loader = _Loader(text)
    try:
        found = loader.get_single_data()
    except (yaml.YAMLError, RecursionError, LookupError, TypeError, ArithmeticError) as error:
        raise ValueError(f"it is no YAML that can be read: {error}") from error
    finally:
        loader.dispose()
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("it is no mapping")
    return {str(key): _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if isinstance(value, bytes | datetime.date):
        return str(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return value
