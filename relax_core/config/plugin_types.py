"""Converts the settings of plug-ins to the plug-ins' dataclasses, and reads keys that list plug-ins."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from relax_core.config.choices import CALCULATOR, NUMBER_GUESS, SEEDS
from relax_core.config.error_messages import explain_value
from relax_core.config.errors import ConfigError, nearest
from relax_core.config.other_frameworks import equivalent_keys_of
from relax_core.config.redaction import escaped
from relax_core.config.schema import RelaxConfig
from relax_core.config.schema_keys import REMOVED, unknown_key
from relax_core.registry import Kind, PluginError, find, is_builtin, is_file_plugin, key_of

WARM_START_OF_SOURCES = "arithmetic"  # model.task of builtin models for questions from a data source


def typed_plugin(kind: Kind, node: DictConfig) -> Any:
    """Returns an instance of the plug-in's settings class with the values in ``node``.

    Raises:
        ConfigError: for an unknown plug-in, an unknown key, a wrong type or a missing value; all of them at once.
    """
    if not isinstance(node, DictConfig) or OmegaConf.is_missing(node, "name") or node.get("name") is None:
        raise ConfigError([f"{kind}.name has no value: give a name, or the path of your file, {kind}.name=/path/my.py"])
    name = node["name"]
    if not isinstance(name, str):
        raise ConfigError([f"{kind}.name={name!r}: expected text."])
    if is_file_plugin(name):  # services may have different working folders
        name = node["name"] = str(Path(name).expanduser().absolute())
    return plugin_config(kind, name, node, section=kind)


def plugin_config(kind: Kind, name: str, values: Mapping[str, Any], *, section: str) -> Any:
    """Returns an instance of the settings class of the plug-in ``name`` with ``values``.

    ``section`` is the configuration key of ``values``. The setting ``name`` is the plug-in's name or its path.

    Raises:
        ConfigError: for an unknown plug-in, an unknown key, a wrong type or a missing value; all of them at once.
    """
    node = values if isinstance(values, DictConfig) else OmegaConf.create(escaped(dict(values)) | {"name": name})
    try:
        config = find(kind, name).config
        schema = OmegaConf.structured(config)
    except PluginError as error:
        raise ConfigError([str(error)]) from error
    except OmegaConfBaseException as error:
        raise ConfigError([f"{key_of(kind)}={name}: its settings cannot be typed: {error.msg}"]) from error
    problems = _fill(schema, config, node, section=section, of=name)
    if not problems:
        missing = sorted(OmegaConf.missing_keys(schema))
        problems = [f"{section}.{key} has no value: add {section}.{key}=..." for key in missing]
    if problems:
        raise ConfigError(problems)
    return OmegaConf.to_object(schema)


def _fill(schema: DictConfig, config: Any, values: DictConfig, *, section: str, of: str) -> list[str]:
    """Writes ``values`` into ``schema``, the structured form of ``config``; returns the problems of keys and values."""
    OmegaConf.set_readonly(schema, False)  # the structured form of a frozen dataclass is read-only
    problems = []
    fields = [field.name for field in dataclasses.fields(config)]
    for key in map(str, values):
        if f"{section}.{key}" in REMOVED:
            problems.append(unknown_key(f"{section}.{key}"))
        elif key not in fields:
            near = nearest(key, fields) or [field for field in fields if field.startswith(f"{key}_")]
            if (meaning := equivalent_keys_of(key)) is not None and not near:
                near = [name for long_key in meaning.keys if (name := long_key.removeprefix(f"{section}.")) in fields]
            hint = (
                f"Nearest: {', '.join(f'{section}.{k}' for k in near)}."
                if near
                else f"Its settings: {', '.join(fields)}."
            )
            problems.append(f"{section}.{key} is not a setting of {of}. {hint}")
        elif not OmegaConf.is_missing(values, key):
            try:
                value = values[key]  # A single text is already resolved; the texts of a section are escaped.
                value = escaped(value) if isinstance(value, str) else value
                schema[key], wrong = _nested(schema, key, value, section=f"{section}.{key}")
                problems += wrong
            except OmegaConfBaseException as error:
                problems.append(explain_value(error, key=f"{section}.{key}"))
    return problems


def _nested(schema: DictConfig, key: str, value: Any, *, section: str) -> tuple[Any, list[str]]:
    """Returns the value of a setting and its problems.

    Values of these types become dataclasses or mappings of dataclasses.
    """
    old = schema._get_node(key)
    if not isinstance(old, DictConfig) or not isinstance(value, DictConfig):
        return value, []
    if dataclasses.is_dataclass(of := old._metadata.object_type):
        typed = OmegaConf.structured(of)
        return typed, _fill(typed, of, value, section=section, of=section)
    if not dataclasses.is_dataclass(of := old._metadata.element_type):
        return value, []
    entries, problems = {}, []
    for name, entry in ((str(name), entry) for name, entry in value.items()):
        if not isinstance(entry, DictConfig):
            problems.append(f"{section}.{name}={entry}: write its settings, such as {section}.{name}.KEY=VALUE.")
            continue
        entries[name] = OmegaConf.structured(of)
        problems += _fill(entries[name], of, entry, section=f"{section}.{name}", of=f"{section}.{name}")
    return entries, problems


def give_task_to_source(config: RelaxConfig) -> None:
    """Moves data.task to data.config.task if the data source is a built-in plug-in.

    With any other data source, data.task names a generated task. If model.task (a builtin model's warm start) is the
    data source's task, a general warm start replaces it. For rows of seeds, the env's warm start replaces it, if there
    is one. Raises `ConfigError` for two different tasks.
    """
    data = config.data
    if data.task == SEEDS and config.model.task == SEEDS:
        config.model.task = config.env.name if config.env.name in (NUMBER_GUESS, CALCULATOR) else WARM_START_OF_SOURCES
    if data.task is None or not is_builtin("data", data.name):
        return
    if data.config.get("task", data.task) != data.task:
        raise ConfigError([f"data.task={data.task} with data.config.task={data.config['task']}: name one task."])
    data.config = {**data.config, "task": data.task}
    if config.model.task == data.task:
        config.model.task = WARM_START_OF_SOURCES
    data.task = None


def plugins_of(given: Any, *, key: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the (name or path, configuration) of each plug-in in ``given``, which may be None.

    Raises ValueError (key, value, fix) for a value that is neither a list of names nor a mapping.
    """
    if given is None:
        return []
    pairs = [(name, None) for name in given] if isinstance(given, list) else given
    pairs = list(pairs.items()) if isinstance(pairs, Mapping) else pairs
    if not isinstance(pairs, list):
        raise ValueError(f"{key}={given}: {_WANTED}")
    for name, values in pairs:
        if not isinstance(name, str) or not name or not (values is None or isinstance(values, Mapping)):
            raise ValueError(f"{key}: {name}={values}: {_WANTED}")
    names = [name for name, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{key}: {twice} is named twice. Name it once.")
    return [(name, values or {}) for name, values in pairs]


def with_absolute_paths(given: Any) -> Any:
    """Makes file paths in a list or a mapping absolute, because services have different working folders."""
    if isinstance(given, list):
        return [_absolute(name) for name in given]
    return {_absolute(name): values for name, values in given.items()} if isinstance(given, Mapping) else given


def _absolute(name: Any) -> Any:
    if isinstance(name, str) and is_file_plugin(name):
        return str(Path(name).expanduser().absolute())
    return name


_WANTED = "Give a list, [NAME, /path/my_file.py], or a mapping, {/path/my_file.py: {key: value}}."
