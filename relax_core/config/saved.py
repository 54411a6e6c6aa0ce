"""Writes a configuration as YAML for the run's folder, without secrets."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Any

import yaml

from relax_core.config.redaction import FromVariable, redacted

if TYPE_CHECKING:  # the process of the metrics takes secrets out of texts, and needs no schema
    from relax_core.config.schema import RelaxConfig


def to_yaml(config: RelaxConfig) -> str:
    """Returns YAML with the keys of conf/, without secrets (relax_core/config/redaction.py)."""
    text: str = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    return text


def to_whole_yaml(config: RelaxConfig) -> str:
    """Returns YAML with its secrets, for a file that only this user can read, and for `config_from_yaml`."""
    text: str = yaml.safe_dump(plain(config, redact=False), sort_keys=False, allow_unicode=True)
    return text


def plain(value: Any, *, redact: bool = True) -> Any:
    """Returns the configuration as dicts, lists and scalars, with enums by name.

    With ``redact``, secrets are removed.
    """
    values = _plain(value, redact=redact)
    return redacted(values) if redact else values


def _plain(value: Any, *, redact: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), redact=redact) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(item, redact=redact) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, redact=redact) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, FromVariable) and redact:
        return value
    return str(value) if isinstance(value, str) else value
