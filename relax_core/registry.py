"""Finds plug-ins of all kinds by name, entry point or file path.

A plug-in is one module with a module-level ``SPEC`` (see contracts/). It is found as
- a name: a module of its kind's folder (such as ``algorithms.<name>``), or an entry of its kind's table;
- an entry point of an installed package, in the group of `_HOMES`, such as ``relax.algorithms``, or a ``.py`` path.

Listing names imports no plug-in. The results of a plug-in's functions are checked, and everything that the functions
raise is converted to an `Exception` (contracts/checked_plugins.py, contracts/plugin_results.py).
"""

from __future__ import annotations

import ast
import copyreg
import dataclasses
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from relax_core.contracts.algorithm import AlgorithmConfig, AlgorithmSpec
from relax_core.contracts.checked_plugins import (
    checked_algorithm,
    checked_data_source,
    checked_env,
    checked_reward,
    checked_sink,
)
from relax_core.contracts.data import DataSourceConfig, DataSourceSpec
from relax_core.contracts.engine_kind import EngineSpec
from relax_core.contracts.env import EnvConfig, EnvSpec
from relax_core.contracts.family import Family, checked_family
from relax_core.contracts.plugin_results import Contained, contained_spec
from relax_core.contracts.reward import RewardConfig, RewardSpec
from relax_core.contracts.sink import SinkConfig, SinkSpec
from relax_core.contracts.untrusted_values import shown_error

Kind = Literal["algo", "reward", "env", "sink", "data", "engine", "family"]
# for these kinds SPEC.config is the type of a whole configuration section
KINDS: tuple[Kind, ...] = ("algo", "reward", "env")
# Pages of docs/plugins/ with a name that differs from the kind.
_PAGES = {"algo": "algorithm", "sink": "metrics_sink", "data": "data_source", "family": "model_family"}
_FILE_MODULE = "relax_plugin_"
MARK = "__relax_plugin__"  # set in the globals of a user's function; errors then name its line
_ROOT = Path(__file__).resolve().parents[1]
_QWEN = ("qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe")
FILE_SINKS = ("jsonl", "tensorboard")  # keys of the section tracker enable these sinks
TRACKERS = ("clearml", "mlflow", "otlp", "prometheus", "wandb")  # Relax's other built-in sinks
_FAMILIES = ("llama", "mistral", *_QWEN)  # in families/builtin_families.py


class Spec(Protocol):
    """Declares the fields of the SPECs of all kinds; kinds with `_Home.config` None have no ``config``."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def config(self) -> type: ...


class PluginError(ValueError):
    """Reports an unknown or broken plug-in; the text names the plug-in and the fix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Home:
    """Describes where plug-ins of one kind are found, and the type of the kind's SPEC.

    ``key`` is the configuration key that names a plug-in. ``section`` is the configuration section with the plug-in's
    settings. ``title`` is the heading in lists. ``entry_points`` is the entry-point group of installed packages.
    ``spec`` and ``config`` are the types of SPEC and of SPEC.config; ``config`` is None if SPECs of the kind have no
    config. ``checked`` adds checks of the functions' results to a SPEC. Relax's own plug-ins are the modules of
    ``package`` that set SPEC, or the entries of ``table`` (name to "module:attribute") in relax_core.
    """

    key: str
    section: str
    title: str
    entry_points: str
    spec: type
    config: type | None = None
    checked: Callable[[Any], Any] = lambda spec: spec
    package: str = ""
    table: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Returns Relax's folder, even if the user's project has a package of the same name."""
        return _ROOT / self.package

    def builtin_modules(self) -> dict[str, str]:
        """Maps the names of Relax's own plug-ins to "module:attribute".

        Parses the modules and does not execute them.
        """
        if not self.package:
            return dict(self.table)
        files = (file for file in self.folder.rglob("*.py") if not file.stem.startswith("_") and _sets_spec(file))
        return {file.stem: f"{'.'.join(file.relative_to(_ROOT).with_suffix('').parts)}:SPEC" for file in files}


def builtin_folder(kind: Kind) -> Path:
    """Returns the folder with Relax's own plug-ins of a kind."""
    return _HOMES[kind].folder


