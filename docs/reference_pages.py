"""Writes pages of the site: a reference from the code (keys, commands, Python API), results, decisions, folders.

mkdocs runs it (mkdocs.yml, gen-files). A page exists only in the built site.
"""

from __future__ import annotations

import ast
import datetime
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import mkdocs_gen_files
import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from relax_core.config.help import DocumentedKey, keys_of_option, keys_of_plugin, keys_of_root  # noqa: E402
from relax_core.config.options import (  # noqa: E402
    COMMANDS,
    conf_folder,
    first_comment,
    groups,
    plugin_options,
    yaml_options,
)

HELP_S = 120.0
API = ("relax_core.api.run", "relax_core.api.loaded_run")
CONTRACTS = ("algorithm", "bus", "data", "engine", "engine_kind", "env", "family", "judge", "media", "reward", "tree")
RESULTS = ROOT / "benchmarks" / "results"
CODE = ("relax_core", "algorithms", "rewards", "envs", "data_sources", "launchers")
LIST_OF_FOLDERS = "<!-- The list of the folders is written here by docs/reference_pages.py. -->"


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of measured figures; its date and machine may be unknown."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]
    notes: tuple[str, ...] = ()
    date: datetime.date | None = None
    machine: str = ""

    def __post_init__(self) -> None:
        """Checks that each row has as many cells as there are columns."""
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"{self.title}: every row needs {len(self.columns)} cells")


class Result(Table, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of benchmarks/results/: the first table of a benchmark, and further tables."""

    summary: str
    command: str = ""
    tables: tuple[Table, ...] = ()


def write(path: str, lines: Iterable[str]) -> None:
    """Writes a page of the site."""
    with mkdocs_gen_files.open(path, "w") as file:
        file.write("\n".join([*lines, ""]))


def cell(text: str) -> str:
    """Returns a text as the content of a table's cell."""
    return text.replace("|", r"\|").replace("<", "&lt;")


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a Markdown table."""
    lines = (columns, ["---"] * len(columns), *rows)
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def table(keys: Sequence[DocumentedKey]) -> list[str]:
    """Returns a table of keys, with their values in conf/ and their comments."""
    rows = [(f"`{field.key}`", f"`{cell(field.value)}`" if field.value else "", cell(field.comment)) for field in keys]
    return grid(("Key", "Value", "Meaning"), rows)


def configuration() -> None:
    """Writes a page for the keys of every run, and one for each group with its options."""
    links = ", ".join(f"[{group}]({group}.md)" for group in groups())
    lines = [
        "# Configuration",
        "",
        f"Keys of every run (`conf/config.yaml`). The groups have further keys: {links}.",
        "",
    ]
    write("reference/configuration/index.md", [*lines, *table(keys_of_root())])
    for group in groups():
        lines = [f"# {group}", "", f"`{group}=OPTION` chooses one of these options.", ""]
        for option in yaml_options(group):
            file = conf_folder() / group / f"{option}.yaml"
            lines += [f"## {group}={option}", "", first_comment(group, option), "", *table(keys_of_option(group, file))]
        for option in plugin_options(group):
            lines += [f"## {group}={option}", "", *table(keys_of_plugin(group, option))]
        write(f"reference/configuration/{group}.md", lines)


def commands() -> None:
    """Writes the commands of `relax` with their help texts."""
    lines = ["# Commands", ""]
    for name, (usage, meaning) in COMMANDS.items():
        lines += [f"## relax {name}", "", f"`relax {usage}`: {meaning}.", ""]
        if name not in ("train", "demo"):
            command = [sys.executable, "-m", "relax_core", name, "--help"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HELP_S, check=True)
            lines += ["```text", done.stdout.rstrip(), "```", ""]
    write("reference/commands.md", lines)


def python() -> None:
    """Writes the pages on which mkdocstrings shows the docstrings of the API and of the contracts."""
    write("reference/python.md", ["# Python API", "", *(f"::: {module}\n" for module in API)])
    modules = [f"::: relax_core.contracts.{name}\n" for name in CONTRACTS]
    write("reference/contracts.md", ["# Contracts of plug-ins", "", *modules])


def figure(value: str | int | float | None) -> str:
    """Returns a value of a result as the content of a table's cell."""
    return cell(value) if isinstance(value, str) else "" if value is None else f"{value:,}"


def measured(measured_table: Table) -> list[str]:
    """Returns date and machine, the table and its notes."""
    origin = "; ".join(filter(None, (str(measured_table.date or ""), measured_table.machine)))
    columns = [cell(name) for name in measured_table.columns]
    lines = [f"*{origin}*", ""] if origin else []
    lines += grid(columns, ([figure(value) for value in row] for row in measured_table.rows))
    return [*lines, *(f"- {note}" for note in measured_table.notes), ""]


def results() -> None:
    """Writes a page for each file of benchmarks/results/, and the list of all."""
    rows = []
    for file in sorted(RESULTS.glob("*.json")):
        try:
            result = msgspec.json.decode(file.read_bytes(), type=Result)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{file.relative_to(ROOT)}: {error}") from error
        lines = [
            f"# {result.title}",
            "",
            result.summary,
            "",
            *([f"    {result.command}", ""] if result.command else []),
        ]
        lines += measured(result)
        for part in result.tables:
            lines += [f"## {part.title}", "", *measured(part)]
        write(f"results/{file.stem}.md", lines)
        newest = max((part.date for part in (result, *result.tables) if part.date), default=None)
        command = f"`{result.command}`" if result.command else ""
        rows.append((f"[{cell(result.title)}]({file.stem}.md)", command, cell(result.summary), str(newest or "")))
    lines = ["# Results of the benchmarks", "", "[Performance](../performance.md) says how they are measured.", ""]
    write("results/index.md", [*lines, *grid(("Benchmark", "Command", "Result", "Newest date"), rows)])


def decisions() -> None:
    """Adds the list of all records to the page of the decisions."""
    text = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    rows = []
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title, _, date, *_ = file.read_text(encoding="utf-8").splitlines()
        number, _, name = title.removeprefix("# ").partition(". ")
        rows.append((f"[{number}]({file.name})", name, date))
    write("decisions/README.md", [text, *grid(("", "Decision", "Date"), rows)])


def folders() -> None:
    """Adds to the page of the architecture each folder of the code with the first line of its docstring."""
    page = ROOT / "docs" / "architecture.md"
    rows = []
    for file in sorted(one for name in CODE for one in (ROOT / name).rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        start = re.search(r"`([\w/]+\.py)`", text)
        first = text.splitlines()[0].replace("``", "`")
        rows.append((f"`{file.parent.relative_to(ROOT)}/`", cell(first), f"`{start[1]}`" if start else ""))
    before, after = page.read_text(encoding="utf-8").split(LIST_OF_FOLDERS)
    write("architecture.md", [before.rstrip(), "", *grid(("Folder", "Content", "Read first"), rows), after.strip()])


configuration()
commands()
python()
results()
decisions()
folders()
