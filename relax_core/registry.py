"""Finds algorithms, rewards and envs by name, by entry point or by file path.

A plug-in is one module with a module-level ``SPEC`` (see contracts/). It is found as

- a name: module ``algorithms.<name>``, ``rewards.<name>``, ``envs.<name>``;
- an entry point of an installed package, in group ``relax.algorithms``, ``relax.rewards`` or ``relax.envs``;
- a path that ends in ``.py``.

Listing names imports no plug-in. The error of a plug-in that fails to import names its file and line. The results of
its functions are checked (contracts/checked.py).
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
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from relax_core.contracts.algorithm import AlgorithmConfig, AlgorithmSpec
from relax_core.contracts.checked import checked_algorithm, checked_env, checked_reward
from relax_core.contracts.env import EnvConfig, EnvSpec
from relax_core.contracts.reward import RewardConfig, RewardSpec

Kind = Literal["algo", "reward", "env"]
KINDS: tuple[Kind, ...] = ("algo", "reward", "env")
_FILE_MODULE = "relax_plugin_"
MARK = "__relax_plugin__"  # in the globals of a plug-in's function that has no module of its own
_ROOT = Path(__file__).resolve().parents[1]
Spec = AlgorithmSpec | RewardSpec | EnvSpec


class PluginError(ValueError):
    """A plug-in is unknown or broken. The text names it and the fix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Home:
    """The package of the plug-ins of one kind, and the types of their SPEC and settings."""

    package: str
    spec: type
    config: type

    @property
    def entry_points(self) -> str:
        return f"relax.{self.package}"

    @property
    def folder(self) -> Path:
        """Relax's own folder, also if the user's project has a package of the same name."""
        return _ROOT / self.package


_HOMES: dict[Kind, _Home] = {
    "algo": _Home(package="algorithms", spec=AlgorithmSpec, config=AlgorithmConfig),
    "reward": _Home(package="rewards", spec=RewardSpec, config=RewardConfig),
    "env": _Home(package="envs", spec=EnvSpec, config=EnvConfig),
}


def find_algorithm(name: str) -> AlgorithmSpec:
    """Returns the algorithm called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(AlgorithmSpec, find("algo", name))


def find_reward(name: str) -> RewardSpec:
    """Returns the reward called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(RewardSpec, find("reward", name))


def find_env(name: str) -> EnvSpec:
    """Returns the env called ``name``, or in the file ``name``. Raises `PluginError`."""
    return cast(EnvSpec, find("env", name))


def is_file_plugin(name: str) -> bool:
    """Returns whether a plug-in's name is the path of a file."""
    return name.endswith(".py")


def names(kind: Kind) -> list[str]:
    """Returns the names that can be given without a path, sorted. Imports no plug-in."""
    return sorted({*_builtin_names(kind), *_entry_points(kind)})


def known(kind: Kind) -> dict[str, str]:
    """Returns name → summary of every plug-in of this kind, and imports all of them."""
    return {name: find(kind, name).summary for name in names(kind)}


def package_of(kind: Kind, name: str) -> str | None:
    """Returns the installed package whose entry point gives ``name``; None for Relax's own plug-ins."""
    point = None if name in _builtin_names(kind) else _entry_points(kind).get(name)
    return point.dist.name if point is not None and point.dist is not None else None


def is_plugin_module(name: str) -> bool:
    """Returns whether a module of this name contains a plug-in: Relax's own, an installed package's, or a file's."""
    installed = {point.module for kind in KINDS for point in _entry_points(kind).values()}
    packages = {home.package for home in _HOMES.values()}
    return name.startswith(_FILE_MODULE) or name.split(".")[0] in packages or name in installed


@cache
def find(kind: Kind, name: str) -> Spec:
    """Returns the SPEC of a plug-in of this kind. Raises `PluginError`, whose text lists the known names."""
    where = f"{kind}.name={name}"
    if is_file_plugin(name):
        spec = _load_file(Path(name), where=where, kind=kind)
        _make_picklable(spec.config, kind, name)
        return spec
    if name in _builtin_names(kind):
        file = _HOMES[kind].folder / f"{name}.py"
        module = _import(f"{_HOMES[kind].package}.{name}", where=where, file=file)
        spec = _checked(getattr(module, "SPEC", None), where=where, file=file, kind=kind)
        if spec.name != name:
            raise PluginError(f"{where}: {file} has a SPEC with name={spec.name!r}. Call it {name!r}.")
        return spec
    if name in (points := _entry_points(kind)):
        point = points[name]
        source = importlib.util.find_spec(point.module)
        file = Path(source.origin) if source is not None and source.origin else Path(point.module)
        module = _import(point.module, where=where, file=file)
        return _checked(getattr(module, point.attr or "SPEC", None), where=where, file=file, kind=kind)
    near = difflib.get_close_matches(name.lower(), names(kind), n=1)
    hint = f" Nearest: {near[0]}." if near else ""
    raise PluginError(
        f"{where} is not known. What exists: {', '.join(names(kind))}.{hint} "
        f"For a file of your own: {kind}.name=/path/my_{kind}.py"
    )


