"""Turns Hydra's and OmegaConf's errors into one sentence each: key, value, fix."""

from __future__ import annotations

import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from yaml import MarkedYAMLError

from relax_core.config.errors import ConfigError, nearest
from relax_core.config.options import group_options
from relax_core.config.schema_keys import section_keys, section_types, unknown_key

_TYPE_WORDS = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "String": "text",
}


def explain(error: HydraException | OmegaConfBaseException | MarkedYAMLError) -> ConfigError:
    """The same error in Relax's words."""
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        where = f"{mark.name}, line {mark.line + 1}" if mark else "a YAML file"
        return ConfigError([f"{where}: not valid YAML: {error.problem}."])
    cause = _omegaconf_cause(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return ConfigError([_missing_option(error.missing_cfg_file)])
    if isinstance(error, OverrideParseException):
        return ConfigError([_bad_syntax(error.override)])
    if isinstance(cause, InterpolationKeyError | UnsupportedInterpolationType):
        return ConfigError([f"{cause.full_key}: {_first_line(cause)}."])
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return ConfigError([_in_file(error) + unknown_key(cause.full_key)])
    if cause is not None and cause.full_key:
        return ConfigError([_in_file(error) + explain_value(cause, key=cause.full_key)])
    text = str(error)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", text):
        return ConfigError(
            [f"{ambiguous[1]}: several values. Add -m to run one after the other, or write a list as key=[a,b]."]
        )
    if group := re.match(r"Could not override '([^']*)'", text):
        return ConfigError([unknown_key(group[1]) if group[1] else _bad_syntax("=")])
    lines = [line.strip() for line in text.splitlines() if line.strip() and "://" not in line]
    return ConfigError([" ".join(lines[:4])])


def explain_value(error: OmegaConfBaseException, *, key: str) -> str:
    """A value of the wrong type, or not among the choices."""
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


def missing_option(group: str, choice: str) -> str:
    """The message for ``group=choice`` that does not exist."""
    options = group_options(group)
    near = nearest(choice, options, count=1)
    hint = f" Nearest: {near[0]}." if near else ""
    return f"{group}={choice} is not built yet. What exists for {group}: {', '.join(options)}.{hint}"


def _missing_option(config_file: str) -> str:
    group, _, choice = config_file.partition("/")
    if group_options(group):
        return missing_option(group, choice)
    return f"there is no config file {config_file}.yaml."


def _in_file(error: Exception) -> str:
    """The YAML file that Hydra was reading, as a prefix."""
    place = re.match(r"In '([^']+)': \w+ raised while composing config", str(error))
    return f"in {place[1]}.yaml: " if place else ""


def _bad_syntax(override: str) -> str:
    told = f"{override!r} is not key=value. Examples: optimizer.lr=1e-4  mode=colocate  'name=\"two words\"'"
    return f"{told}. Commands: relax list, relax doctor." if override.isalpha() else told


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            return error
        error = error.__cause__ or error.__context__  # Hydra drops the cause of an error in a YAML file
    return None


def _first_line(error: OmegaConfBaseException) -> str:
    return (error.msg or str(error)).split("\n", 1)[0].rstrip(".")
