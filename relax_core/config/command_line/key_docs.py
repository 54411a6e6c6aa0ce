"""Reads from conf/ what stands beside each value: key, value as written, comment, file and line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.options import conf_folder
from relax_core.registry import Kind, find, section_of

_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w-]+):(?: +(?P<value>[^#\s].*?))?(?:\s+# (?P<comment>.*))?\s*")
_NO_KEYS = ("defaults", "hydra")  # keys of Hydra itself


@dataclass(frozen=True, kw_only=True)
class DocumentedKey:
    """Is a key of conf/ with its comment.

    ``line`` counts from 1. ``comment`` is empty if the value has none.
    """

    key: str
    value: str
    comment: str
    file: Path
    line: int

    def place(self) -> str:
        """Returns file and line; a file in conf/ is named by its path below conf/."""
        folder = conf_folder()
        inside = self.file.is_relative_to(folder)
        return f"{Path('conf') / self.file.relative_to(folder) if inside else self.file}, line {self.line}"


def keys_of_root() -> list[DocumentedKey]:
    """Returns the keys of conf/config.yaml."""
    return list(_keys_in(conf_folder() / "config.yaml", prefix=""))


def keys_of_option(group: str, file: Path) -> list[DocumentedKey]:
    """Returns the keys of one option's YAML file. An experiment's keys are those of the whole run."""
    text = file.read_text(encoding="utf-8")
    whole = re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE)
    return list(_keys_in(file, prefix="" if whole else f"{group}."))


def keys_of_plugin(kind: Kind, name: str) -> list[DocumentedKey]:
    """Returns the settings of a plug-in without a YAML file, with their defaults.

    A plug-in of a kind without settings has the keys of the option ``plugin``. Raises
    `relax_core.registry.PluginError`.
    """
    config = getattr(find(kind, name), "config", None)
    if config is None:
        return keys_of_option(kind, conf_folder() / kind / "plugin.yaml")
    file = Path(sys.modules[config.__module__].__file__ or config.__module__)
    lines = file.read_text(encoding="utf-8").splitlines()
    return [
        DocumentedKey(
            key=f"{section_of(kind)}.{field.name}",
            value=_default(field),
            comment=(match[1] if (match := re.search(r"\s# (.*)", lines[number - 1])) else "") if number else "",
            file=file,
            line=number or 1,
        )
        for field in dataclasses.fields(config)
        for number in [_line_of(lines, field.name)]
    ]


def _keys_in(file: Path, *, prefix: str) -> Iterator[DocumentedKey]:
    """Yields the keys of a file. conf/ writes mappings in block style, so the indentation tells the section."""
    sections: list[tuple[int, str]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        indent = len(match["indent"])
        sections = [section for section in sections if section[0] < indent]
        path = [name for _, name in sections] + [match["key"]]
        if path[0] in _NO_KEYS or match["value"] is None:
            sections.append((indent, match["key"]))
        else:
            key = prefix + ".".join(path)
            comment = match["comment"] or ""
            yield DocumentedKey(key=key, value=match["value"], comment=comment, file=file, line=number)


def _line_of(lines: list[str], field: str) -> int | None:
    return next((number for number, line in enumerate(lines, 1) if re.match(rf"    {field}\s*:", line)), None)


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    return "???" if field.default_factory is dataclasses.MISSING else str(field.default_factory())
