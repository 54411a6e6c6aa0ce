"""Finds conf/ with its groups and options, and lists the commands of `relax`."""

from __future__ import annotations

from pathlib import Path

from relax_core.registry import GROUP_KINDS, names

_PACKAGE = Path(__file__).resolve().parents[1]


def conf_folder() -> Path:
    """Returns conf/ of the checkout, or the copy inside the installed package."""
    folder = shipped("conf")
    assert (folder / "config.yaml").is_file(), f"{folder} has no config.yaml: the installation is incomplete"
    return folder


def shipped(folder: str) -> Path:
    """Returns the folder ``conf`` or ``examples``: inside the installed package, or next to it in a checkout."""
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def groups() -> list[str]:
    """Returns the config groups in alphabetical order."""
    return sorted(path.name for path in conf_folder().iterdir() if path.is_dir())


def yaml_options(group: str) -> list[str]:
    """Returns the options of a group that have a YAML file."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def first_comment(group: str, option: str) -> str:
    """Returns the first comment of an option, which describes the option; skips Hydra's own directives."""
    text = (conf_folder() / group / f"{option}.yaml").read_text(encoding="utf-8")
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next(comment for comment in comments if not comment.startswith("@package"))


def plugin_options(group: str) -> list[str]:
    """Returns the plug-ins of a group that have no YAML file; their settings have default values."""
    return sorted(name for kind in GROUP_KINDS if kind == group for name in set(names(kind)) - set(yaml_options(group)))


def group_options(group: str) -> list[str]:
    """Returns all options of a group; empty for an unknown group."""
    if not group or not (conf_folder() / group).is_dir():
        return []
    return sorted([*yaml_options(group), *plugin_options(group)])


# Command of `relax` → usage and description.
COMMANDS = {
    "train": ("train [key=value ...]", "starts a run; the word train is optional"),
    "demo": ("demo [key=value ...]", "a tiny model learns to reverse digits, in a minute; the same as train alone"),
    "rerun": ("rerun RUN [--trust] [key=value ...]", "repeats a run from its config.yaml in a new folder"),
    "eval": ("eval MODEL|CHECKPOINT|RUN [key=value ...]", "evaluates a model without training (docs/evaluation.md)"),
    "engines": ("engines RUN [add N|remove N|watch]", "shows and changes the engines of a run (docs/elastic.md)"),
    "stall": ("stall RUN", "shows the waits of a live run, and the stacks of the blocking workers"),
    "notify": (
        "notify test URLS_FILE",
        "sends a test message to each address of a file (docs/notify.md)",
    ),
    "list": ("list [FILE.py ...]", "algorithms, rewards, envs, models; your own files with their kind"),
    "explain": ("explain KEY", "a key's value, type, range, where it is set, its class"),
    "compare": ("compare FOLDER ...", "runs or sweeps side by side: a table, and curves in one picture"),
    "lineage": ("lineage RUN [uid=...]", "the history of each sample of a run"),
    "dashboard": (
        "dashboard [FOLDER ...]",
        "opens a page in the browser: curves, samples and logs of runs (docs/dashboard.md)",
    ),
    "trace": ("trace RUN [--steps A:B]", "a run's timeline, for ui.perfetto.dev"),
    "export": ("export CHECKPOINT OUT", "a checkpoint as a Hugging Face folder"),
    "import-gguf": ("import-gguf FILE OUT", "a GGUF file as a Hugging Face folder"),
    "check-reward": ("check-reward [key=value ...]", "wrong answers that a run's reward accepts (docs/rewards.md)"),
    "check-model": ("check-model FOLDER", "whether the trainer can load a Hugging Face folder"),
    "doctor": ("doctor [--clean]", "checks whether a run can work on this machine; removes remains of killed runs"),
}
