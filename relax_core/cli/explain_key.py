"""`relax explain KEY` prints a key's meaning, value, type, range, origin and class, or all keys of a section."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from relax_core.config.compose import choices_of, compose, typed_config
from relax_core.config.errors import ConfigError
from relax_core.config.help import DocumentedKey, keys_of_option, keys_of_plugin, keys_of_root
from relax_core.config.options import conf_folder, groups
from relax_core.config.ranges import OF_LAUNCHER, OPTIONAL, RANGES
from relax_core.config.redaction import shown
from relax_core.config.saved_config import plain
from relax_core.config.schema import LAUNCHERS, RelaxConfig
from relax_core.config.schema_keys import known_keys, section_types, unknown_key
from relax_core.registry import KINDS, find

USAGE = 2
_ROOT = Path(__file__).resolve().parents[2]
_HELP = """\
relax explain KEY [group=option ...] [key=value ...]

  relax explain optimizer.lr            value, type, range, where it is set, its settings class
  relax explain algo algo=ppo           all keys of a section, here with PPO chosen
"""
_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
}


def explain_command(words: Sequence[str]) -> int:
    """Prints the explanation. Returns 0, or 2 for an unknown key or a configuration that cannot be composed."""
    if not words or words[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if words else USAGE
    if len(words) > 1 and f"{words[0]}.{words[1]}" in known_keys():
        print(f"relax: {words[0]} {words[1]}: write the key in one word: {words[0]}.{words[1]}", file=sys.stderr)
        return USAGE
    key, overrides = words[0].partition("=")[0], list(words[1:])
    try:
        for line in _lines(key, overrides):
            print(shown(line))
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return USAGE
    return 0


def _lines(key: str, overrides: Sequence[str]) -> Iterator[str]:
    """Yields the lines to print. Raises ConfigError for an unknown key."""
    documents = _documents(choices_of(overrides))
    config = typed_config(compose(overrides))
    values = plain(config)
    found, known = _look_up(values, key)
    if not known:
        raise ConfigError([unknown_key(key)])
    if isinstance(found, dict) and key in (*section_types(), *KINDS):
        yield from _section(key, found, documents)
        return
    said = [document for document in documents if document.key == key]
    comments = [document.comment for document in said if document.comment]
    yield f"{key}={_as_typed(found)}"
    yield f"  {'meaning':<8} {comments[0] if comments else 'see the section of the key'}"
    holder, leaf = _holder(config, key)
    kind = typing.get_type_hints(type(holder))[leaf] if dataclasses.is_dataclass(holder) else Any
    yield f"  {'type':<8} {_type_text(kind)}"
    yield f"  {'range':<8} {_range_text(key, config)}"
    yield f"  {'set in':<8} {_set_in(key, overrides, said)}"
    yield f"  {'class':<8} {_declared_in(holder, leaf)}"


def _documents(choices: dict[str, str]) -> list[DocumentedKey]:
    """Returns the documented keys of the chosen options. An option follows the options that it overrides."""
    found = keys_of_root()
    for group in sorted(choices, key=lambda group: group == "experiment"):
        file = conf_folder() / group / f"{choices[group]}.yaml"
        if file.is_file():
            for name in re.findall(r"^  - /experiment/(\w+)@_global_", file.read_text(encoding="utf-8"), re.MULTILINE):
                found += keys_of_option("experiment", conf_folder() / "experiment" / f"{name}.yaml")
            found += keys_of_option(group, file)
        elif group in KINDS:
            found += keys_of_plugin(group, choices[group])
    return found


def _look_up(values: Any, key: str) -> tuple[Any, bool]:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return None, False
        values = values[part]
    return values, True


def _section(section: str, values: dict[str, Any], documents: Sequence[DocumentedKey]) -> Iterator[str]:
    comments = {document.key: document.comment for document in documents if document.comment}
    typed = {f"{section}.{key}": f"{section}.{key}={_as_typed(value)}" for key, value in values.items()}
    width = min(44, max(map(len, typed.values())))
    for key, word in typed.items():
        yield f"  {word:<{width}}  {comments.get(key, '')}".rstrip()


def _as_typed(value: Any) -> str:
    """Returns the value in the syntax of the command line."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_typed(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _holder(config: RelaxConfig, key: str) -> tuple[Any, str]:
    """Returns the object or mapping that contains the key, and the last part of the key."""
    section, _, leaf = key.rpartition(".")
    holder: Any = config
    for part in filter(None, section.split(".")):
        holder = holder[part] if isinstance(holder, dict) else getattr(holder, part)
    return holder, leaf


def _declared_in(holder: Any, leaf: str) -> str:
    """Returns the settings class that declares a key, and the file of the class.

    Code that reads the key uses this class.
    """
    if not dataclasses.is_dataclass(holder):
        return "a mapping of the user"
    declared = next(base for base in inspect.getmro(type(holder)) if leaf in inspect.get_annotations(base))
    file = Path(inspect.getfile(declared))
    return f"{declared.__name__} in {file.relative_to(_ROOT) if file.is_relative_to(_ROOT) else file}"


def _type_text(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    if typing.get_origin(kind) in (list, dict):
        return "a list" if typing.get_origin(kind) is list else "a mapping"
    if arguments := typing.get_args(kind):
        choices = [repr(argument) if isinstance(argument, str) else _type_text(argument) for argument in arguments]
        return " or ".join(choices)
    return _TYPES.get(kind, "any value")


def _range_text(key: str, config: RelaxConfig) -> str:
    allowed = (RANGES | OPTIONAL | OF_LAUNCHER[config.launcher.name.value]).get(key)
    if allowed is not None:
        return (allowed.describe() or "any") + (f" ({allowed.why})" if allowed.why else "")
    kind = key.split(".")[0]
    if kind in KINDS:
        name = getattr(config, kind).name
        return f"the values that check() of {kind}={name} accepts" if hasattr(find(kind, name), "check") else "any"
    return "any value of its type"


def _set_in(key: str, overrides: Sequence[str], said: Sequence[DocumentedKey]) -> str:
    typed = [word for word in overrides if re.fullmatch(rf"\+?{re.escape(key)}=.*", word, re.DOTALL)]
    if typed:
        return f"the command line: {typed[-1]}"
    if said:
        return said[-1].place()
    holder = "relax_core/config/schema.py"
    return f"its default in {holder}" if key.split(".")[0] in (*section_types(), *LAUNCHERS, *groups()) else holder
