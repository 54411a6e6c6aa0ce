"""Reruns a saved run (`relax rerun RUN [key=value …]`), and checks whether its configuration can be trusted.

The configuration file of a user's run has a mark: a keyed hash of the file with the user's key (`key_file`, mode 0600).
A copy of the run keeps the mark. A run of another user has no valid mark. A configuration without a valid mark is
searched for values that run programs or contact servers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import CommandLine, hydra_arguments
from relax_core.config.options import groups
from relax_core.config.redaction import as_text, secret_leaves, variable_of
from relax_core.config.schema import RelaxConfig
from relax_core.config.schema_keys import REMOVED
from relax_core.contracts.host_network import LOOPBACK
from relax_core.contracts.private_folder import private_folder, user_cache
from relax_core.registry import KINDS, short_name

_MARK = "# relax: a run of this user: "
_UNMARKED = "# relax: not marked as a run of this user, because the key cannot be kept: "
_KEY_BYTES = 32
# Keys with values that start a program, name a file with a secret, or contact a server.
_POWERFUL = re.compile(
    r"command|python|setup|sbatch|srun|flags|image|address|urls?|uri|endpoint|.*_file|token_env|.*_python"
)
_OPENS = re.compile(r"host|allowed_hosts")


def key_file() -> Path:
    """Returns ``$XDG_CACHE_HOME/relax/own_runs.key``, by default below ``~/.cache``."""
    return user_cache("own_runs.key")


def marked(text: str) -> str:
    """Returns the text of a configuration file with this user's mark as its first line.

    If the user's cache folder is not writable, the first line reports this, and `relax rerun` does not trust the run.
    """
    try:
        return f"{_MARK}{_digest(text, _key(make=True))}\n{text}"
    except OSError as error:
        return f"{_UNMARKED}{error.strerror}\n{text}"


def is_marked_by_user(text: str) -> bool:
    """Returns whether the text has a valid mark of this user."""
    first, _, rest = text.partition("\n")
    if not first.startswith(_MARK):
        return False
    try:
        key = _key(make=False)
    except OSError:
        return False
    return hmac.compare_digest(first.removeprefix(_MARK).encode(), _digest(rest, key).encode())


def powers(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yields the key and value of each setting that runs a program, reads a secret or contacts a server.

    Such settings are plug-in files, commands, key files, environment variables, addresses of other machines, and a
    disabled sandbox for model code.
    """
    if isinstance(values, Mapping):
        for name, value in values.items():
            if str(name).endswith(".py"):  # settings of a plug-in
                yield ".".join((*path, "")) + str(name), str(name)
            yield from powers(value, (*path, str(name)))
        return
    if isinstance(values, list):
        for value in values:
            yield from powers(value, path)
        return
    if not isinstance(values, str | bool) or values in ("", False) or not path:
        return
    keyed = any(_POWERFUL.fullmatch(name) for name in path[1:])
    opens = bool(_OPENS.fullmatch(path[-1])) and values not in LOOPBACK
    unguarded = path[-1] == "sandbox" and values == "none"
    remote = path[-1] == "trust_remote_code"
    text = values if isinstance(values, str) else ""
    if keyed or opens or unguarded or remote or text.endswith(".py") or variable_of(text) or _is_elsewhere(text):
        yield ".".join(path), str(values)


def _is_elsewhere(text: str) -> bool:
    """Returns whether a text is an address of another machine."""
    if "://" not in text:
        return False
    try:
        return urlsplit(text).hostname not in LOOPBACK
    except ValueError:
        return True


def _digest(text: str, key: bytes) -> str:
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """Returns this user's key; raises OSError if the key is missing, or if other users can read or write it."""
    file = key_file()
    if make and not file.exists():
        private_folder(file.parent, key="XDG_CACHE_HOME")
        partial = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):  # another run has just created the key
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


CONFIG_FILE = "config.yaml"
OPTION = "saved_run"  # the saved run is an option of the group experiment, because Hydra composes this group last
TRUST = "--trust"
USAGE = f"relax rerun RUN [{TRUST}] [key=value ...], where RUN is a run's folder"
_OF_ITS_START = ("resume", "plan")  # and run.dir; the next start sets them


