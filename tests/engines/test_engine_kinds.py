"""Checks that the registry's table is the only core module that names an engine kind or a model family."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from relax_core.registry import is_builtin, names

ROOT = Path(__file__).resolve().parents[2]
OWN = ("relax_core/engines/embedded/", "relax_core/engines/sglang/")
# Module → the reason why it may name a kind or a family.
NAMES_ONE = {
    "relax_core/registry.py": "its table says where each of Relax's own ones is found",
    "relax_core/families/builtin_families.py": "each family's own name",
    "relax_core/families/tiny_configs.py": "a built-in model's config.json has a model_type",
    "relax_core/data/tool_parsers.py": "a form of tool calls has the name of the family that writes it",
    "relax_core/tools/import_gguf.py": "a GGUF architecture has the name of the family that it becomes",
    "relax_core/tools/tiny_media.py": "a built-in model is written in its family's published layout",
    "relax_core/contracts/judge.py": "the default of a judge's engine, since no YAML file has the judges",
    "relax_core/engines/engine_process.py": "the folder of a server that leaves things behind",
    "relax_core/control/host/run_paths.py": "such folders are removed with the run's",
}


def test_the_core_names_no_kind_of_engine_and_no_family() -> None:
    own = {name for kind in ("engine", "family") for name in names(kind) if is_builtin(kind, name)}  # type: ignore[arg-type]
    found = set()
    for file in sorted((ROOT / "relax_core").rglob("*.py")):
        module = file.relative_to(ROOT).as_posix()
        if not module.startswith(OWN) and any(_names(file, own)):
            found.add(module)
    assert found == set(NAMES_ONE)


def _names(file: Path, own: set[str]) -> Iterator[bool]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value in own
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").startswith(("relax_core.engines.embedded", "relax_core.engines.sglang"))