def _builtin_names(kind: Kind) -> list[str]:
    """Returns the modules of the kind's package that set SPEC. Their source is parsed and not run."""
    files = _HOMES[kind].folder.glob("*.py")
    return sorted(file.stem for file in files if not file.stem.startswith("_") and _sets_spec(file))


def _sets_spec(file: Path) -> bool:
    """Returns whether a file sets SPEC, or cannot be parsed: `find` then reports its syntax error."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError:
        return True
    targets = (
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return any(isinstance(target, ast.Name) and target.id == "SPEC" for target in targets)


def _entry_points(kind: Kind) -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=_HOMES[kind].entry_points)}


def _import(module_name: str, *, where: str, file: Path) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # Any error of a plug-in becomes one line with its file and line.
        raise _broken(error, where=where, file=file) from error


def _load_file(path: Path, *, where: str, kind: Kind) -> Spec:
    path = path.expanduser()
    try:
        there = path.is_file()
    except OSError as error:  # the name is too long, or the user may not read the folder
        raise PluginError(f"{kind}.name: {error.strerror}: {str(path)[:100]}") from error
    if not there:
        raise PluginError(f"{where}: no such file. Give the path of a Python file with a SPEC.")
    path = path.resolve()
    module_name = f"{_FILE_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    source = importlib.util.spec_from_file_location(module_name, path)
    assert source is not None and source.loader is not None
    module = importlib.util.module_from_spec(source)
    sys.modules[module_name] = module  # dataclasses find their module by name
    try:
        source.loader.exec_module(module)
    except Exception as error:  # Any error of a plug-in becomes one line with its file and line.
        del sys.modules[module_name]
        raise _broken(error, where=where, file=path) from error
    return _checked(getattr(module, "SPEC", None), where=where, file=path, kind=kind)


def _broken(error: Exception, *, where: str, file: Path) -> PluginError:
    """Returns an error that names the last line of the plug-in's own file in the traceback."""
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
        raise PluginError(f"{where}: {file} has {got}. Set SPEC = {home.spec.__name__}(...) at the top level.")
    found = cast(Spec, spec)
    if not (dataclasses.is_dataclass(found.config) and issubclass(found.config, home.config)):
        raise PluginError(f"{where}: {file}: SPEC.config must be a dataclass under {home.config.__name__}.")
    match found:
        case AlgorithmSpec():
            return checked_algorithm(found)
        case RewardSpec():
            return checked_reward(found)
        case EnvSpec():
            return checked_env(found)


def place_in_plugin(error: BaseException) -> str:
    """Returns "FILE, line N" of the innermost plug-in code in the traceback; empty if no plug-in's code is in it."""
    places = [
        f"{frame.f_code.co_filename}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if MARK in frame.f_globals or is_plugin_module(frame.f_globals.get("__name__", ""))
    ]
    return places[-1] if places else ""


def plugin_words(error: BaseException) -> str:
    """Returns an error in one line, with its file and line in the plug-in."""
    words = f"{type(error).__name__}: {error}".splitlines()[0]
    place = place_in_plugin(error)
    return f"{words} ({place})" if place else words


def is_builtin(kind: Kind, name: str) -> bool:
    """Returns whether the plug-in of this name is one of Relax's own."""
    return name in _builtin_names(kind)


def with_file(kind: Kind, config: Any, file: str) -> Any:
    """Returns settings of a plug-in file that refer to a copy of the file at ``file``, which other processes load."""
    _make_picklable(type(config), kind, file)
    return dataclasses.replace(config, name=file)


def _make_picklable(config: type, kind: Kind, name: str) -> None:
    """Makes settings of a file's plug-in picklable as path and values: other processes cannot import its module."""
    path = str(Path(name).resolve())

    def reduce(instance: object) -> tuple[Any, ...]:
        return _rebuild_config, (kind, path, dict(vars(instance)))

    copyreg.pickle(config, reduce)


def _rebuild_config(kind: Kind, path: str, values: dict[str, Any]) -> Any:
    return find(kind, path).config(**values)
