"""Checks every command on README.md, CONTRIBUTING.md, AGENTS.md and the pages of docs/, without starting it.

A run must compose to a valid configuration, other commands must pass their real argument parsers, and targets of make,
extras of pip and routes of curl must exist. Commands are indented blocks, fenced shell blocks and inline code. A line
"Needs: …" right above a block is required for GPUs, Slurm and Ray, and for a command that is not checked. Indented
blocks of other text must be fenced with a language.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from relax_core.__main__ import _tool as run_subcommand
from relax_core.cli.explain_key import explain_command
from relax_core.config.choices import LauncherKind
from relax_core.config.compose import compose, run, settled, typed_config
from relax_core.config.errors import ConfigError, NotYet
from relax_core.config.hydra_overrides import CommandLine
from relax_core.config.notify_rules import read_rule
from relax_core.config.options import COMMANDS
from relax_core.config.schema import RelaxConfig
from relax_core.plan.unused_keys import unread_by_evaluation

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")] + sorted(ROOT.glob("docs/**/*.md"))
SHELLS = ("bash", "sh", "shell", "console")
PROGRAMS = ("python", "python3.11", "relax", "make", "pip", "apt-get", "curl")  # first words of inline commands
HARMLESS = ("printf", "chmod", "cat", "jq")  # the test checks only the shell syntax of these commands
NEEDS = re.compile(r"^Needs: (.*)\.$", re.MULTILINE)
OVERRIDE = re.compile(r"[+~]?[a-z_]+(?:[./][\w.]+)*=")
READERS_PART = re.compile(r"no such (?:file|folder)|pip install 'relax-core\[")
PLACEHOLDERS = ("…", "...")
SHOWN_FILE = re.compile(r"^`([\w/]+\.(?:py|yaml))`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INSTALLED_AS = {"nvidia-ml-py": "pynvml"}


@dataclass(frozen=True)
class Block:
    """A block of lines on a page. ``needs`` is the text after "Needs:" above the block."""

    place: str
    lines: tuple[str, ...]
    needs: str
    inline: bool = False


# -- the commands of the pages ----------------------------------------------------------------------------------------
def blocks(page: Path) -> Iterator[Block]:
    """Yields indented blocks, fenced shell blocks and commands in inline code."""
    name, lines = page.relative_to(ROOT), page.read_text(encoding="utf-8").splitlines()
    prose: list[str] = []
    index = 0
    while index < len(lines):
        line, first = lines[index], index
        if (fence := re.match(r" *```", line)) is not None:
            index = next(i for i in range(index + 1, len(lines)) if lines[i].startswith(fence[0]))
            if line.strip().removeprefix("```") in SHELLS:
                yield Block(f"{name}:{first + 1}", tuple(lines[first + 1 : index]), _needs(lines[:first]))
        elif line.startswith("    ") and not (index and lines[index - 1].strip()):
            while index + 1 < len(lines) and lines[index + 1].startswith("    "):
                index += 1
            found = tuple(one.strip() for one in lines[first : index + 1])
            yield Block(f"{name}:{first + 1}", found, _needs(lines[:first]))
        else:
            prose.append(line)
        index += 1
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(prose)):
        if (words := span.split()) and words[0] in PROGRAMS and len(words) > 1:
            yield Block(f"{name}, inline", (" ".join(words),), "", inline=True)


def _needs(above: Sequence[str]) -> str:
    """Returns the text after "Needs:" in the paragraph directly above a block."""
    text = "\n".join(above).rstrip("\n").rpartition("\n\n")[2]
    return " ".join(NEEDS.findall(text))


def commands() -> dict[str, list[Block]]:
    """Returns for each distinct command the blocks that contain it."""
    found: dict[str, list[Block]] = {}
    for page in PAGES:
        for block in blocks(page):
            for line in re.sub(r"\\\n", " ", "\n".join(block.lines)).splitlines():
                if line and not line.startswith(("#", "{")):  # comments, and rows of a data file
                    kept = [one for one in found.get(line, []) if one.needs == block.needs]
                    if not kept:
                        found.setdefault(line, []).append(block)
    return found


COMMANDS_OF_PAGES = commands()


def words_of(line: str) -> list[list[str]]:
    """Returns the words of each command in a line, without the comment. Raises ValueError for an open quote."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word in ("&&", "||", ";", "|"):
            found.append([])
        elif word not in PLACEHOLDERS:
            found[-1].append(word)
    return found


