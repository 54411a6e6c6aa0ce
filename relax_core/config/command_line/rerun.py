"""`relax rerun RUN [key=value …]` starts another run from a run's own config.yaml, with overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from relax_core.config.command_line.override_words import CommandLine, hydra_words
from relax_core.config.errors import ConfigError
from relax_core.config.options import groups
from relax_core.config.own_runs import is_own, powers
from relax_core.config.redaction import as_text, secret_leaves
from relax_core.config.schema import RelaxConfig
from relax_core.registry import KINDS, short_name

CONFIG_FILE = "config.yaml"
OPTION = "saved_run"  # the key of the group experiment, which Hydra composes last
TRUST = "--trust"
USAGE = f"relax rerun RUN [{TRUST}] [key=value ...], where RUN is a run's folder"
_OF_ITS_START = ("resume", "plan")  # and run.dir, because the next start sets its own


def rerun_line(words: Sequence[str]) -> CommandLine:
    """Returns the command line for Hydra. ``words`` are the run's folder, then overrides and flags.

    A newly chosen group takes nothing from the saved run. Raises `ConfigError` for a folder that is no run's, for a
    secret that its config.yaml does not contain, and without ``--trust`` for a run of somebody else that would run a
    program or contact a server.
    """
    if not words or words[0].startswith("-") or "=" in words[0].split("/")[0]:
        raise ConfigError([USAGE + "."])
    folder, overrides = Path(words[0]).expanduser(), [word for word in words[1:] if word != TRUST]
    values, own_run = _read(folder)
    chosen = _chosen(overrides)
    if "experiment" in chosen:
        raise ConfigError([f"experiment={chosen['experiment']}: {folder} has its own. Give single keys, or drop it."])
    _drop_what_follows(values, chosen)
    typed = {word.lstrip("+~").partition("=")[0] for word in overrides}
    if missing := [key for key in secret_leaves(values) if not _is_typed(key, typed)]:
        file = folder / CONFIG_FILE
        raise ConfigError([f"{key} is a secret that {file} does not hold. Add {key}=..." for key in missing])
    if not own_run and TRUST not in words:
        check_powers(values, folder / CONFIG_FILE, but=typed)
    _drop_secrets(values, typed)
    _store(as_text(values))
    # A plug-in's values must not be merged with those of the default one; a launcher has its own type.
    own = [f"{kind}=plugin" for kind in KINDS if kind in values]
    own += [f"launcher={values['launcher']['name']}"] if "launcher" in values else []
    return CommandLine(
        typed=("rerun", words[0], *overrides),
        hydra=tuple(hydra_words([*own, f"experiment={OPTION}", *overrides])),
        command=("rerun", words[0]),
    )


def check_powers(values: Mapping[str, Any], file: Path, *, but: Iterable[str] = ()) -> None:
    """Raises `ConfigError` if the saved values run a program or contact a server, but for keys that the user typed."""
    found = [f"{key}={value}" for key, value in powers(values) if not _is_typed(key, but)]
    if found:
        raise ConfigError(
            [
                f"{file} is not marked as a run of yours, and sets {', '.join(found)}, which may run programs, read "
                f"your secrets or contact servers. Read it, and add {TRUST} if you trust it like a program."
            ]
        )


def _is_typed(key: str, typed: Iterable[str]) -> bool:
    """Returns whether the user gave the key, or a mapping that holds it."""
    return any(key == one or key.startswith(f"{one}.") for one in typed)


def _drop_secrets(values: Mapping[str, Any], typed: Iterable[str]) -> None:
    """Removes secrets below a mapping that the user gave anew, because Hydra would keep those that it does not name."""
    for key in secret_leaves(values):
        if key not in typed:
            *holders, last = key.split(".")
            holder: Any = values
            for name in holders:
                holder = holder[name]
            del holder[last]


def _read(folder: Path) -> tuple[dict[str, Any], bool]:
    """Returns the values of a run's config.yaml, and whether it is marked as a run of this user."""
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
    if odd := [str(key) for key in values if key not in known]:  # such as hydra, whose settings name code
        raise ConfigError([f"{file}: {', '.join(odd)}: a run's configuration has no such key. Remove it."])
    return values, is_own(text)


def _chosen(overrides: Sequence[str]) -> dict[str, str]:
    """Maps each newly chosen group to its option; naming a plug-in counts as choosing."""
    pairs = [word.partition("=") for word in overrides if not word.startswith("-")]
    chosen = {key: value for key, _, value in pairs if key in groups()}
    return chosen | {key.removesuffix(".name"): value for key, _, value in pairs if key in {f"{k}.name" for k in KINDS}}


def _drop_what_follows(values: dict[str, Any], chosen: Mapping[str, str]) -> None:
    """Takes out what the new run says itself. The name goes where it was made from the model and the data."""
    if values.get("name") == f"{values['model']['name']}-{short_name(values['data']['name'])}":
        del values["name"]
    for key in (*_OF_ITS_START, *chosen):
        values.pop(key, None)
    values["run"].pop("dir", None)


def _store(values: Mapping[str, Any]) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="experiment", name=OPTION, node=dict(values), package="_global_")
