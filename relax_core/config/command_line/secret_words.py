"""Takes secrets out of the words of a command line before anything else reads them, and out of `ps`."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_core.config.command_line.override_words import PLAIN, quoted, quoted_word
from relax_core.config.errors import ConfigError
from relax_core.config.redaction import REDACTED, has_withheld, is_reference, is_secret_place, redacted, withhold

_NAMES = re.compile(r"[.\[\]@:/]+")  # what separates the names of a key
_MAY_HOLD = re.compile(r"env|header|cookie|token|secret|passw|passphrase|credential|auth|key", re.IGNORECASE)
_ROOT_NAME = re.compile(r"\$\{([A-Za-z_]\w*)[.\[}]")  # of a key that a text names
_FIX = "Give it in quotes, or by an environment variable: {key}='${{oc.env:NAME}}', where NAME is the variable's name"


def without_secrets(words: Sequence[str]) -> list[str]:
    """Returns the words with a reference in place of each secret, which this process keeps (`withhold`).

    So neither Hydra, nor a file of the run, nor an error message gets the secret of a word. A value by reference, such
    as ``agent.env.TOKEN=${oc.env:TOKEN}``, stays, and so do the references of an earlier call. Raises `ConfigError` for
    a secret that cannot be read.
    """
    return [_without_secrets(word, words) for word in words]


def _without_secrets(word: str, words: Sequence[str]) -> str:
    key, equals, value = word.partition("=")
    if not equals or key.startswith("-") or not (_MAY_HOLD.search(word) or "://" in value):
        return word
    path = tuple(name for name in _NAMES.split(key.lstrip("+~")) if name)
    values = _parsed(word, words)
    if values is None:  # Hydra refuses the word, or it is a sweep over numbers
        if is_secret_place(path) or redacted(value, path) != value or ("{" in value and _MAY_HOLD.search(value)):
            name = f" One variable: {key}.NAME=VALUE." if key in ("agent.env", "launcher.env") else ""
            raise ConfigError([f"{key}={REDACTED} cannot be read. {_FIX.format(key=key)}.{name}"])
        return word
    if is_secret_place(path) and len(values) == 1 and isinstance(values[0], bool | int | float):
        values = [value]  # a variable is text: 1e5 stays as it was typed
    written = ",".join(_written(one, path) for one in values)
    return f"{key}={written}" if has_withheld(written) else word


def _parsed(word: str, words: Sequence[str]) -> list[Any] | None:
    """Returns the values of an override, several for a sweep; None if Hydra cannot read it as such."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides([quoted_word(word, several=False, words=words)])[0]
    except HydraException:
        return None
    value = parsed._value
    if isinstance(value, ChoiceSweep):
        return [parsed._convert_value(one) for one in value.list]
    return None if parsed.is_sweep_override() else [parsed.value()]


def _written(value: Any, path: tuple[str, ...]) -> str:
    """Returns a value in Hydra's grammar, with a reference in place of each secret."""
    if isinstance(value, Mapping):
        items = (f"{_text(str(name))}:{_written(one, (*path, str(name)))}" for name, one in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return f"[{','.join(_written(one, (*path, '-')) for one in value)}]"
    if value is None:
        return "null"
    if is_reference(value):
        return str(value)
    if redacted(value, path) != value:
        return _withheld(value)
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else repr(value)


def _withheld(value: Any) -> str:
    """Returns the reference to a secret, whose variables (``${oc.env:NAME,default}`` in a text) are resolved first.

    A text that names a key of the configuration stays, because only the whole configuration can resolve it. Any other
    ``${…}`` is a part of the secret.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError

    if not isinstance(value, str) or "${" not in value:
        return withhold(value)
    try:
        return withhold(OmegaConf.create({"value": value})["value"])
    except InterpolationKeyError:
        from relax_core.config.schema import RelaxConfig

        roots = {field.name for field in dataclasses.fields(RelaxConfig)}
        return _text(value) if roots & set(_ROOT_NAME.findall(value)) else withhold(value)


def _text(text: str) -> str:
    return text if PLAIN.fullmatch(text) else quoted(text)


def hide_arguments(words: Sequence[str], shown_words: Sequence[str]) -> None:
    """Overwrites this process's own arguments in `ps` where ``shown_words`` have no secret and ``words`` have.

    Linux shows the memory in which the arguments came, to every user. A user can still see them in the moment before,
    so a secret is better given by an environment variable.
    """
    if list(words) == list(shown_words):
        return
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    arguments = ctypes.string_at(start, end - start)
    for word, instead in zip(words, shown_words, strict=True):
        old = os.fsencode(word)
        if instead != word:
            key = old.partition(b"=")[0] + b"="
            arguments = arguments.replace(b"\0" + old + b"\0", b"\0" + key + b"*" * (len(old) - len(key)) + b"\0")
    ctypes.memmove(start, arguments, end - start)