# -- the checks of one command ----------------------------------------------------------------------------------------
class NotChecked(Exception):
    """Raised for a command of an unknown kind."""


class Accepted(BaseException):
    """Raised by a parser in place of the work of its command."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Changes to a working folder with the plug-in files that the pages show."""
    folder = tmp_path_factory.mktemp("reader")
    for page in PAGES:
        for name, text in SHOWN_FILE.findall(page.read_text(encoding="utf-8")):
            file = folder / (Path(name).name if name.startswith("examples/") else name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("my_agent.py", "run.sh"):
        (folder / name).touch()
    for environment in (".venv-agents", ".venv-verifiers"):
        (folder / environment / "bin").mkdir(parents=True)
        (folder / environment / "bin" / "python").symlink_to(sys.executable)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TOKEN", "secret")
        yield folder


@pytest.mark.parametrize("line", COMMANDS_OF_PAGES)
def test_a_command_is_valid(line: str, here: Path) -> None:
    found = COMMANDS_OF_PAGES[line]
    where = ", ".join(block.place for block in found)
    needed: set[str] = set()
    try:
        if "=" in line and OVERRIDE.match(shlex.split(line, comments=True)[0]):
            own = ("model=qwen3_vl" if "media_keys" in line else "model=qwen3", "model.path=FOLDER")
            check_run([*own, *words_of(line)[0]])
        elif re.match(r"[a-z]+/\w+ ", line):
            read_rule(line.split("#")[0])
        else:
            for words in words_of(line):
                needed |= check(words, line, here, inline=found[0].inline)
    except NotChecked as unknown:
        if lacking := [block.place for block in found if not block.needs]:
            pytest.fail(f'{lacking}: {unknown}: add a check to this file, or a line "Needs: …." above the block')
    except SystemExit as error:
        pytest.fail(f"{where}: the parser of the command refuses it: exit code {error.code}")
    for need in needed:
        lacking = [block.place for block in found if need not in block.needs and not block.inline]
        assert not lacking, f'{lacking}: a line "Needs: … {need} …." above the block is missing'


def check(words: Sequence[str], line: str, here: Path, *, inline: bool) -> set[str]:
    """Checks one command. Returns the special resources that it needs. Raises NotChecked."""
    if words and re.match(r"[A-Z]+=", words[0]):
        return check_shell(line)
    match [Path(words[0]).name, *words[1:]]:
        case ["relax", *rest]:
            return check_relax(rest, here, mention=inline)
        case ["python", "-m", "relax_core", *rest]:
            return check_relax(rest, here, mention=inline)
        case ["python", "-P", "-m", "relax_core"]:
            pass
        case ["python", "-m", "pytest", *rest]:
            paths = [word for word in rest if not word.startswith("-")]
            assert paths and all((ROOT / path).exists() for path in paths), paths
        case ["python" | "python3.11", "-m", "venv", _]:
            pass
        case ["python", "-m", module, *rest]:
            check_module(module, [word.strip("[]") for word in rest] if inline else rest, mention=inline)
        case ["python", "-c", code]:
            compile(code, "page", "exec")
        case ["python", script]:
            compile((ROOT / script).read_text(encoding="utf-8"), script, "exec")
        case ["make", *rest]:
            check_make(rest)
        case ["pip", "install", *rest]:
            check_pip(rest)
        case ["apt-get", "install", *rest]:
            known = {*re.findall(r"[\w.-]+", (ROOT / "Makefile").read_text(encoding="utf-8"))}
            assert not {word for word in rest if not word.startswith("-")} - known
        case ["pre-commit", "install"]:
            assert (ROOT / ".pre-commit-config.yaml").is_file()
        case ["curl", *_]:
            check_curl(line)
        case ["grep", *_]:
            subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=60)
        case ["tensorboard", "--logdir", _]:
            assert find_spec("tensorboard")
        case ["run"] if words[0] == ".ci/run":
            assert os.access(ROOT / words[0], os.X_OK)
        case [program, *_] if program in HARMLESS:
            return check_shell(line)
        case _:
            raise NotChecked(f"{shlex.join(words)} is a command of no known kind")
    return set()


