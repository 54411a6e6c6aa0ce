"""Redacts secrets: finds secrets by their keys in the configuration, and removes them from output and files.

Secret values are: all values in a mapping or list of environment variables or headers, all values of keys such as
``api_key``, and passwords and parameters such as ``?token=`` in addresses. This module imports no other module of
Relax, because errors and the tracker process use it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]

REDACTED = "<redacted>"
_SCHEME = r"(?<=://)"
USER_INFO = re.compile(rf"{_SCHEME}[^/@\s]+(?=@)")  # user and password of an address
_PARAMETER = re.compile(
    r"([?&#;][^=&#;\s/]*(?:token|key|secret|passw|sig|auth|credential)[^=&#;\s/]*=)[^&#;\s\"']+", re.IGNORECASE
)
_VARIABLES = r"envs?|environ|environments?|env[_-]?(?:vars?|set|variables)|headers?|cookies?"
_HOLDS_SECRETS = re.compile(_VARIABLES, re.IGNORECASE)
_MAY_HOLD_SECRETS = re.compile(rf".*[_-](?:{_VARIABLES})", re.IGNORECASE)  # only if it is a mapping or a list
_SECRET_KEY = re.compile(
    r"(?:^|_|-)(?:token|secret|passwd|password|passphrase|credentials?|authorization|(?:api|access|private)[_-]?key)$",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"token$", re.IGNORECASE)  # a number under such a key is an id or a count
_ASSIGNED = re.compile(r"([A-Za-z_]\w*=)")
_OF_VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
_SHORTEST = 6  # minimum length of a secret that is also removed from sentences; shorter texts may be common words


class FromVariable(str):
    """Holds the value of an environment variable that the configuration refers to as ``${oc.env:NAME}``.

    The run's files contain the variable's name and never the value.
    """

    variable: str = ""

    @property
    def reference(self) -> str:
        """Returns the interpolation that refers to this variable."""
        return f"${{oc.env:{self.variable}}}"


def packed_text(value: Any) -> str:
    """Returns the text of a `FromVariable` for msgspec, which cannot pack subclasses of str."""
    if isinstance(value, FromVariable):
        return str(value)
    raise NotImplementedError(type(value))


def variable_of(text: Any) -> str | None:
    """Returns NAME if the whole text is ``${oc.env:NAME}``, otherwise None."""
    found = _OF_VARIABLE.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else found[1]


def is_secret_place(path: Path, *, holds: bool = False) -> bool:
    """Returns whether all values at a configuration path are secret.

    ``path`` has the names from the root; the first name is a section, such as ``env``. ``holds`` is True if the value
    is a mapping or a list.
    """
    inside = [name for place, name in enumerate(path) if place or name not in ("env", "environment")]
    if any(_HOLDS_SECRETS.fullmatch(name) for name in inside):
        return True
    holders = inside if holds else inside[:-1]
    return any(_MAY_HOLD_SECRETS.fullmatch(name) for name in holders)


def redacted(value: Any, path: Path = ()) -> Any:
    """Returns a value of the configuration with `REDACTED` in place of secrets; names of variables are kept.

    A `FromVariable` is replaced by its reference.
    """
    if isinstance(value, Mapping):
        return {name: redacted(inner, (*path, str(name))) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        holder = is_secret_place(path, holds=True)
        return [
            _assigned(element) if holder and isinstance(element, str) else redacted(element, (*path, "-"))
            for element in value
        ]
    if value is None or value == "":
        return value
    if is_secret_place(path) or _is_secret_key(path, value):
        return value.reference if isinstance(value, FromVariable) else REDACTED
    if isinstance(value, str) and "://" in value:
        return without_address_secrets(value)
    return value


def is_secret_name(name: str) -> bool:
    """Returns whether a key's name marks the key's value as secret."""
    return _SECRET_KEY.search(name) is not None


def without_address_secrets(text: str) -> str:
    """Returns a text without passwords and secret parameters in addresses."""
    return _PARAMETER.sub(rf"\g<1>{REDACTED}", USER_INFO.sub(REDACTED, text))


def _is_secret_key(path: Path, value: Any) -> bool:
    names = [name for name in path if name != "-"]  # list items have the key of the list
    if not names or not _SECRET_KEY.search(names[-1]):
        return False
    return isinstance(value, str) or not _COUNTED.search(names[-1])


def _assigned(word: str) -> str:
    """Returns ``NAME=<redacted>`` for ``NAME=value``."""
    name = _ASSIGNED.match(word)
    return f"{name[1] if name else ''}{REDACTED}"


# -- secrets of the command line --------------------------------------------------------------------------------------
# Only this list stores secrets of the command line. The command-line arguments that other code gets contain references
# to the secrets, so libraries and messages never see a secret.
_RESOLVER = "redacted"
_withheld: list[Any] = []
_REFERENCE = re.compile(rf"\$\{{{_RESOLVER}:\d+\}}")


def withhold(value: Any) -> str:
    """Stores a secret in this process, and returns an interpolation that refers to the secret."""
    from omegaconf import OmegaConf  # the tracker process does not import omegaconf

    if not OmegaConf.has_resolver(_RESOLVER):
        OmegaConf.register_new_resolver(_RESOLVER, lambda number: _withheld[int(number)])
    _withheld.append(value)
    return f"${{{_RESOLVER}:{len(_withheld) - 1}}}"


def has_withheld(text: str) -> bool:
    """Returns whether a text contains a reference to a secret of the command line."""
    return _REFERENCE.search(text) is not None


def is_reference(value: Any) -> bool:
    """Returns whether the whole value is a reference to a variable or to a secret of the command line."""
    return variable_of(value) is not None or (isinstance(value, str) and _REFERENCE.fullmatch(value) is not None)


def shown(text: str) -> str:
    """Returns the text for output and files: `REDACTED` replaces each secret of the command line."""
    return without_values(_REFERENCE.sub(REDACTED, text), [secret for secret in _withheld if isinstance(secret, str)])


def without_values(text: str, secrets: Iterable[str]) -> str:
    """Returns a text without the secrets of at least `_SHORTEST` characters; shorter secrets may be common words."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, REDACTED)
    return text