_HOMES: dict[Kind, _Home] = {
    "algo": _Home(
        key="algo.name",
        section="algo",
        title="Algorithms",
        entry_points="relax.algorithms",
        package="algorithms",
        spec=AlgorithmSpec,
        config=AlgorithmConfig,
        checked=checked_algorithm,
    ),
    "reward": _Home(
        key="reward.name",
        section="reward",
        title="Rewards",
        entry_points="relax.rewards",
        package="rewards",
        spec=RewardSpec,
        config=RewardConfig,
        checked=checked_reward,
    ),
    "env": _Home(
        key="env.name",
        section="env",
        title="Envs",
        entry_points="relax.envs",
        package="envs",
        spec=EnvSpec,
        config=EnvConfig,
        checked=checked_env,
    ),
    "sink": _Home(
        key="tracker.sinks",
        section="tracker.sinks.NAME",
        title="Metrics sinks",
        entry_points="relax.sinks",
        table={name: f"relax_core.observe.trackers.file_sinks:{name.upper()}" for name in FILE_SINKS}
        | {name: f"relax_core.observe.trackers.{name}_sink:SPEC" for name in TRACKERS},
        spec=SinkSpec,
        config=SinkConfig,
        checked=checked_sink,
    ),
    "data": _Home(
        key="data.name",
        section="data.config",
        title="Data sources",
        entry_points="relax.data_sources",
        package="data_sources",
        spec=DataSourceSpec,
        config=DataSourceConfig,
        checked=checked_data_source,
    ),
    "engine": _Home(
        key="engine.name",
        section="engine",
        title="Engines",
        entry_points="relax.engines",
        table={name: f"relax_core.engines.{name}.{name}_spec:SPEC" for name in ("embedded", "sglang")},
        spec=EngineSpec,
    ),
    "family": _Home(
        key="model.family",
        section="model",
        title="Model families",
        entry_points="relax.families",
        table={name: f"relax_core.families.builtin_families:{name.upper()}" for name in _FAMILIES},
        spec=Family,
        checked=checked_family,
    ),
}
ALL_KINDS: tuple[Kind, ...] = tuple(_HOMES)
# kinds that a config group chooses
GROUP_KINDS = tuple(kind for kind, home in _HOMES.items() if home.key == f"{kind}.name")


def key_of(kind: Kind) -> str:
    """Returns the key of the configuration that names a plug-in of this kind."""
    return _HOMES[kind].key


def section_of(kind: Kind) -> str:
    """Returns the configuration section with a plug-in's settings."""
    return _HOMES[kind].section


def title_of(kind: Kind) -> str:
    """Returns the heading of a list of plug-ins of this kind."""
    return _HOMES[kind].title


def find_algorithm(name: str) -> AlgorithmSpec:
    """Returns the algorithm called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(AlgorithmSpec, find("algo", name))


def find_reward(name: str) -> RewardSpec:
    """Returns the reward called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(RewardSpec, find("reward", name))


def find_env(name: str) -> EnvSpec:
    """Returns the env called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(EnvSpec, find("env", name))


def find_sink(name: str) -> SinkSpec:
    """Returns the metrics sink called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(SinkSpec, find("sink", name))


def find_data_source(name: str) -> DataSourceSpec:
    """Returns the data source called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(DataSourceSpec, find("data", name))


def find_engine(name: str) -> EngineSpec:
    """Returns the kind of engine called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(EngineSpec, find("engine", name))


def find_family(name: str) -> Family:
    """Returns the model family called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(Family, find("family", name))


def is_file_plugin(name: str) -> bool:
    """Returns whether a plug-in's name is the path of a file."""
    return name.endswith(".py")


def short_name(name: str) -> str:
    """Returns a plug-in's name for folder names and messages; for a file, the name without folder and suffix."""
    return Path(name).stem if is_file_plugin(name) else name


def names(kind: Kind) -> list[str]:
    """Returns the sorted names that work without a path; imports no plug-in."""
    return sorted({*_HOMES[kind].builtin_modules(), *_entry_points(kind)})


def known(kind: Kind) -> dict[str, str]:
    """Imports all plug-ins of this kind and maps each name to the summary."""
    return {name: find(kind, name).summary for name in names(kind)}


def package_of(kind: Kind, name: str) -> str | None:
    """Returns the installed package with the entry point ``name``, or None for Relax's own plug-ins."""
    point = None if is_builtin(kind, name) else _entry_points(kind).get(name)
    return point.dist.name if point is not None and point.dist is not None else None


def is_plugin_module(name: str) -> bool:
    """Returns whether a module of this name contains a plug-in of Relax, of an installed package or of a file."""
    installed = {point.module for kind in ALL_KINDS for point in _entry_points(kind).values()}
    own = name.split(".")[0] in {home.package for home in _HOMES.values() if home.package}
    return name.startswith(_FILE_MODULE) or own or name in installed


@cache
def find(kind: Kind, name: str) -> Spec:
    """Returns the SPEC of a plug-in of this kind.

    Raises `PluginError`, which lists the known names for an unknown name.
    """
    home = _HOMES[kind]
    where = f"{home.key}={name}"
    if is_file_plugin(name):
        spec = _load_file(Path(name), where=where, kind=kind)
        if home.config is not None:
            _make_picklable(spec.config, kind, name)
        return spec
    if (target := home.builtin_modules().get(name)) is not None:
        spec = _load_module(*target.split(":"), where=where, kind=kind)
        if spec.name != name:
            raise PluginError(f"{where}: {target} has a SPEC with name={spec.name!r}. Call it {name!r}.")
        return spec
    if name in (points := _entry_points(kind)):
        return _load_module(points[name].module, points[name].attr or "SPEC", where=where, kind=kind)
    near = difflib.get_close_matches(name.lower(), names(kind), n=1)
    hint = f" Nearest: {near[0]}." if near else ""
    raise PluginError(
        f"{where} is not known. What exists: {', '.join(names(kind)) or 'none by a name'}.{hint} "
        f"For your own file: {home.key}=/path/my_{kind}.py"
    )