def check_relax(words: Sequence[str], here: Path, *, mention: bool) -> set[str]:
    """Checks a run or another command of Relax. A mention may lack arguments."""
    words = [re.sub(r"/path/(\w+\.py)", rf"{here}/\1", word) for word in words]
    if not words or words[0] not in COMMANDS or words[0] in ("train", "demo"):
        return check_run(words[1:] if words[:1] in (["train"], ["demo"]) else words, mention=mention)
    command, *rest = words
    if mention and not rest:
        return set()
    match command:
        case "list":
            assert all((here / file).is_file() for file in rest), rest
        case "explain":
            assert explain_command(rest) == 0, rest
        case "eval":
            assert not list(unread_by_evaluation(rest[1:]))
            own = ("model=qwen3", f"model.path={rest[0]}") if rest[0].startswith("/models/") else ()
            check_run([*own, *rest[1:]])
        case "rerun":
            check_run([word for word in rest[1:] if word != "--trust"])
        case _:
            given = parsed(lambda: run_subcommand(command, rest))
            if command == "check-reward":
                check_run(given.words)
    return set()


def parsed(main: Callable[[], object], module: str = "relax", words: Sequence[str] = ()) -> argparse.Namespace:
    """Returns the arguments that the parser of a command accepts. Raises SystemExit if it refuses them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [module, *words])
        for name in ("parse_args", "parse_intermixed_args"):
            real = getattr(argparse.ArgumentParser, name)

            def parse(self: argparse.ArgumentParser, *given: Any, real: Callable[..., Any] = real) -> None:
                raise Accepted(real(self, *given))

            patch.setattr(argparse.ArgumentParser, name, parse)
        try:
            main()
        except Accepted as accepted:
            given = accepted.args[0]
            assert isinstance(given, argparse.Namespace)
            return given
    raise AssertionError("the command parsed no arguments")


def check_run(words: Sequence[str], *, mention: bool = False) -> set[str]:
    """Composes and validates the configuration. Only the reader's files and optional packages may be missing.

    A mention and a plan may also lack values.
    """
    found: set[str] = set()
    planned = any(word.startswith("plan=") for word in words)
    for config, problems in configurations(tuple(word for word in words if word != "--help")):
        wrong = [
            one
            for one in problems
            if not READERS_PART.search(one) and not ((planned or mention) and isinstance(one, NotYet))
        ]
        assert not wrong, wrong
        if config is not None and not planned:
            found |= {"GPU"} if config.placement.gpus_per_node else set()
            found |= {LauncherKind.slurm: {"Slurm"}, LauncherKind.ray_job: {"Ray"}}.get(config.launcher.name, set())
    return found


@cache
def configurations(words: tuple[str, ...]) -> list[tuple[RelaxConfig | None, Sequence[str]]]:
    """Returns each run's configuration with its problems. A sweep has several runs; here they are only planned."""
    found: list[tuple[RelaxConfig | None, Sequence[str]]] = []

    class Recorder:
        def refuse(self, *given: object, error: ConfigError, **named: object) -> None:
            found.append((None, error.problems))

        def take(self, *given: object, **named: object) -> None:
            """Is not called for plans."""

        def finish(self) -> int:
            return 0

    def show_plan(config: RelaxConfig, problems: Sequence[str]) -> int:
        found.append((config, problems))
        return 0

    try:
        if any(word.startswith("-") for word in words):
            line = CommandLine.of([word for word in (*words, "plan=true") if word != "hydra/launcher=relax"])
            assert run(line, lambda config: 1, show_plan=show_plan, sweep=Recorder()) == 0
        else:
            found.append(settled(typed_config(compose(words))))
    except ConfigError as error:
        found.append((None, error.problems))
    return found


