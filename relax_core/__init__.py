"""Relax post-trains language models by reinforcement learning.

docs/api.md describes the use as a library. Start reading in `__main__.py` (command line) or in `api/run.py` (library).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_core.api.loaded_run import LoadedRun, Summary, load_run
    from relax_core.api.run import RunFailed, run
    from relax_core.config.errors import ConfigError
    from relax_core.contracts.reward import RewardInput, RewardOutput

__version__ = "0.1.0"  # pyproject.toml reads the version from this line

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_SIBLINGS = ("algorithms", "rewards", "envs", "data_sources", "launchers")  # Relax's other top-level packages


class _OwnPackages(MetaPathFinder):
    """Makes Python import Relax's other top-level packages, not folders of the same name in the user's project.

    The project's folder is searched second, because plug-in files in a user's package `rewards` must find each other.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a package of Relax, or None for other packages."""
        if fullname not in _SIBLINGS or (spec := PathFinder.find_spec(fullname, [_ROOT])) is None:
            return None
        assert spec.submodule_search_locations is not None, f"{fullname} is a package"
        folders = (os.path.join(entry or os.getcwd(), fullname) for entry in sys.path)
        existing = [folder for folder in folders if os.path.isdir(folder)]
        spec.submodule_search_locations = list(dict.fromkeys([*spec.submodule_search_locations, *existing]))
        return spec


if not any(isinstance(finder, _OwnPackages) for finder in sys.meta_path):
    sys.meta_path.insert(0, _OwnPackages())


def _put_working_folder_last() -> None:
    """Moves the working folder to the end of `sys.path` if ``python -m`` starts a module of Relax.

    Python searches this folder first, so a user's random.py or ray.py would replace the library.
    """
    if sys.argv[:1] != ["-m"]:
        return
    folder = os.getcwd()
    if sys.path[:1] == [folder] and not sys.flags.safe_path and folder != _ROOT:
        del sys.path[0]
    if folder not in sys.path:
        sys.path.append(folder)


_put_working_folder_last()

_EXPORTS = {  # Maps a name to its module. The first use of the name imports the module, so `import relax_core` is fast.
    "run": "relax_core.api.run",
    "RunFailed": "relax_core.api.run",
    "load_run": "relax_core.api.loaded_run",
    "LoadedRun": "relax_core.api.loaded_run",
    "Summary": "relax_core.api.loaded_run",
    "ConfigError": "relax_core.config.errors",
    "RewardInput": "relax_core.contracts.reward",
    "RewardOutput": "relax_core.contracts.reward",
}
__all__ = [
    "ConfigError",
    "LoadedRun",
    "RewardInput",
    "RewardOutput",
    "RunFailed",
    "Summary",
    "__version__",
    "load_run",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
