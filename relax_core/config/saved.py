"""Writes a configuration as YAML for the run's folder, without secrets."""

from __future__ import annotations

import dataclasses
import re
from enum import Enum
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # the process of the metrics takes secrets out of texts, and needs no schema
    from relax_core.config.schema import RelaxConfig

REDACTED = "<redacted>"
_SECRET_KEY = re.compile(r"(?:^|_)(?:token|secret|password|api_key)$", re.IGNORECASE)
USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # user and password of an address


def to_yaml(config: RelaxConfig) -> str:
    """Returns YAML with the keys of conf/. Values of secret keys, and passwords in addresses, are redacted."""
    text: str = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    return text


def to_whole_yaml(config: RelaxConfig) -> str:
    """Returns YAML with its secrets, for a file that only this user can read, and for `config_from_yaml`."""
    text: str = yaml.safe_dump(plain(config, redact=False), sort_keys=False, allow_unicode=True)
    return text


def plain(value: Any, *, key: str = "", redact: bool = True) -> Any:
    """Returns the configuration as dicts, lists and scalars, with enums by name.

    With ``redact``, secrets are removed.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name), key=field.name, redact=redact)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(name): plain(item, key=str(name), redact=redact) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, key=key, redact=redact) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str) and redact:
        return REDACTED if _SECRET_KEY.search(key) and value else USER_INFO.sub(REDACTED, value)
    return str(value) if isinstance(value, str) else value
