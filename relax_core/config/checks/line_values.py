"""Refuses values that would begin a new line, or would show as another text, in files and outputs made of lines.

Such files are a batch script with its options, logs, the gateway's file, tables on a terminal. So the check holds for
all keys, but for texts that a model, a plug-in or a program of the user gets as they are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from relax_core.config.redaction import secret_leaves
from relax_core.config.saved import plain
from relax_core.config.schema import RelaxConfig

_TEXTS = (
    *("rollout.stop", "data.chat_template_kwargs", "data.config", "agent.env", "agent.command", "launcher.env"),
    "tracker.sinks",
)
_PLUGINS = ("algo", "reward", "env")  # of their settings, only the name is a name of files and tables
_BEGINS_LINE = ("Cc", "Zl", "Zp", "Cs")
_TURNS_TEXT = "\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def line_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields each value, or name in a mapping, that has a control character, and each secret that is only a mark."""
    values = plain(config, redact=False)
    yield from _below(values, "")
    for key in secret_leaves(values):
        yield f"{key} is a secret of a saved configuration, which does not hold it. Add {key}=..."
    for name, value in config.agent.env.items():
        if not isinstance(value, str):  # OmegaConf lets a mapping pass
            yield f"agent.env.{name}: expected text."
        elif not re.fullmatch(r"[^=\0\n\r]+", name) or "\0" in value:
            yield f"agent.env has the variable {name!r}: no process can have it. Drop '=' and control characters."


def _below(values: Any, key: str) -> Iterator[str]:
    if isinstance(values, Mapping):
        for name, one in values.items():
            below = f"{key}.{name}" if key else str(name)
            if below in _TEXTS or (key in _PLUGINS and name != "name"):
                continue
            if odd := _odd(str(name)):
                yield f"{key or 'the configuration'} has the name {str(name)!r} with the character {odd}. Drop it."
            yield from _below(one, below)
    elif isinstance(values, list):
        for one in values:
            yield from _below(one, key)
    elif isinstance(values, str) and (odd := _odd(values)):
        yield f"{key}={values!r} has the character {odd}, which would begin a line or turn a text. Drop it."


def _odd(text: str) -> str:
    """Returns the code of the first control or direction character of a text, or ""."""
    if text.isascii() and text.isprintable():
        return ""
    found = next((one for one in text if unicodedata.category(one) in _BEGINS_LINE or one in _TURNS_TEXT), "")
    return f"U+{ord(found):04X}" if found else ""
