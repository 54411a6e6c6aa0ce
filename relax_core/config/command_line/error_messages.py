"""Turns each error of Hydra and OmegaConf into one sentence with key, value and fix."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from yaml import MarkedYAMLError

from relax_core.config.command_line.override_words import DOUBLE, quoted
from relax_core.config.command_line.rerun import OPTION
from relax_core.config.errors import ConfigError, nearest
from relax_core.config.options import COMMANDS, group_options
from relax_core.config.schema_keys import section_keys, section_types, unknown_key

if TYPE_CHECKING:
    from hydra.errors import HydraException

# Names that appear in the presets of conf/experiment, or that are planned.
_PLANNED = {
    "modality": ("vision", "audio", "omni"),
}
_TYPE_WORDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "String": "text",
}


def explain(error: HydraException | OmegaConfBaseException | MarkedYAMLError) -> ConfigError:
    """Returns Hydra's error as a `ConfigError` in Relax's form."""
    # Imported here, because the roles' processes import this module without Hydra.
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        return ConfigError([f"{where}: not valid YAML: {error.problem}."])
    cause = _omegaconf_cause(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError([_missing_option(error.missing_cfg_file, also=error.options or ())])
    if isinstance(error, OverrideParseException):
        return ConfigError([_bad_syntax(error.override)])
    if isinstance(cause, InterpolationKeyError | UnsupportedInterpolationType):
        return ConfigError([f"{cause.full_key}: {_first_line(cause)}."])
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return ConfigError([_unknown_key(error, cause.full_key)])
    if cause is not None and cause.full_key:
        return ConfigError([_in_file(error) + explain_value(cause, key=cause.full_key)])
    text = str(error)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", text):
        told = f"{ambiguous[1]}: several values. Add -m to run one after the other, or write a list as key=[a,b]."
        return ConfigError([f"{told} A text with a comma takes quotes: {_in_quotes(ambiguous[1])}."])
    if group := re.match(r"Could not override '([^']*)'", text):
        return ConfigError([unknown_key(group[1]) if group[1] else _bad_syntax("=")])
    lines = [line.strip() for line in text.splitlines() if line.strip() and "://" not in line]
    return ConfigError([" ".join(lines[:4])])


def explain_value(error: OmegaConfBaseException, *, key: str) -> str:
    """Returns the message for a value of the wrong type, or one that is not among the choices."""
    text = _first_line(error)
    section = key.split(".", 1)[0]
    chooser = ""
    if key == f"{section}.name" and (options := group_options(section)):
        chooser = f" Choose it with {section}=<option>: {', '.join(options)}."
    if wrong := re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text, re.DOTALL):
        return f"{key}={wrong[1]}: expected {_TYPE_WORDS.get(wrong[2], wrong[2])}.{chooser}"
    if choice := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", text, re.DOTALL):
        return f"{key}={choice[1]}: expected one of {choice[2]}.{chooser}"
    if boolean := re.match(r"Value '(.*)' is not a valid bool", text, re.DOTALL):
        return f"{key}={boolean[1]}: expected true or false."
    if "does not support deletion" in text:
        return f"{key} cannot be removed, only set."
    if "is not Optional" in text:
        return f"{key}=null: it needs a value."
    if key in section_types():
        return f"{key} is a section, not a value. Its keys: {', '.join(section_keys(key))}."
    return f"{key}: {text}.{chooser}"


def missing_name(what: str, choice: str, options: Iterable[str]) -> str:
    """Returns the message for a choice that does not exist. ``what`` is the typed key, such as algo or engine.name."""
    group = what.removesuffix(".name")
    if is_planned(group, choice):
        return f"{what}={choice} is not built yet. What exists for {group}: {', '.join(options)}."
    near = nearest(choice, options, count=1)
    hint = f" Nearest: {near[0]}." if near else ""
    return f"{what}={choice} does not exist.{hint} What exists for {group}: {', '.join(options)}."


def is_planned(group: str, choice: str) -> bool:
    """Is True if the choice is planned: it is no mistake, but cannot start yet."""
    return choice in _PLANNED.get(group, ())


def _missing_option(config_file: str, *, also: Iterable[str]) -> str:
    """Returns the message for a missing option.

    ``also`` are the options of the user's own folder, which Hydra found.
    """
    group, _, choice = config_file.partition("/")
    if options := sorted({*group_options(group), *also}):
        return missing_name(group, choice, options)
    return f"there is no config file {config_file}.yaml."


def _unknown_key(error: Exception, key: str) -> str:
    """Returns the whole key from Hydra's own text, because OmegaConf's cause has only its first part."""
    file = _in_file(error)
    if file and key == file.split("/")[0].removeprefix("in "):
        return f"{file}its first line must be '# @package _global_', so that its keys are those of the whole run."
    if (typed := re.match(r"Could not override '([^']+)'", str(error))) and typed[1].startswith(f"{key}."):
        key = typed[1]
    return file + unknown_key(key)


def _in_file(error: Exception) -> str:
    """Returns the YAML file that Hydra was reading, as a prefix of the message."""
    place = re.match(r"In '([^']+)': \w+ raised while composing config", str(error))
    if place is None:
        return ""
    return "in the run's config.yaml: " if place[1] == f"experiment/{OPTION}" else f"in {place[1]}.yaml: "


def _bad_syntax(override: str) -> str:
    told = f"{override!r} is not key=value."
    if re.fullmatch(r"[+~]*[\w.]+=.+", override, re.DOTALL):
        return f"{told} A value with any of = ~ , ( ) [ ] {{ }} or a quote in it takes quotes: {_in_quotes(override)}"
    told += " Examples: optimizer.lr=1e-4  mode=colocate  'name=\"two words\"'"
    if not re.fullmatch(r"[\w-]+", override):
        return told
    near = nearest(override, COMMANDS, count=1)
    return f"{told}. Commands: {', '.join(COMMANDS)}." + (f" Nearest: relax {near[0]}." if near else "")


def _in_quotes(override: str) -> str:
    """Returns the override as it is typed in a shell, with Hydra's quotes inside of the shell's."""
    key, _, value = override.partition("=")
    return shlex.quote(f"{key}={quoted(value, mark=DOUBLE)}")


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            return error
        error = error.__cause__ or error.__context__  # Hydra drops the cause of an error in a YAML file
    return None


def _first_line(error: OmegaConfBaseException) -> str:
    return (error.msg or str(error)).split("\n", 1)[0].rstrip(".")
