"""Prepares the command line for Hydra: rejects invalid words, quotes texts and paths, adds plug-in groups.

Secrets are removed from the words before other code reads the words, and from the output of `ps`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from relax_core.config.errors import ConfigError, nearest
from relax_core.config.options import groups, yaml_options
from relax_core.config.other_frameworks import equivalent_keys_of, synonym
from relax_core.config.redaction import REDACTED, has_withheld, is_reference, is_secret_place, redacted, withhold
from relax_core.config.schema_keys import known_keys, type_below, types_of, without_null
from relax_core.registry import (
    ALL_KINDS,
    GROUP_KINDS,
    KINDS,
    Kind,
    PluginError,
    find,
    is_builtin,
    is_file_plugin,
    key_of,
    names,
)

# Keys with a path. Relax makes the paths absolute, because services have different working folders.
PATHS = (
    "model.path",
    "data.path",
    "data.eval_path",
    "run.dir",
    "launcher.token_file",
    "engine.python",
    "engine.token_file",
    "agent.cwd",
    "agent.python",
)
_QUOTED = (*PATHS, "resume", "agent.command", "hydra.sweep.dir")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # suffixes of data files
_OPEN = ("eval.sets", "data.chat_template_kwargs", "data.config", "agent.env")  # mappings with free keys
_PLUGINS = tuple(key_of(kind) for kind in ALL_KINDS if kind != "sink")
SINGLE, DOUBLE = "'", '"'
# Matches text that Hydra reads unchanged without quotes. Hydra's grammar is ASCII.
PLAIN = re.compile(r"(?!(?i:true|false|null|inf|nan)$)[A-Za-z_/.][\w/.-]*", re.ASCII)
_SAME = re.compile(r"null|-?(?:0|[1-9]\d*)(?:\.\d*[1-9])?")  # values that do not change with quotes
_DICT_KEY = re.compile(r"""(['"]?)([\w/.@|*?%+-]+)\1""", re.ASCII)
_LEFT_ALONE = re.compile(r"null|['\"\[{].*|.*\$\{.*|(choice|range|interval|glob|shuffle|sort|tag)\(.*\)", re.DOTALL)

_OWN_YAML = (
    "For YAML files of your own: --config-dir FOLDER experiment=NAME, where the file is FOLDER/experiment/NAME.yaml. "
    "To repeat a run: relax rerun RUN"
)
_REFUSED_FLAGS = {
    "--config-path": f"--config-path would replace Relax's configuration. {_OWN_YAML}",
    "--config-name": f"--config-name would replace Relax's configuration. {_OWN_YAML}",
    "--experimental-rerun": "Relax stores no pickled configurations. To repeat a run: relax rerun RUN",
}
_SHORT_FLAGS = {"-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir", "-c": "--cfg"}
_FLAGS = (
    *("--help", "--version", "--multirun", "--config-dir", "--cfg", "--hydra-help"),
    *("--resolve", "--package", "--run", "--shell-completion", "--info"),
)
_SHORT = ("-h", "-m", "-c", "-p", "-r", "-i", "-sc")
_SHOWN_CONFIGS = ("job", "hydra", "all")  # values of --cfg
_FLAGS_WITH_VALUE = ("--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
_REFUSED_HYDRA = {
    "hydra.run.dir": "a run's folder is run.dir",
    "hydra.job.name": "a run's name is name",
    "hydra.job.chdir": "a run never changes its working folder",
    "hydra.output_subdir": "a run's configuration is config.yaml in run.dir",
}


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """Holds the command-line words of one command.

    ``typed`` are the user's words, and ``hydra`` the words for Hydra. ``command`` is the prefix that `as_typed` adds
    before the overrides of a run, such as ``rerun RUN``.
    """

    typed: tuple[str, ...]
    hydra: tuple[str, ...]
    command: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: Sequence[str], *, typed: Sequence[str] | None = None) -> CommandLine:
        """Builds the command line from ``words``, which exclude the command; ``typed`` are all words.

        Raises the errors of `hydra_arguments`.
        """
        return cls(typed=tuple(args if typed is None else typed), hydra=tuple(hydra_arguments(args)))

    def as_typed(self, overrides: Sequence[str]) -> list[str]:
        """Converts the overrides that Hydra reports for one run to the user's words.

        Quotes that Relax added are removed, and words that Relax added are left out.
        """
        several = _is_sweep(self.typed)
        single = [override for arg in self.typed for override in (_one_by_one(arg) if several else [arg])]
        args = {_for_hydra(arg, several=False, args=self.typed): arg for arg in single}
        added = set(self.hydra) - {_for_hydra(arg, several=several, args=self.typed) for arg in self.typed}
        return [*self.command, *(args.get(override, override) for override in overrides if override not in added)]

    def duplicate_keys(self) -> dict[str, str]:
        """Returns the last value of each key or group that the user set several times to different values."""
        pairs = [
            override.partition("=")[::2]
            for override in self.typed
            if "=" in override and not override.startswith(("-", "~"))
        ]
        last = dict(pairs)
        return {key: last[key] for key, value in pairs if value != last[key]}

    def swept(self, overrides: Sequence[str]) -> list[str]:
        """Returns those overrides of `as_typed` that differ between the runs of a sweep."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        args = [arg for arg in self.hydra if "=" in arg and not arg.startswith("-")]
        parsed = OverridesParser.create().parse_overrides(args)
        fixed = {override.get_key_element().lstrip("+") for override in parsed if not override.is_sweep_override()}
        keys = {
            override: override.partition("=")[0].lstrip("+") for override in overrides if override not in self.command
        }
        return [override for override, key in keys.items() if key not in fixed]


def hydra_arguments(args: Sequence[str]) -> list[str]:
    """Returns the words for Hydra; raises `ConfigError` for words that Hydra would misinterpret."""
    if problems := [*_wrong_flags(args), *(problem for arg in args for problem in _wrong_override(arg))]:
        raise ConfigError(problems)
    flags, overrides = _flags_and_overrides(args)
    several = _is_sweep(args)
    for_hydra = [_for_hydra(arg, several=several, args=args) for arg in overrides]
    return [*with_plugin_groups([*for_hydra, *groups_of_files(overrides)]), *flags]


def _flags_and_overrides(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates flags from overrides, because Hydra needs all overrides in one sequence."""
    flags: list[str] = []
    overrides: list[str] = []
    for place, arg in enumerate(args):
        before = args[place - 1] if place else ""
        is_value = before in _FLAGS_WITH_VALUE or (before in ("--info", "-i") and "=" not in arg)
        (flags if arg.startswith("-") or is_value else overrides).append(arg)
    return flags, overrides


def _is_sweep(args: Sequence[str]) -> bool:
    return "-m" in args or "--multirun" in args


def groups_of_files(overrides: Sequence[str]) -> list[str]:
    """Returns ``data=file`` and ``reward=math`` if the words name data files but choose neither data nor experiment.

    The default options, a generated task and its reward, do not work for files.
    """
    given = {arg.partition("=")[0].lstrip("+") for arg in overrides if not arg.endswith("=null")}
    if not given & {"data.path", "data.paths"} or given & {"data", "data.name", "experiment"}:
        return []
    return ["data=file", *([] if given & {"reward", "reward.name", "env", "env.name"} else ["reward=math"])]


def with_plugin_groups(overrides: Sequence[str]) -> list[str]:
    """Adds the group for a plug-in that the words only name: ``algo=x`` for ``algo.name=x``.

    If the group has no such option, adds ``algo=plugin``; otherwise the plug-in would inherit values of grpo.yaml.
    """
    given = dict(override.split("=", 1) for override in overrides if "=" in override)
    named = [(kind, given[f"{kind}.name"]) for kind in GROUP_KINDS if f"{kind}.name" in given and kind not in given]
    named = [(kind, name) for kind, name in named if kind in KINDS or _is_plugin(kind, name)]
    return [*overrides, *(f"{kind}={name if name in yaml_options(kind) else 'plugin'}" for kind, name in named)]


def _is_plugin(kind: Kind, name: str) -> bool:
    """Returns whether the name belongs to a plug-in file or an installed plug-in."""
    return is_file_plugin(name.strip(SINGLE + DOUBLE)) or (name in names(kind) and not is_builtin(kind, name))


def _wrong_flags(args: Sequence[str]) -> Iterator[str]:
    for place, arg in enumerate(args):
        if not arg.startswith("-"):
            continue
        typed, equals, value = arg.partition("=")
        flag = _SHORT_FLAGS.get(typed, typed)
        value = value if equals else "".join(args[place + 1 : place + 2])
        if flag in _REFUSED_FLAGS:
            yield f"{arg}: {_REFUSED_FLAGS[flag]}."
        elif flag == "--cfg" and value not in _SHOWN_CONFIGS:
            yield f"{typed} {value}: it takes {', '.join(_SHOWN_CONFIGS)}. {typed} job prints the whole configuration."
        elif flag == "--config-dir":
            wrong = list(_wrong_config_dir(value))
            yield from wrong or user_file_problems(
                Path(value).expanduser(), args, lambda key, value: _type_of(key, value, args) is str
            )
        elif flag not in (*_FLAGS, *_SHORT) and re.fullmatch(r"--?[A-Za-z].*", flag):
            yield _unknown_flag(flag, value if equals or not value.startswith("-") else "")


def _wrong_config_dir(folder: str) -> Iterator[str]:
    path = Path(folder).expanduser()
    if not path.is_dir():
        yield f"--config-dir {folder}: no such folder. {_OWN_YAML}."
    elif not any((path / group).is_dir() for group in groups()):
        run = f" It is a run's folder: relax rerun {folder}" if (path / "config.yaml").is_file() else ""
        yield f"--config-dir {folder}: it has no folder of a group, such as experiment/.{run or f' {_OWN_YAML}'}."


def _unknown_flag(flag: str, value: str) -> str:
    """Returns the message for an unknown flag; other trainers use flags for settings that are keys in Relax."""
    name = flag.lstrip("-").replace("-", "_")
    message = f"{flag} is not a flag of relax"
    if value.endswith((".yaml", ".yml")):
        return f"{message}. {file_override_hint(value)}."
    key = next(
        (
            known_key
            for known_key in known_keys()
            if name in (known_key, known_key.rpartition(".")[2]) and name != "name"
        ),
        None,
    )
    if key is None and name in groups():
        key = name
    meaning = equivalent_keys_of(name)
    if key is None and meaning is not None and len(meaning.keys) == 1 and "=" not in meaning.keys[0]:
        (key,) = meaning.keys
    if key in groups() and _is_path(key, value):
        return f"{message}. Settings are written as key=value: {_option_by_path(key, value)}"
    if key is not None:
        note = f" ({meaning.note})" if meaning is not None and meaning.note else ""
        return f"{message}. Settings are written as key=value: {key}={value or '...'}{note}"
    if (hint := synonym(name)) is not None:
        return f"{message}. Settings are written as key=value. {hint}"
    near = nearest(flag, _FLAGS, count=1)
    return f"{message}. " + (f"Nearest: {near[0]}." if near else "Settings are written as key=value. relax --help")


def file_override_hint(file: str) -> str:
    """Returns the correct override for a YAML file that the user typed as a word."""
    path = Path(file).expanduser()
    if path.name == "config.yaml" and path.is_file():
        return f"To repeat this file's run: relax rerun {path.parent}"
    if path.parent.name == "experiment":
        return f"A YAML file of your own: --config-dir {path.parent.parent} experiment={path.stem}"
    return (
        f"A YAML file of your own: move it to FOLDER/experiment/{path.stem}.yaml, begin it with '# @package _global_', "
        f"and give --config-dir FOLDER experiment={path.stem}"
    )


def _wrong_override(arg: str) -> Iterator[str]:
    key, equals, value = arg.partition("=")
    if not equals or arg.startswith("-"):
        return
    group = key.lstrip("+")
    if not group:
        yield f"{arg!r} is not key=value: the key is missing. Write key=value without blanks: optimizer.lr=1e-4"
    elif key in _REFUSED_HYDRA:
        yield f"{key} is not used: {_REFUSED_HYDRA[key]}."
    elif group not in groups():
        return
    elif value.strip() in ("", "null") and group != "experiment":
        yield f"{arg}: {group} needs one of {', '.join(yaml_options(group))}. Leave it out for the default."
    elif key.startswith("+"):
        yield f"{arg}: {group} is already set, so it takes no plus: {group}={value}."
    elif value.startswith("["):
        yield f"{arg}: {group} takes one option. Choose one of {value.strip('[]').replace(',', ', ')}."
    elif _is_path(group, value):
        yield f"{arg}: {_option_by_path(group, value)}"


def _is_path(group: str, value: str) -> bool:
    return "/" in value or value.endswith((".yaml", ".yml", ".py", *(SUFFIXES if group == "data" else ())))


def _option_by_path(group: str, value: str) -> str:
    if group in GROUP_KINDS and value.endswith(".py"):
        return f"a file of your own is {group}.name={value}."
    if group == "model" and not value.endswith((".yaml", ".yml", ".py")):
        return f"the folder of a model is model.path: {model_override_hint(value)}."
    if group == "data" and not value.endswith((".yaml", ".yml", ".py")):
        return f"for a file of rows: data=file data.path={value}."
    name = Path(value).stem
    if name in yaml_options(group) and "/" not in value:
        return f"an option is named without its suffix: {group}={name}."
    folder = Path(value).parent
    above = folder.parent if folder.name == group else "FOLDER"
    return (
        f"an option of {group} is given by its name, not by its path: --config-dir {above} {group}={name}, where the "
        f"file is {above}/{group}/{name}.yaml."
    )


def model_override_hint(text: str) -> str:
    """Returns the overrides for a model folder, or the download command for a name of the Hugging Face hub."""
    if Path(text).expanduser().exists() or not is_hub_name(text):
        return f"model=folder model.path={text}"
    return hub_download_hint(text, then="model=folder model.path=")


def hub_download_hint(name: str, *, then: str) -> str:
    """Returns how to use a model of the Hugging Face hub: the download command, then ``then`` and the folder."""
    folder = name.rpartition("/")[2]
    return f"hf download {name} --local-dir {folder}, since Relax downloads nothing; then {then}{folder}"


def is_hub_name(text: str) -> bool:
    """Returns whether the text has the form OWNER/NAME of a model on the Hugging Face hub."""
    return re.fullmatch(r"[\w.-]*\w[\w.-]*/[\w.-]*\w", text, re.ASCII) is not None and text[0] not in ".~/"


def _for_hydra(arg: str, *, several: bool, args: Sequence[str] = ()) -> str:
    """Converts ``arg`` for Hydra: quotes its texts, and adds ++ before a key of a mapping with free keys."""
    opens = arg.startswith(tuple(f"{key}{end}" for key in _OPEN for end in ".="))
    return "++" * opens + quoted_argument(arg, several=several, args=args)


def quoted_argument(arg: str, *, several: bool, args: Sequence[str] = ()) -> str:
    """Quotes each text in ``arg`` that Hydra would misread or reject.

    These texts are values of text keys, such as ``name=1e5``, and non-ASCII values of any key. With ``several``, commas
    separate the values of a sweep. ``args`` is the whole command line; it names the plug-ins, which determine the types
    of settings.
    """
    key, equals, value = arg.partition("=")
    name = key.lstrip("+")
    if not equals or not value or key.startswith(("-", "~")):
        return arg
    is_path = name in _QUOTED or name.startswith("eval.sets.") or (name in _PLUGINS and is_file_plugin(value))
    kind = str if is_path else _type_of(name, value, args)
    if is_path and not several:
        return f"{key}={_quoted_value(value, kind)}"
    parts = split(value)
    if parts is None or (len(parts) > 1 and not several):
        return arg
    return f"{key}={','.join(_quoted_value(part, kind) for part in parts)}"


def _one_by_one(arg: str) -> list[str]:
    """Splits the override of a sweep into one override for each value."""
    key, equals, value = arg.partition("=")
    parts = split(value) if equals else None
    return [arg] if parts is None else [arg, *(f"{key}={part}" for part in parts)]


def _type_of(key: str, value: str, args: Sequence[str]) -> Any:
    """Returns the type of a key, or None if the type is unknown or has no influence on the value."""
    if not key.startswith("data.config.") and (kinds := types_of(key)):  # the plug-in defines the types of data.config
        return without_null(kinds[0]) if len({str(without_null(kind)) for kind in kinds}) == 1 else None
    kind = next((kind for kind in ALL_KINDS if key.startswith(_section(kind) + ".")), None)
    if kind is None or all(PLAIN.fullmatch(part) or _SAME.fullmatch(part) for part in value.split(",")):
        return None
    below = key.removeprefix(_section(kind) + ".")
    named, _, rest = below.partition(".")
    chosen = {arg.partition("=")[2].strip(SINGLE + DOUBLE) for arg in args if _chooses(kind, arg)}
    if kind == "sink":
        chosen, below = {named}, rest
    known = names(kind)
    found = set()
    for plugin in {choice for choice in chosen if choice in known or is_file_plugin(choice)} or known:
        try:
            found.add(without_null(type_below(find(kind, plugin).config, below)))
        except PluginError:  # The plug-in check reports this error if the plug-in is used.
            continue
    found.discard(None)
    return found.pop() if len(found) == 1 else None


def _section(kind: Kind) -> str:
    return {"data": "data.config", "sink": "tracker.sinks"}.get(kind, kind)


def _chooses(kind: Kind, arg: str) -> bool:
    return arg.partition("=")[0].lstrip("+") in (kind, key_of(kind))


def _quoted_value(value: str, kind: Any, *, of_list: bool = False) -> str:
    """Returns a value for Hydra with quotes around its texts, including texts inside a list or a mapping.

    ``of_list`` is True for an element of a list, which is text even if it is null or begins with a bracket.
    """
    text, inner = value.strip(), value.strip()[1:-1]
    if kind is not str and text[:1] + text[-1:] in ("[]", "{}") and (parts := split(inner)) is not None:
        of = typing.get_args(kind)
        if not inner.strip():
            return value
        if text[0] == "[":
            kind = of[0] if len(of) == 1 else None
            return f"[{','.join(_quoted_value(part, kind, of_list=True) for part in parts)}]"
        return "{" + ",".join(_quoted_pair(part, kind) for part in parts) + "}"
    if of_list and kind is str:
        alone = text[:1] in (SINGLE, DOUBLE) or "${" in text
    else:
        alone = _LEFT_ALONE.fullmatch(text) is not None
    if not text or alone:
        return value
    wrong = not PLAIN.fullmatch(text) if kind is str else not text.isascii()
    return quoted(text) if wrong else value


def _quoted_pair(pair: str, kind: Any) -> str:
    """Returns a key-value pair of a mapping for Hydra; Hydra accepts no quotes around the key."""
    name, colon, value = pair.partition(":")
    if (key := _DICT_KEY.fullmatch(name.strip())) is None or not colon:
        return pair
    return f"{key[2]}: {_quoted_value(value, without_null(type_below(kind, key[2])))}"


def split(text: str) -> list[str] | None:
    """Splits a text at commas outside quotes and brackets; returns None for unmatched quotes or brackets."""
    parts, open_brackets, mark = [""], [], ""
    for place, sign in enumerate(text):
        if mark:
            mark = "" if sign == mark and text[place - 1] != "\\" else mark
        elif sign in SINGLE + DOUBLE and (not parts[-1].strip() or parts[-1].rstrip()[-1] in ":[{,("):
            mark = sign
        elif sign in "[{(":
            open_brackets.append(sign)
        elif sign in "]})" and (not open_brackets or open_brackets.pop() + sign not in ("[]", "{}", "()")):
            return None
        elif sign == "," and not open_brackets:
            parts.append("")
            continue
        parts[-1] += sign
    return None if mark or open_brackets else parts


def quoted(text: str, *, mark: str = SINGLE) -> str:
    r"""Returns ``text`` in Hydra's quotes: quote marks are escaped, and backslashes before a quote mark are doubled."""
    escaped = re.sub(rf"(\\*){mark}", rf"\1\1\\{mark}", text)
    return mark + re.sub(r"(\\+)$", r"\1\1", escaped) + mark


IsText = Callable[[str, str], bool]  # (key, value) → whether the key's type is text


def user_file_problems(folder: Path, args: Sequence[str], is_text: IsText) -> Iterator[str]:
    """Yields the problems of the chosen files in a --config-dir folder; invalid YAML is reported by Hydra."""
    for group, _, option in (arg.partition("=") for arg in args):
        file = folder / group / f"{option}.yaml"
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        prefix = "" if re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE) else group
        try:
            root = yaml.compose(text, Loader=get_yaml_loader())
        except yaml.YAMLError:
            continue
        scalars = dict(_scalars(root, prefix))
        where = f"in {group}/{file.name}"
        for node, key in scalars.items():
            read = yaml.load(node.value, Loader=get_yaml_loader()) if node.style is None else node.value
            if isinstance(read, bool | int | float) and str(read) != node.value and is_text(key, node.value):
                yield (
                    f"{where}, line {node.start_mark.line + 1}: {key}: {node.value} is read as {read}, and the key is "
                    f'of text. Put it in quotes: "{node.value}".'
                )
        given = {key: node.value for node, key in scalars.items() if node.value not in ("null", "~", "")}
        if {"run.steps", "run.epochs"} <= given.keys():
            yield f"{where}: run.steps={given['run.steps']} with run.epochs={given['run.epochs']}. Drop one of them."


def _scalars(node: Any, key: str) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """Yields each scalar of a file with its dotted key; the key of a list item is the list's key plus ``.0``."""
    if isinstance(node, yaml.MappingNode):
        for name, below in node.value:
            yield from _scalars(below, f"{key}.{name.value}" if key else str(name.value))
    elif isinstance(node, yaml.SequenceNode):
        for below in node.value:
            yield from _scalars(below, f"{key}.0")
    elif isinstance(node, yaml.ScalarNode):
        yield node, key


_NAMES = re.compile(r"[.\[\]@:/]+")  # separators between the parts of a key
_MAY_HOLD = re.compile(r"env|header|cookie|token|secret|passw|passphrase|credential|auth|key", re.IGNORECASE)
_ROOT_NAME = re.compile(r"\$\{([A-Za-z_]\w*)[.\[}]")  # root key of an interpolation
_FIX = "Put it in quotes, or use an environment variable: {key}='${{oc.env:NAME}}', where NAME is the variable's name"


def without_secrets(args: Sequence[str]) -> list[str]:
    """Replaces each secret in the words by a reference; only this process stores the secret (`withhold`).

    Hydra, the run's files and error messages thus never contain the secret. Values that already are references, such as
    ``agent.env.TOKEN=${oc.env:TOKEN}``, are unchanged. Raises `ConfigError` for a secret that cannot be parsed.
    """
    return [_without_secrets(arg, args) for arg in args]


def _without_secrets(arg: str, args: Sequence[str]) -> str:
    key, equals, value = arg.partition("=")
    if not equals or key.startswith("-") or not (_MAY_HOLD.search(arg) or "://" in value):
        return arg
    path = tuple(name for name in _NAMES.split(key.lstrip("+~")) if name)
    values = _parsed(arg, args)
    if values is None:  # Hydra rejects the word, or the word is a sweep over numbers.
        if is_secret_place(path) or redacted(value, path) != value or ("{" in value and _MAY_HOLD.search(value)):
            name = f" One variable: {key}.NAME=VALUE." if key in ("agent.env", "launcher.env") else ""
            raise ConfigError([f"{key}={REDACTED} cannot be read. {_FIX.format(key=key)}.{name}"])
        return arg
    if is_secret_place(path) and len(values) == 1 and isinstance(values[0], bool | int | float):
        values = [value]  # The value of a variable is text: 1e5 stays as typed.
    written = ",".join(_written(element, path) for element in values)
    return f"{key}={written}" if has_withheld(written) else arg


def _parsed(arg: str, args: Sequence[str]) -> list[Any] | None:
    """Returns the value of an override, or the values of a sweep; None if Hydra cannot parse the override."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides([quoted_argument(arg, several=False, args=args)])[0]
    except HydraException:
        return None
    value = parsed._value
    if isinstance(value, ChoiceSweep):
        return [parsed._convert_value(element) for element in value.list]
    return None if parsed.is_sweep_override() else [parsed.value()]


def _written(value: Any, path: tuple[str, ...]) -> str:
    """Formats a value in Hydra's grammar and replaces each secret by a reference."""
    if isinstance(value, Mapping):
        items = (f"{_text(str(name))}:{_written(inner, (*path, str(name)))}" for name, inner in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, list):
        return f"[{','.join(_written(element, (*path, '-')) for element in value)}]"
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
    """Returns the reference to a secret; environment variables in the text (``${oc.env:NAME,default}``) are resolved.

    A text that refers to a configuration key is returned unchanged, because only the whole configuration can resolve
    the interpolation. Any other ``${…}`` is a part of the secret.
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


def hide_arguments(args: Sequence[str], shown_arguments: Sequence[str]) -> None:
    """Replaces ``args`` by ``shown_arguments`` in this process's arguments, which `ps` shows.

    On Linux every user can read the memory of the arguments. The secrets are visible until this call, so an environment
    variable is safer.
    """
    if list(args) == list(shown_arguments):
        return
    fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    arguments = ctypes.string_at(start, end - start)
    for arg, instead in zip(args, shown_arguments, strict=True):
        old = os.fsencode(arg)
        if instead != arg:
            key = old.partition(b"=")[0] + b"="
            arguments = arguments.replace(b"\0" + old + b"\0", b"\0" + key + b"*" * (len(old) - len(key)) + b"\0")
    ctypes.memmove(start, arguments, end - start)
