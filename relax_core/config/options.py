"""Where conf/ lies and what options it offers."""

from __future__ import annotations

from pathlib import Path

from relax_core.registry import KINDS, names

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """conf/ of the checkout, else the copy inside the installed package."""
    checkout = _PACKAGE.parent
    folder = checkout / "conf" if (checkout / "pyproject.toml").is_file() else _PACKAGE / "conf"
    assert (folder / "config.yaml").is_file(), f"{folder} has no config.yaml: the installation is incomplete"
    return folder


def groups() -> list[str]:
    """Config groups, in alphabetical order."""
    return sorted(path.name for path in conf_folder().iterdir() if path.is_dir())


def yaml_options(group: str) -> list[str]:
    """Options of a group that have a YAML file."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def first_comment(group: str, option: str) -> str:
    """An option's first comment: what it is, in one line. Hydra's own directives aside."""
    text = (conf_folder() / group / f"{option}.yaml").read_text(encoding="utf-8")
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next(comment for comment in comments if not comment.startswith("@package"))


def plugin_options(group: str) -> list[str]:
    """Plug-ins of a group without a YAML: their knobs keep their defaults."""
    return sorted(name for kind in KINDS if kind == group for name in set(names(kind)) - set(yaml_options(group)))


def group_options(group: str) -> list[str]:
    """All options of a group; empty for what is not a group."""
    if not group or not (conf_folder() / group).is_dir():
        return []
    return sorted([*yaml_options(group), *plugin_options(group)])
