"""Changes a module of another package right after its import, before other modules take names from it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls ``change`` with the module ``name`` as soon as this process has loaded it."""
    sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None, f"there is no {fullname}"
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