def rerun_line(args: Sequence[str]) -> CommandLine:
    """Returns the command line for Hydra; ``args`` are the run's folder, then overrides and flags.

    If the overrides choose an option of a group, the saved values of this group are dropped. Raises `ConfigError` for a
    folder without a run and for a redacted secret. Without ``--trust`` also raises it for an unmarked run that would
    run programs or contact servers.
    """
    if not args or args[0].startswith("-") or "=" in args[0].split("/")[0]:
        raise ConfigError([USAGE + "."])
    folder, overrides = Path(args[0]).expanduser(), [arg for arg in args[1:] if arg != TRUST]
    values, own_run = _read(folder)
    chosen = _chosen(overrides)
    if "experiment" in chosen:
        raise ConfigError([f"experiment={chosen['experiment']}: {folder} has one. Give single keys, or drop it."])
    _drop_what_follows(values, chosen)
    _drop_removed(values)
    typed = {arg.lstrip("+~").partition("=")[0] for arg in overrides}
    if missing := [key for key in secret_leaves(values) if not _is_typed(key, typed)]:
        file = folder / CONFIG_FILE
        raise ConfigError([f"{key} is a secret that {file} does not hold. Add {key}=..." for key in missing])
    if not own_run and TRUST not in args:
        check_powers(values, folder / CONFIG_FILE, but=typed)
    _drop_secrets(values, typed)
    _store(as_text(values))
    # A plug-in's values must not be merged with the default option's values; a launcher needs the option for its type.
    own = [f"{kind}=plugin" for kind in KINDS if kind in values]
    own += [f"launcher={values['launcher']['name']}"] if "launcher" in values else []
    return CommandLine(
        typed=("rerun", args[0], *overrides),
        hydra=tuple(hydra_arguments([*own, f"experiment={OPTION}", *overrides])),
        command=("rerun", args[0]),
    )


def check_powers(values: Mapping[str, Any], file: Path, *, but: Iterable[str] = ()) -> None:
    """Raises `ConfigError` if saved values run a program or contact a server, except keys that the user typed."""
    found = [f"{key}={value}" for key, value in powers(values) if not _is_typed(key, but)]
    if found:
        raise ConfigError(
            [
                f"{file} is not marked as a run of yours, and sets {', '.join(found)}, which may run programs, read "
                f"your secrets or contact servers. Read it, and add {TRUST} if you trust it like a program."
            ]
        )


def _is_typed(key: str, typed: Iterable[str]) -> bool:
    """Returns whether the user typed the key or a mapping that contains the key."""
    return any(key == typed_key or key.startswith(f"{typed_key}.") for typed_key in typed)


def _drop_secrets(values: Mapping[str, Any], typed: Iterable[str]) -> None:
    """Removes redacted secrets from mappings that the user typed again, because Hydra would merge the mappings."""
    for key in secret_leaves(values):
        if key not in typed:
            *holders, last = key.split(".")
            holder: Any = values
            for name in holders:
                holder = holder[name]
            del holder[last]


def _read(folder: Path) -> tuple[dict[str, Any], bool]:
    """Returns the values of a run's config.yaml, and whether the file has this user's mark."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError([f"{folder}: it has no {CONFIG_FILE}. {USAGE}."])
    try:
        text = file.read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{file}: not valid YAML: {error}"]) from error
    if not isinstance(values, dict) or "run" not in values:
        raise ConfigError([f"{file} is not the configuration of a run. {USAGE}."])
    known = {field.name for field in dataclasses.fields(RelaxConfig)}
    if odd := [str(key) for key in values if key not in known]:  # such as hydra, which has settings that name code
        raise ConfigError([f"{file}: {', '.join(odd)}: a run's configuration has no such key. Remove it."])
    return values, is_marked_by_user(text)


def _chosen(overrides: Sequence[str]) -> dict[str, str]:
    """Maps each group that the overrides choose to the chosen option; a plug-in's name is a choice, too."""
    pairs = [arg.partition("=") for arg in overrides if not arg.startswith("-")]
    chosen = {key: value for key, _, value in pairs if key in groups()}
    return chosen | {key.removesuffix(".name"): value for key, _, value in pairs if key in {f"{k}.name" for k in KINDS}}


def _drop_what_follows(values: dict[str, Any], chosen: Mapping[str, str]) -> None:
    """Removes values that the new run sets itself, and a run name that was derived from model and data."""
    if values.get("name") == f"{values['model']['name']}-{short_name(values['data']['name'])}":
        del values["name"]
    for key in (*_OF_ITS_START, *chosen):
        values.pop(key, None)
    values["run"].pop("dir", None)


def _drop_removed(values: dict[str, Any]) -> None:
    """Removes keys that Relax no longer has.

    Without this, checkpoints of old runs could not be evaluated or exported.
    """
    for key in REMOVED:
        *holders, last = key.split(".")
        holder: Any = values
        for name in holders:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder.pop(last, None)


def _store(values: Mapping[str, Any]) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="experiment", name=OPTION, node=dict(values), package="_global_")
