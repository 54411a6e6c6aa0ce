"""`relax list` prints all plug-ins, presets, parsers, models and experiments, one line each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from relax_core.config.options import COMMANDS, first_comment, yaml_options
from relax_core.contracts.env import EnvSpec
from relax_core.data.tool_parsers import AUTO, PARSERS
from relax_core.plan.model_dimensions import shape_dimensions, shape_names
from relax_core.registry import (
    ALL_KINDS,
    GROUP_KINDS,
    KINDS,
    Kind,
    PluginError,
    find,
    is_file_plugin,
    key_of,
    names,
    package_of,
    title_of,
)
from relax_core.rollout.judges.judge_prompts import DESCRIPTIONS

_CANNOT = 2


def list_command(files: Sequence[str]) -> int:
    """Prints all available options. ``files`` are plug-in files of the user, listed with their kind.

    Returns 0, or 2 if a plug-in is broken. Errors of broken plug-ins are printed after the list, with file and line.
    """
    if {"-h", "--help"} & set(files):
        print(f"relax {COMMANDS['list'][0]}: {COMMANDS['list'][1]}")
        return 0
    if wrong := [file for file in files if not is_file_plugin(file)]:
        print(f"relax list: {wrong[0]}: relax list takes only FILE.py; without a file it lists all.", file=sys.stderr)
        return _CANNOT
    broken: list[str] = []
    for kind in ALL_KINDS:
        print(f"{title_of(kind)} ({_how(kind)})")
        for name in names(kind):
            print(_plugin_line(kind, name, broken))
        if kind in GROUP_KINDS and kind not in KINDS:  # some options of these groups are not plug-ins
            for option in yaml_options(kind):
                if option not in names(kind):
                    print(_line(option, first_comment(kind, option)))
        print()
    print("\n".join([*_parser_lines(), "", *_model_lines()]))
    if files:
        print("\nYour files")
        for file in files:
            print(_file_line(file, broken))
    for problem in broken:
        print(f"relax: {problem}", file=sys.stderr)
    return _CANNOT if broken else 0


def _parser_lines() -> Iterator[str]:
    """Yields lines for presets of rewards (options without a plug-in), and for parsers of tool calls and verdicts."""
    yield "Presets of rewards (reward=NAME)"
    for option in yaml_options("reward"):
        if option not in names("reward"):
            yield _line(option, first_comment("reward", option))
    yield ""
    yield "Parsers of tool calls (env.tool_parser=NAME)"
    yield _line(AUTO, "the parser for the format in the chat template")
    for name, reader in PARSERS.items():
        yield _line(name, (reader.__doc__ or "").splitlines()[0])
    yield ""
    yield "Parsers of verdicts (reward.judges.NAME.parse=DESCRIPTION)"
    for description, words in DESCRIPTIONS.items():
        yield _line(description, words)


def _how(kind: Kind) -> str:
    """Returns the syntax to choose a plug-in of this kind."""
    key, group, file = key_of(kind), key_of(kind).removesuffix(".name"), f"/path/my_{kind}.py"
    return f"{key}=[NAME, {file}]" if kind == "sink" else f"{group}=NAME, or {key}={file}"


def _plugin_line(kind: Kind, name: str, broken: list[str]) -> str:
    try:
        summary = _summary(kind, name)
    except PluginError as error:
        broken.append(str(error))
        summary = "broken, see below"
    package = package_of(kind, name)
    return _line(name, summary + (f" (from {package})" if package else ""))


def _summary(kind: Kind, name: str) -> str:
    """Returns a plug-in's summary, with the tools of an environment. Raises `PluginError` for a broken plug-in."""
    spec = find(kind, name)
    return spec.summary + (_tools_text(spec) if isinstance(spec, EnvSpec) else "")


def _tools_text(env: EnvSpec) -> str:
    """Returns the names of the tools with default settings. A data row may have different tools."""
    if env.tools is None:
        return ""
    try:
        described: Any = env.tools({"prompt": "", "answer": ""}, env.config(name=env.name))
    except Exception:  # plug-in code may need settings or a real data row
        return " (tools: by settings and row)"
    return f" (tools: {', '.join(tool['function']['name'] for tool in described)})"


def _file_line(file: str, broken: list[str]) -> str:
    problems = []
    for kind in ALL_KINDS:
        try:
            return _line(f"{key_of(kind)}={file}", _summary(kind, file))
        except PluginError as error:
            problems.append(str(error))
    broken.append(problems[0].removeprefix(f"{key_of(ALL_KINDS[0])}="))  # the intended kind is unknown
    return _line(file, "broken, see below")


def _model_lines() -> Iterator[str]:
    yield "Models (model=NAME)"
    for option in yaml_options("model"):
        yield _line(option, first_comment("model", option))
    yield ""
    yield "Shapes to plan with (model.shape=NAME plan=true)"
    for name in shape_names():
        shape = shape_dimensions(name)
        yield _line(name, f"{shape.parameters / 1e9:.1f}B parameters, {shape.layers} layers, {shape.family}")
    yield ""
    yield "Experiments (experiment=NAME)"
    for option in yaml_options("experiment"):
        yield _line(option, first_comment("experiment", option))


def _line(name: str, summary: str) -> str:
    return f"  {name:<30} {summary}"