def check_module(module: str, words: Sequence[str], *, mention: bool) -> None:
    """Passes the words to the parser of the module's main function. A module without a parser accepts no words."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        module, spec = f"{module}.__main__", find_spec(f"{module}.__main__")
    assert spec is not None and spec.origin is not None, f"there is no module {module}"
    if not re.search(r"parse_\w*args\(", Path(spec.origin).read_text(encoding="utf-8")):
        assert not words, f"{module} takes no arguments"
    elif words or not mention:
        parsed(importlib.import_module(module).main, module, words)


def check_make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, given, _ = word.partition("=")
        pattern = rf"^{name} \?=" if given else rf"^{name}:(?!=)"
        assert re.search(pattern, text, re.MULTILINE), f"the Makefile has no {name}"


def check_pip(words: Sequence[str]) -> None:
    """Checks that each extra exists, and that requirements files or code name each other package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for word in words:
        if (own := re.fullmatch(r"(?:\.|relax-core)\[([\w,]+)\]", word)) is not None:
            assert set(own[1].split(",")) <= set(extras), word
        elif word == "constraints.txt":
            assert (ROOT / word).is_file()
        elif not word.startswith("-"):
            name = INSTALLED_AS.get(word, word.partition("==")[0])
            assert is_in_code(name), f"{name}: no requirement and no code names this package"


def check_curl(line: str) -> None:
    """Checks that the path of the address is a route in the code."""
    check_shell(line)
    paths = re.findall(r"(?:endpoint\)|URL|:\d+)((?:/\w+)+)", line)
    assert paths, line
    for path in paths:
        if path == "/v1/traces":
            continue  # the address of an OpenTelemetry collector
        route = re.sub("/SESSION(?:/.*)?$", "", path)
        assert is_in_code(f'"{route}"'), f"no code has the route {route}"


def is_in_code(text: str) -> bool:
    """Returns whether a file of requirements or of the code contains the text."""
    searched = ("*.toml", "*.txt", "Makefile", ".pre-commit-config.yaml", "relax_core", "benchmarks")
    command = ["git", "grep", "-qiF", text, "--", *searched]
    return subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 0


def check_shell(line: str) -> set[str]:
    done = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set()


# -- the checks themselves --------------------------------------------------------------------------------------------
def test_the_pages_have_commands() -> None:
    assert len(COMMANDS_OF_PAGES) > 200


@pytest.mark.parametrize(
    "line",
    [
        "python -m relax_core algo=nothing",
        "python -m relax_core optimizer.rl=1",
        "python -m relax_core optimizer.lr=-1",
        "python -m relax_core -m optimizer.lr=1e-3,-1",
        "relax engines RUN ad 2",
        "relax lineage",
        "relax eval RUN eval.row=3",
        "relax explain optimizer.rl",
        "python -m benchmarks.throughput --round 3 --nothing",
        "python -m benchmarks.nothing",
        "python -m tests.conformance.generate --nothing",
        "make nothing",
        "make run ARG=1",
        "pip install 'relax-core[nothing]'",
        "pip install no-such-package-of-relax",
        "apt-get install -y nothing-at-all",
        "curl $URL/rollout/nothing",
        "python -m pytest tests/nothing",
        "chmod $(",
        "nothing --at=all",
    ],
)
def test_a_wrong_command_is_found(line: str, here: Path) -> None:
    (words,) = words_of(line)
    with pytest.raises((AssertionError, SystemExit, NotChecked)):
        check(words, line, here, inline=False)