@cache
def _sets_spec(file: Path) -> bool:
    """Returns whether a file sets SPEC.

    Also returns True if the file cannot be parsed: `find` then reports the syntax error.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError:
        return True
    nodes = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    targets = (target for node in nodes for target in (node.targets if isinstance(node, ast.Assign) else [node.target]))
    return any(isinstance(target, ast.Name) and target.id == "SPEC" for target in targets)


@cache  # a search of all installed packages takes milliseconds, and `plugin_location` needs it for every frame
def _entry_points(kind: Kind) -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=_HOMES[kind].entry_points)}


def _load_module(module_name: str, attribute: str, *, where: str, kind: Kind) -> Spec:
    try:
        with Contained():
            source = importlib.util.find_spec(module_name)
    except Exception as error:  # the module's parent package is missing, or its import raises any error
        raise _broken(error, where=where, file=Path(module_name)) from error
    file = Path(source.origin) if source is not None and source.origin else Path(module_name)
    try:
        with Contained():
            module = importlib.import_module(module_name)
    except Exception as error:  # any error of a plug-in is reported as one line with the plug-in's file and line
        raise _broken(error, where=where, file=file) from error
    return _checked(getattr(module, attribute, None), where=where, file=file, kind=kind)


def _load_file(path: Path, *, where: str, kind: Kind) -> Spec:
    path = path.expanduser()
    try:
        there = path.is_file()
    except OSError as error:  # the name is too long, or this user may not read the folder
        raise PluginError(f"{_HOMES[kind].key}: {error.strerror}: {str(path)[:100]}") from error
    if not there:
        raise PluginError(f"{where}: no such file. Give the path of a Python file with a SPEC.")
    path = path.resolve()
    module_name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    source = importlib.util.spec_from_file_location(module_name, path)
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[module_name] = module  # dataclasses look up their module by name
    try:
        with Contained():
            source.loader.exec_module(module)
    except Exception as error:  # any error of a plug-in file is reported as one line with the file and line
        del sys.modules[module_name]
        raise _broken(error, where=where, file=path) from error
    return _checked(getattr(module, "SPEC", None), where=where, file=path, kind=kind)


def _broken(error: Exception, *, where: str, file: Path) -> PluginError:
    """Returns an error that names the last line of the plug-in's file in the traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        line = error.lineno
    else:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)
    return PluginError(f"{where}: {file}, line {line or 1}: {type(error).__name__}: {error}")


def _checked(spec: object, *, where: str, file: Path, kind: Kind) -> Spec:
    home = _HOMES[kind]
    if not isinstance(spec, home.spec):
        got = "no SPEC" if spec is None else f"a SPEC of type {type(spec).__name__}"
        page = f"docs/plugins/{_PAGES.get(kind, kind)}.md"
        raise PluginError(f"{where}: {file} has {got}. Set SPEC = {home.spec.__name__}(...) at the top level: {page}.")
    found = cast(Spec, spec)
    if home.config is not None and not (
        dataclasses.is_dataclass(found.config) and issubclass(found.config, home.config)
    ):
        raise PluginError(f"{where}: {file}: SPEC.config must be a dataclass under {home.config.__name__}.")
    try:
        return cast(Spec, home.checked(found if home.config is None else contained_spec(found)))
    except ValueError as error:
        raise PluginError(f"{where}: {file}: {error}") from error


def plugin_location(error: BaseException) -> str:
    """Returns "FILE, line N" of the innermost plug-in code in the traceback; empty without plug-in code in it."""
    places = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if MARK in frame.f_globals or is_plugin_module(frame.f_globals.get("__name__", ""))
    ]
    return places[-1] if places else ""


def plugin_error_text(error: BaseException) -> str:
    """Returns an error as one line of text with the plug-in's file and line."""
    words = next(iter(shown_error(error).splitlines()), type(error).__name__)
    place = plugin_location(error)
    return f"{words} ({place})" if place else words


def is_builtin(kind: Kind, name: str) -> bool:
    """Returns whether the plug-in of this name belongs to Relax."""
    return name in _HOMES[kind].builtin_modules()


def with_file(kind: Kind, config: Any, file: str) -> Any:
    """Returns the settings of a plug-in file, but with ``file``, a copy of the plug-in file, as their name.

    Other processes load the copy.
    """
    _make_picklable(type(config), kind, file)
    return dataclasses.replace(config, name=file)


def _make_picklable(config: type, kind: Kind, name: str) -> None:
    """Makes settings of a plug-in file picklable as path and values; other processes cannot import the module."""
    path = str(Path(name).resolve())

    def reduce(instance: object) -> tuple[Any, ...]:
        return _rebuild_config, (kind, path, dict(vars(instance)))

    copyreg.pickle(config, reduce)


def _rebuild_config(kind: Kind, path: str, values: dict[str, Any]) -> Any:
    return find(kind, path).config(**values)
