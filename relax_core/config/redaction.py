"""Redacts secrets: finds them by their key in the configuration, and removes them from output and files.

All values in a mapping or list of environment variables or headers are secret, and all values of keys such as
``api_key``. In addresses, passwords and parameters such as ``?token=`` are secret. The module imports nothing of Relax,
because errors and the tracker process use it.
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
_COUNTED = re.compile(r"token$", re.IGNORECASE)  # a number below such a key is an id or a count
_ASSIGNED = re.compile(r"([A-Za-z_]\w*=)")
_OF_VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
_SHORTEST = 6  # minimum characters of a secret that is also removed from sentences; shorter texts may be common words


class FromVariable(str):
    """Holds the value of an environment variable that the configuration gives as ``${oc.env:NAME}``.

    Files of the run contain the variable's name instead of the value, so no file stores the secret.
    """

    variable: str = ""

    @property
    def reference(self) -> str:
        """Returns the interpolation that gives this value."""
        return f"${{oc.env:{self.variable}}}"


def packed_text(value: Any) -> str:
    """Returns the text of a `FromVariable` for msgspec, which packs no other subclass of str."""
    if isinstance(value, FromVariable):
        return str(value)
    raise NotImplementedError(type(value))


def variable_of(text: Any) -> str | None:
    """Returns NAME if the text is ``${oc.env:NAME}`` and nothing else."""
    found = _OF_VARIABLE.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else found[1]


def is_secret_place(path: Path, *, holds: bool = False) -> bool:
    """Returns whether all values at a configuration path are secret.

    ``path`` are the names from the root; the first name is a section, such as ``env``. ``holds``: the value is a
    mapping or a list.
    """
    inside = [name for place, name in enumerate(path) if place or name not in ("env", "environment")]
    if any(_HOLDS_SECRETS.fullmatch(name) for name in inside):
        return True
    holders = inside if holds else inside[:-1]
    return any(_MAY_HOLD_SECRETS.fullmatch(name) for name in holders)


def redacted(value: Any, path: Path = ()) -> Any:
    """Returns a value of the configuration with `REDACTED` in place of its secrets. The names of variables are kept.

    A `FromVariable` becomes its reference.
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
    """Returns whether the name of a key marks its value as secret."""
    return _SECRET_KEY.search(name) is not None


def without_address_secrets(text: str) -> str:
    """Returns a text without the passwords and secret parameters of its addresses."""
    return _PARAMETER.sub(rf"\g<1>{REDACTED}", USER_INFO.sub(REDACTED, text))


def _is_secret_key(path: Path, value: Any) -> bool:
    names = [name for name in path if name != "-"]  # the items of a list have the key of the list
    if not names or not _SECRET_KEY.search(names[-1]):
        return False
    return isinstance(value, str) or not _COUNTED.search(names[-1])


def _assigned(word: str) -> str:
    """Returns ``NAME=<redacted>`` for ``NAME=value``."""
    name = _ASSIGNED.match(word)
    return f"{name[1] if name else ''}{REDACTED}"


# -- secrets of the command line --------------------------------------------------------------------------------------
# Secrets of the command line are kept only here, and the words contain references to them. So libraries that read the
# words, and messages that quote them, never have the secret.
_RESOLVER = "redacted"
_withheld: list[Any] = []
_REFERENCE = re.compile(rf"\$\{{{_RESOLVER}:\d+\}}")


def withhold(value: Any) -> str:
    """Stores a secret in this process, and returns the interpolation that refers to it."""
    from omegaconf import OmegaConf  # not imported by the tracker process

    if not OmegaConf.has_resolver(_RESOLVER):
        OmegaConf.register_new_resolver(_RESOLVER, lambda number: _withheld[int(number)])
    _withheld.append(value)
    return f"${{{_RESOLVER}:{len(_withheld) - 1}}}"


def has_withheld(text: str) -> bool:
    """Returns whether a text contains a reference to a secret of the command line."""
    return _REFERENCE.search(text) is not None


def is_reference(value: Any) -> bool:
    """Returns whether a value is a reference to a variable, or to a secret of the command line, and nothing else."""
    return variable_of(value) is not None or (isinstance(value, str) and _REFERENCE.fullmatch(value) is not None)


def shown(text: str) -> str:
    """Returns the text for output and files, with `REDACTED` in place of each secret of the command line."""
    return without_values(_REFERENCE.sub(REDACTED, text), [secret for secret in _withheld if isinstance(secret, str)])


def without_values(text: str, secrets: Iterable[str]) -> str:
    """Returns a text without the secrets of at least `_SHORTEST` characters; shorter secrets may be common words."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, REDACTED)
    return text


# -- references that are not resolved ---------------------------------------------------------------------------------
def references(values: Any, path: Path = ()) -> dict[Path, str]:
    """Returns path → variable for each secret value ``${oc.env:NAME}``; ``values`` are not resolved yet."""
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
    """Returns the values of a run's file with escaped texts, except for references at secret places.

    A file of a run contains plain values, so ``${`` in a text is no interpolation.
    """
    if isinstance(values, Mapping):
        return {name: as_text(value, (*path, str(name))) for name, value in values.items()}
    if isinstance(values, list):
        return [as_text(value, (*path, str(number))) for number, value in enumerate(values)]
    return values if references(values, path) else escaped(values)


def escaped(value: Any) -> Any:
    """Returns a value with ``${`` escaped in its texts, so that OmegaConf does not resolve them."""
    if isinstance(value, Mapping):
        return {name: escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped(element) for element in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)


def secret_leaves(values: Any, path: Sequence[str] = ()) -> list[str]:
    """Returns the dotted keys of the redacted values in ``values``."""
    if isinstance(values, Mapping):
        return [key for name, value in values.items() for key in secret_leaves(value, (*path, str(name)))]
    return [".".join(path)] if REDACTED in str(values) else []
