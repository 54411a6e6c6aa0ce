"""Marks the saved configurations of this user's runs, and finds in others what runs a program or contacts a server.

A mark is a keyed hash of the file under a key of this user (`key_file`, mode 0600), so a copy of an own run keeps
it, and a folder of somebody else does not get it by being unpacked here.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from relax_core.config.redaction import variable_of
from relax_core.contracts.host.private_folder import private_folder, user_cache

_MARK = "# relax: a run of this user: "
_UNMARKED = "# relax: not marked as a run of this user, because the key cannot be kept: "
_KEY_BYTES = 32
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Keys whose values start a program, name a file with a secret, or open a port.
_POWERFUL = re.compile(
    r"command|python|setup|sbatch|srun|flags|working_dir|image|address|urls?|uri|endpoint|.*_file|token_env|.*_python"
)
_OPENS = re.compile(r"host|allowed_hosts")


def key_file() -> Path:
    """Returns ``$XDG_CACHE_HOME/relax/own_runs.key``, by default below ``~/.cache``."""
    return user_cache("own_runs.key")


def marked(text: str) -> str:
    """Returns the text of a configuration file with this user's mark as its first line.

    Where the user's cache folder cannot be written, the line says so, and `relax rerun` takes the run for a foreign
    one.
    """
    try:
        return f"{_MARK}{_digest(text, _key(make=True))}\n{text}"
    except OSError as error:
        return f"{_UNMARKED}{error.strerror}\n{text}"


def is_own(text: str) -> bool:
    """Returns whether the text has a mark of this user, and was not changed since."""
    first, _, rest = text.partition("\n")
    if not first.startswith(_MARK):
        return False
    try:
        key = _key(make=False)
    except OSError:
        return False
    return hmac.compare_digest(first.removeprefix(_MARK).encode(), _digest(rest, key).encode())


def powers(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields each key of a saved configuration, with its value, that runs a program, reads a secret or asks a server.

    These are plug-in files, commands, files of keys, environment variables, addresses beyond this machine, and code of
    a model without a sandbox.
    """
    if isinstance(values, Mapping):
        for name, one in values.items():
            if str(name).endswith(".py"):  # a plug-in with its settings
                yield ".".join((*path, "")) + str(name), str(name)
            yield from powers(one, (*path, str(name)))
        return
    if isinstance(values, list):
        for one in values:
            yield from powers(one, path)
        return
    if not isinstance(values, str | bool) or values in ("", False) or not path:
        return
    keyed = any(_POWERFUL.fullmatch(name) for name in path[1:])
    opens = bool(_OPENS.fullmatch(path[-1])) and values not in _LOOPBACK
    unguarded = path[-1] == "sandbox" and values == "none"
    remote = path[-1] == "trust_remote_code"
    text = values if isinstance(values, str) else ""
    if keyed or opens or unguarded or remote or text.endswith(".py") or variable_of(text) or _is_elsewhere(text):
        yield ".".join(path), str(values)


def _is_elsewhere(text: str) -> bool:
    """Returns whether a text is an address that is not on this machine."""
    if "://" not in text:
        return False
    try:
        return urlsplit(text).hostname not in _LOOPBACK
    except ValueError:
        return True


def _digest(text: str, key: bytes) -> str:
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Returns this user's key. Raises OSError if there is none, or if others may read or write it."""
    file = key_file()
    if make and not file.exists():
        private_folder(file.parent, key="XDG_CACHE_HOME")
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # another run has just made it
            os.link(partial, file)
        partial.unlink()
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        about = os.fstat(opened.fileno())
        private = about.st_uid == os.getuid() and not about.st_mode & 0o077
        if not (stat.S_ISREG(about.st_mode) and private):
            raise PermissionError(0, f"{file} is not a file that this user alone may read")
        key = opened.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise PermissionError(0, f"{file} is not a key of {_KEY_BYTES} bytes; remove it")
    return key
