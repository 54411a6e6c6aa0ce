"""Translates an error of Hydra or OmegaConf into one sentence with key, value and fix."""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)
from yaml import MarkedYAMLError

from relax_core.config.errors import ConfigError, nearest
from relax_core.config.hydra_overrides import DOUBLE, SINGLE, SUFFIXES, file_override_hint, quoted
from relax_core.config.options import COMMANDS, group_options, groups
from relax_core.config.other_frameworks import COMMANDS_ELSEWHERE, OPTIONS_ELSEWHERE
from relax_core.config.rerun import OPTION
from relax_core.config.schema_keys import known_keys, section_keys, section_types, types_of, unknown_key, without_null

if TYPE_CHECKING:
    from hydra.errors import HydraException
_NO_PACKAGE = "its first line must be '# @package _global_', because its groups and keys are keys of the run."
_TYPE_NAMES = {
    "Integer": "a whole number",
    "Float": "a number",
    "Boolean": "true or false",
    "String": "text",
}
_SCALAR_NAMES = {int: _TYPE_NAMES["Integer"], float: _TYPE_NAMES["Float"], bool: _TYPE_NAMES["Boolean"]}


def explain(error: HydraException | OmegaConfBaseException | MarkedYAMLError) -> ConfigError:
    """Converts Hydra's error to a `ConfigError` in Relax's form."""
    # Hydra is imported here, because role processes import this module and need no Hydra.
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
    if isinstance(cause, InterpolationResolutionError) and (of_resolver := _resolver_error(cause)) is not None:
        return ConfigError([f"{cause.full_key}: {of_resolver}"])
    if isinstance(cause, InterpolationKeyError | UnsupportedInterpolationType):
        return ConfigError([f"{cause.full_key}: {_first_line(cause)}."])
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        return ConfigError([_unknown_key(error, cause.full_key)])
    if cause is not None and cause.full_key:
        return ConfigError([_in_file(error) + explain_value(cause, key=cause.full_key)])
    text = str(error)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'", text):
        if ambiguous[1].partition("=")[0] in groups():
            mix = " Several rewards in one run: reward=mix." if ambiguous[1].startswith("reward=") else ""
            return ConfigError([f"{ambiguous[1]}: several options. Add -m to run one after the other.{mix}"])
        message = f"{ambiguous[1]}: several values. Add -m to run one after the other, or write a list as key=[a,b]."
        return ConfigError([f"{message} {_right_form(ambiguous[1], what='A text with a comma')}."])
    if group := re.match(r"Could not override '([^']*)'", text):
        return ConfigError([unknown_key(group[1])])
    if inside := re.match(r"In '([^']+)': Could not override '([^'@]*)(@?)", text):
        file = f"in {inside[1]}.yaml: "
        if inside[3]:
            return ConfigError([f"{file}{_NO_PACKAGE}"])
        return ConfigError([f"{file}override /{inside[2]}: no such group. Groups: {', '.join(groups())}."])
    lines = [line.strip() for line in text.splitlines() if line.strip() and "://" not in line]
    return ConfigError([" ".join(lines[:4])])


