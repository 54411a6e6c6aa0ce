"""`relax rerun RUN [key=value …]` starts another run from a run's own config.yaml, with overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from relax_core.config.command_line.override_words import CommandLine, hydra_words
from relax_core.config.errors import ConfigError
from relax_core.config.options import groups
from relax_core.config.saved import REDACTED
from relax_core.registry import KINDS, short_name

CONFIG_FILE = "config.yaml"
OPTION = "saved_run"  # the key of the group experiment, which Hydra composes last
USAGE = "relax rerun RUN [key=value ...], where RUN is a run's folder"
_OF_ITS_START = ("resume", "plan")  # and run.dir, because the next start sets its own


def rerun_line(words: Sequence[str]) -> CommandLine:
    """Returns the command line for Hydra. ``words`` are the run's folder, then overrides and flags.

    A newly chosen group takes nothing from the saved run. Raises `ConfigError` for a folder that is no run's, and for a
    secret that its config.yaml does not contain.
    """
    if not words or words[0].startswith("-") or "=" in words[0].split("/")[0]:
        raise ConfigError([USAGE + "."])
    folder, overrides = Path(words[0]).expanduser(), list(words[1:])
    values = _read(folder)
    chosen = _chosen(overrides)
    if "experiment" in chosen:
        raise ConfigError([f"experiment={chosen['experiment']}: {folder} has its own. Give single keys, or drop it."])
    _drop_what_follows(values, chosen)
    typed = {word.lstrip("+").partition("=")[0] for word in overrides}
    if missing := [key for key in _redacted(values) if key not in typed]:
        file = folder / CONFIG_FILE
        raise ConfigError([f"{key} is a secret that {file} does not hold. Add {key}=..." for key in missing])
    _store(values)
    # A plug-in's values must not be merged with those of the default one; a launcher has its own type.
    own = [f"{kind}=plugin" for kind in KINDS if kind in values]
    own += [f"launcher={values['launcher']['name']}"] if "launcher" in values else []
    return CommandLine(
        typed=("rerun", *words),
        hydra=tuple(hydra_words([*own, f"experiment={OPTION}", *overrides])),
        command=("rerun", words[0]),
    )


def _read(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError([f"{folder}: it has no {CONFIG_FILE}. {USAGE}."])
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError([f"{file}: not valid YAML: {error}"]) from error
    if not isinstance(values, dict) or "run" not in values:
        raise ConfigError([f"{file} is not the configuration of a run. {USAGE}."])
    return values


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


def _redacted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _redacted(value, f"{prefix}{key}.")
        elif REDACTED in str(value):
            yield f"{prefix}{key}"


def _store(values: Mapping[str, Any]) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="experiment", name=OPTION, node=dict(values), package="_global_")
