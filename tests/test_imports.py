"""Checks that module-level and local imports follow the import order of docs/architecture.md."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path

import pytest

from relax_core.config.schema import RelaxConfig
from relax_core.config.schema_keys import section_types
from relax_core.registry import KINDS, names

REPOSITORY = Path(__file__).resolve().parents[1]
# Plug-in folders that the registry or Hydra finds → other folders that they may import.
PLUGINS = {
    "algorithms": ("contracts", "registry"),
    "rewards": ("contracts", "registry"),
    "data_sources": ("contracts", "registry"),
    "envs": ("contracts", "registry", "sandbox"),
    "hydra_plugins": ("config", "contracts"),
}
TOPS = ("relax_core", "launchers", *PLUGINS)

LEVELS = {
    "contracts": 0,
    "sandbox": 0,
    "families": 1,
    "config": 1,
    "registry": 1,
    "bus": 2,
    "engines": 2,
    "weights": 2,
    "data": 2,
    "observe": 2,
    "rollout": 3,
    "server": 3,
    "train": 3,
    "tools": 3,
    "roles": 4,
    "control": 5,
    "plan": 6,
    "preflight": 7,
    "cli": 7,
    "launchers": 8,
    "__main__": 9,
    "api": 9,
}
SIDEWAYS = {
    ("config", "registry"),
    ("config", "families"),
    ("families", "registry"),
    ("engines", "weights"),
    ("tools", "rollout"),
    ("tools", "train"),
}
NO_RAY = ("relax_core/train", "relax_core/engines", "relax_core/contracts", "algorithms")


@cache
def sources() -> dict[str, Path]:
    """Returns the file of each module name."""
    found = {}
    for top in TOPS:
        for file in sorted((REPOSITORY / top).rglob("*.py")):
            parts = file.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Returns the absolute names of all imports in a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(sources()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{module}: write imports in full"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in sources() else node.module for name in names}
    return frozenset(found)


def room(module: str) -> str | None:
    """Returns the folder of a module of Relax, or None for a module of a library."""
    parts = module.split(".")
    if parts[0] == "relax_core":
        return parts[1] if len(parts) > 1 else None
    return parts[0] if parts[0] in TOPS else None


def may_import(importer: str, imported: str) -> bool:
    if importer in PLUGINS:
        return imported in (importer, *PLUGINS[importer])
    if imported in PLUGINS:
        return False
    return importer == imported or LEVELS[importer] > LEVELS[imported] or (importer, imported) in SIDEWAYS


def test_every_room_has_its_level() -> None:
    assert {here for module in sources() if (here := room(module))} <= {*LEVELS, *PLUGINS}


def test_imports_run_downward_only() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in sources()
        if (here := room(module))
        for imported in imports(module)
        if (there := room(imported)) and not may_import(here, there)
    ]
    assert wrong == []


def reaches(module: str, seen: set[str]) -> set[str]:
    """Returns all libraries and modules that ``module`` imports, directly or through modules of Relax."""
    if module in seen:
        return set()
    seen.add(module)
    found = set(imports(module))
    for imported in imports(module):
        if imported in sources():
            found |= reaches(imported, seen)
    return found


@pytest.mark.parametrize("folder", NO_RAY)
def test_no_ray_behind(folder: str) -> None:
    prefix = folder.replace("/", ".")
    modules = [module for module in sources() if module.startswith(prefix)]
    assert modules
    wrong = [m for m in modules for name in reaches(m, set()) if name.split(".")[0] == "ray"]
    assert wrong == []


def test_hydra_stays_in_config_and_its_plugins() -> None:
    with_hydra = {room(m) for m in sources() for name in imports(m) if name.split(".")[0] == "hydra"}
    assert with_hydra == {"config", "hydra_plugins"}


def test_every_key_is_read_by_something() -> None:
    """Code outside config/ must read each key. Hydra's plug-ins do not count, because they read only Hydra's keys.

    Exceptions: ``name`` distinguishes options, and the checks in config/ read ``run.confirm``.
    """
    read = {
        node.attr
        for module, file in sources().items()
        if room(module) not in ("config", "hydra_plugins") or module == "relax_core.config.learning_rate_schedule"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
    }
    keys = [field.name for field in dataclasses.fields(RelaxConfig)]
    keys += [
        f"{section}.{field.name}" for section, kind in section_types().items() for field in dataclasses.fields(kind)
    ]
    elsewhere = ("name", "modality", "confirm")
    dead = [key for key in keys if key.split(".")[-1] not in (*read, *elsewhere)]
    assert dead == []


# (core file, name of a plug-in) → reason why the file may name the plug-in.
_PACKAGE = "a package has the name of the env that needs it"
_PLAYED = "a scripted player of this env generates the warm-start data of a builtin model"
NAMED = {
    ("relax_core/data/generated.py", "reverse_digits"): "a generated task has the name of the reward that scores it",
    ("relax_core/config/choices.py", "number_guess"): _PLAYED,
    ("relax_core/config/choices.py", "calculator"): _PLAYED,
    ("relax_core/cli/doctor.py", "gymnasium"): _PACKAGE,
    ("relax_core/cli/doctor.py", "textarena"): _PACKAGE,
    ("relax_core/cli/doctor.py", "mcp"): _PACKAGE,
}
LANGUAGE = "python"  # also an env; in core files the word means the language or the key engine.python


def test_no_core_file_names_a_plug_in() -> None:
    """Relax finds plug-ins only by names in the configuration. Longer texts, such as help pages, may name plug-ins."""
    # `env` is a kind and also a reward's name; `agent` is an env's name and also a section and a field of an env's
    # SPEC.
    neutral = {*KINDS, LANGUAGE, "agent"}
    named = {name for kind in KINDS for name in names(kind)} - neutral
    found = {
        (str(file.relative_to(REPOSITORY)), node.value)
        for module, file in sources().items()
        if room(module) not in PLUGINS
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in named
    }
    assert found == set(NAMED)