def explain_value(error: OmegaConfBaseException, *, key: str) -> str:
    """Returns the message for a value that has the wrong type or is not one of the choices."""
    text = _first_line(error)
    section = key.split(".", 1)[0]
    chooser = ""
    if key == f"{section}.name" and (options := group_options(section)):
        chooser = f" Choose it with {section}=<option>: {', '.join(options)}."
    if "Value '{}'" in text and not any(typing.get_origin(without_null(kind)) is dict for kind in types_of(key)):
        return f"{key} is a value and has no keys. Write {key}=VALUE."
    if wrong := re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text, re.DOTALL):
        if wrong[1].startswith("["):
            return f"{key}={wrong[1]}: it takes one value. For several runs: -m {key}=VALUE,VALUE."
        return f"{key}={wrong[1]}: expected {_TYPE_NAMES.get(wrong[2], wrong[2])}.{chooser}"
    if choice := re.match(r"Invalid value '(.*)', expected one of \[(.*)\]", text, re.DOTALL):
        return f"{key}={choice[1]}: expected one of {choice[2]}.{chooser}"
    if boolean := re.match(r"Value '(.*)' is not a valid bool", text, re.DOTALL):
        return f"{key}={boolean[1]}: expected true or false."
    if "does not support deletion" in text:
        return f"{key} cannot be removed, only set."
    if key == "data.path" and "'list'" in text:
        return f"{key} takes one file. For several files: 'data.paths=[a.jsonl,b.jsonl]'."
    if "is not Optional" in text:
        return f"{key}=null: it needs a value."
    if "is not a ListConfig" in text and (wrong := getattr(error, "value", None)) is not None:
        return f"{key}={wrong}: expected a list: {as_list(key, str(wrong))}."
    if "ListConfig" in text or "DictConfig" in text or "Cannot assign" in text:
        for kind in types_of(key):
            if typing.get_origin(without_null(kind)) is list:
                return f"{key}: expected a list: {as_list(key, 'TEXT')}."
            if typing.get_origin(without_null(kind)) is dict:
                return f"{key}: expected names with values: '{key}={{NAME: VALUE}}'."
    if key in section_types():
        return f"{key} is a section, not a value. Its keys: {', '.join(section_keys(key))}."
    return f"{key}: {text}.{chooser}"


def missing_name(what: str, choice: str, options: Iterable[str]) -> str:
    """Returns the message for a choice that does not exist. ``what`` is the typed key, such as algo or engine.name."""
    group = what.removesuffix(".name")
    near = nearest(choice, options, count=1)
    here = [
        words for (of, known), words in OPTIONS_ELSEWHERE.items() if of == group and choice.lower() in known.split()
    ]
    if group == "parallel" and (size := re.fullmatch(r"(tp|pp|dp|cp|ep|vpp)(\d+)", choice)):
        here = [f"parallel.{size[1]}={size[2]}"]
    here = [words if words[0].isupper() else f"Here it is {words}" for words in here]
    if group == "model" and not here and not near:
        families = [option for option in options if choice.lower().replace(".", "_").startswith(option)]
        here = [f"Here it is model={max(families, key=len)} model.path=FOLDER"] if families else []
    hint = f" {here[0]}." if here else f" Nearest: {near[0]}." if near else ""
    return f"{what}={choice} does not exist.{hint} What exists for {group}: {', '.join(options)}."


def _missing_option(config_file: str, *, also: Iterable[str]) -> str:
    """Returns the message for an option that does not exist; ``also`` are the options in the user's folder."""
    group, _, choice = config_file.partition("/")
    if options := sorted({*group_options(group), *also}):
        return missing_name(group, choice, options)
    return f"there is no config file {config_file}.yaml."


def _unknown_key(error: Exception, key: str) -> str:
    """Returns the message for an unknown key.

    Hydra's text has the whole key; OmegaConf's error has only the first part.
    """
    file = _in_file(error)
    if file and key == file.split("/")[0].removeprefix("in "):
        return f"{file}{_NO_PACKAGE}"
    if (typed := re.match(r"Could not override '([^']+)'", str(error))) and typed[1].startswith(f"{key}."):
        key = typed[1]
    return file + unknown_key(key)


def _in_file(error: Exception) -> str:
    """Returns a message prefix with the YAML file that Hydra was reading, or ""."""
    place = re.match(r"In '([^']+)': \w+ raised while composing config", str(error))
    if place is None:
        return ""
    return "in the run's config.yaml: " if place[1] == f"experiment/{OPTION}" else f"in {place[1]}.yaml: "


