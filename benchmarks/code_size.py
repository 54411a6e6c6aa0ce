"""Reports the size of the code: ``python -m benchmarks.code_size``.

Prints lines and files by folder, files above 800 lines, functions above 100 lines, files that mention
``max_staleness``, and the lines of tests and benchmarks. No test checks these sizes; a long file or function may mix
two topics.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES, FUNCTION_LINES = 800, 100
PLUGINS = ("algorithms", "rewards", "envs", "data_sources", "launchers", "hydra_plugins")


def python_files(*folders: str) -> list[Path]:
    """Returns the Python files in these folders that are under version control."""
    command = ["git", "ls-files", "--", *(f"{folder}/*.py" for folder in folders)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in listed if (path := ROOT / name).is_file()]


def lines_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def long_functions(files: Sequence[Path]) -> Iterator[tuple[int, str]]:
    """Yields the length and the location of each function above the limit."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    yield length, f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"


def main() -> int:
    core = python_files("relax_core")
    rooms: dict[str, list[int]] = defaultdict(list)
    for file in core:
        parts = file.relative_to(ROOT / "relax_core").parts
        rooms[parts[0] if len(parts) > 1 else "(files)"].append(lines_of(file))
    print("| folder | lines | files |\n| --- | --- | --- |")
    for room, sizes in sorted(rooms.items()):
        print(f"| {room} | {sum(sizes):,} | {len(sizes)} |")
    print(f"| relax_core | {sum(map(sum, rooms.values())):,} | {len(core)} |")
    for name, folders in {
        "plug-ins and launchers": PLUGINS,
        "tests": ("tests",),
        "benchmarks": ("benchmarks",),
    }.items():
        files = python_files(*folders)
        print(f"| {name} | {sum(map(lines_of, files)):,} | {len(files)} |")
    staleness = [file for file in core if "max_staleness" in file.read_text(encoding="utf-8")]
    print(f"\nfiles of relax_core that mention max_staleness: {len(staleness)}")
    everything = python_files("relax_core", *PLUGINS, "tests", "benchmarks", "examples")
    for size, file in sorted(((lines_of(path), path) for path in everything), reverse=True):
        if size > FILE_LINES:
            print(f"file of {size} lines: {file.relative_to(ROOT)}")
    for length, place in sorted(long_functions(everything), reverse=True):
        print(f"function of {length} lines: {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