# -- references that are not resolved ---------------------------------------------------------------------------------
def references(values: Any, path: Path = ()) -> dict[Path, str]:
    """Maps the path of each secret value ``${oc.env:NAME}`` to the variable; ``values`` are not resolved yet."""
    if isinstance(values, Mapping):
        items = [(str(name), value) for name, value in values.items()]
    elif isinstance(values, list):
        items = [(str(number), value) for number, value in enumerate(values)]
    else:
        variable = variable_of(values)
        secret = variable is not None and (is_secret_place(path) or _is_secret_key(path, ""))
        return {path: variable} if variable is not None and secret else {}
    return {place: reference for name, below in items for place, reference in references(below, (*path, name)).items()}


def with_variable(value: Any, path: Path, variable: str) -> Any:
    """Returns the typed configuration with a `FromVariable` at ``path``."""
    if not path:
        if not isinstance(value, str):
            return value
        named = FromVariable(value)
        named.variable = variable
        return named
    name, *rest = path
    below = tuple(rest)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: with_variable(getattr(value, name), below, variable)})
    if isinstance(value, Mapping) and name in value:
        return {**value, name: with_variable(value[name], below, variable)}
    if isinstance(value, list):
        place = int(name)
        return [*value[:place], with_variable(value[place], below, variable), *value[place + 1 :]]
    return value


# -- plain values of files --------------------------------------------------------------------------------------------
def as_text(values: Any, path: Path = ()) -> Any:
    """Returns the values for a run's file with escaped texts; references at secret paths are not escaped.

    A run's file contains plain values, so ``${`` in a text is not an interpolation.
    """
    if isinstance(values, Mapping):
        return {name: as_text(value, (*path, str(name))) for name, value in values.items()}
    if isinstance(values, list):
        return [as_text(value, (*path, str(number))) for number, value in enumerate(values)]
    return values if references(values, path) else escaped(values)


def escaped(value: Any) -> Any:
    """Escapes ``${`` in the texts of a value, because OmegaConf would resolve it."""
    if isinstance(value, Mapping):
        return {name: escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped(element) for element in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)


def secret_leaves(values: Any, path: Sequence[str] = ()) -> list[str]:
    """Returns the dotted keys of all redacted values in ``values``."""
    if isinstance(values, Mapping):
        return [key for name, value in values.items() for key in secret_leaves(value, (*path, str(name)))]
    return [".".join(path)] if REDACTED in str(values) else []
