"""Relax: reinforcement-learning post-training of language models."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__version__ = "0.1.0"  # pyproject.toml reads it here

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_BESIDE = ("algorithms", "rewards", "envs", "launchers")  # Relax's packages that lie beside this one


class _OwnPackages(MetaPathFinder):
    """Finds Relax's own packages beside this one, before a folder of the same name in the user's project.

    The project's folder is searched after ours, so that plug-in files in a package `rewards` of the user's own can
    import each other.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _BESIDE or (spec := PathFinder.find_spec(fullname, [_ROOT])) is None:
            return None
        assert spec.submodule_search_locations is not None, f"{fullname} is a package"
        folders = (os.path.join(entry or os.getcwd(), fullname) for entry in sys.path)
        others = [folder for folder in folders if os.path.isdir(folder)]
        spec.submodule_search_locations = list(dict.fromkeys([*spec.submodule_search_locations, *others]))
        return spec


if not any(isinstance(finder, _OwnPackages) for finder in sys.meta_path):
    sys.meta_path.insert(0, _OwnPackages())