def _bad_syntax(override: str) -> str:
    override = override.removeprefix("++")  # Relax adds ++ to keys of mappings with free keys
    message = f"{override!r} is not key=value."
    if override.endswith((".yaml", ".yml")) and "=" not in override:
        return f"{message} {file_override_hint(override)}."
    if override.endswith(SUFFIXES) and "=" not in override:
        return f"{message} For a file of rows: data=file data.path={override}"
    if re.fullmatch(r"[+~]*[\w.]+=.+", override, re.DOTALL):
        return f"{message} {_right_form(override)}"
    for commands, here in COMMANDS_ELSEWHERE.items():
        if override in commands.split():
            return f"relax has no command {override!r}. Here it is: {here}"
    key = re.split("[=:]", override)[0].strip("+-")
    if key in known_keys() or key in groups():
        return f"{message} Write {key}=VALUE, in one word."
    if not key.isascii():
        return f"{message} Names in a key must be ASCII; write other names in your own YAML file (--config-dir)."
    if (Path(override) / "config.yaml").is_file():
        return f"{message} It is a run's folder: relax rerun {override}, or run.dir={override} resume=auto"
    message += " Write a value with a blank in quotes. Examples: optimizer.lr=1e-4  mode=colocate  'name=\"two words\"'"
    if not re.fullmatch(r"[\w-]+", override):
        return message
    near = nearest(override, COMMANDS, count=1)
    return f"{message}. Commands: {', '.join(COMMANDS)}." + (f" Nearest: relax {near[0]}." if near else "")


def _right_form(override: str, *, what: str = "A value with any of = ~ , ( ) [ ] { } or a quote in it") -> str:
    """Returns the fix for a value that Hydra cannot parse; the fix depends on the key's type."""
    key, _, value = override.partition("=")
    kinds = [without_null(kind) for kind in types_of(key.lstrip("+~"))]
    if kinds and kinds[0] in (int, float, bool):
        if value.endswith(","):
            several = f"with -m write no blank after a comma: {key}={value}VALUE"
            return f"{key} takes {_SCALAR_NAMES[kinds[0]]} alone, such as {key}={value[:-1]}; {several}"
        if re.fullmatch(r"\d+(,\d+)+", value):
            return f"A number has no comma: {key}={value.replace(',', '' if kinds[0] is int else '.')}"
        return f"{key} takes {_SCALAR_NAMES[kinds[0]]} alone, such as {key}={'true' if kinds[0] is bool else '1'}"
    if not kinds and re.fullmatch(r"-?[\d.]+(e-?\d+)?(,-?[\d.]+(e-?\d+)?)+", value):
        return f"{key} takes one number, such as {key}={value.partition(',')[0]}"
    if kinds and typing.get_origin(kinds[0]) is list:
        return f"Each text of the list takes quotes: {as_list(key, value)}"
    if kinds and typing.get_origin(kinds[0]) is dict and value.startswith("{"):
        return (
            f"Names in it must be ASCII, and texts need quotes: '{key}={{NAME: \"TEXT\"}}'; write other names in "
            "your own YAML file (--config-dir)"
        )
    written = f"{key}={quoted(value, mark=DOUBLE)}"
    return f"{what} takes quotes: {shlex.quote(written)}"  # Hydra's quotes inside the shell's


def as_list(key: str, value: str) -> str:
    """Returns the override for a list of texts or integers as typed in a shell: Hydra's quotes inside shell quotes."""
    inner = value.removeprefix("[").removesuffix("]")
    texts = inner.split(",") if inner else []
    if texts and any("int" in str(kind) for kind in types_of(key)) and all(text.strip().isdigit() for text in texts):
        return f"'{key}=[{inner}]'"
    return shlex.quote(f"{key}=[{','.join(quoted(text.strip(SINGLE + DOUBLE + ' '), mark=DOUBLE) for text in texts)}]")


def _omegaconf_cause(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None:
        if isinstance(error, OmegaConfBaseException):
            return error
        error = error.__cause__ or error.__context__  # Hydra drops the cause of an error in a YAML file.
    return None


def _resolver_error(error: BaseException | None) -> ValueError | OSError | None:
    """Returns a resolver's error, which has a message for users, or None for an error of OmegaConf itself."""
    while isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, ValueError | OSError) else None


def _first_line(error: OmegaConfBaseException) -> str:
    return (error.msg or str(error)).split("\n", 1)[0].rstrip(".")
