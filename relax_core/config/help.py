"""Builds the text of `relax --help`; options, keys and their comments come from conf/."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.error_messages import missing_name
from relax_core.config.errors import ConfigError
from relax_core.config.options import (
    COMMANDS,
    conf_folder,
    first_comment,
    group_options,
    groups,
    plugin_options,
    yaml_options,
)
from relax_core.registry import GROUP_KINDS, Kind, PluginError, find, known, section_of

_LINE = re.compile(r"(?P<indent> *)(?P<key>[\w-]+):(?: +(?P<value>[^#\s].*?))?(?:\s+# (?P<comment>.*))?\s*")
_NO_KEYS = ("defaults", "hydra")  # Hydra's own keys


@dataclass(frozen=True, kw_only=True)
class DocumentedKey:
    """Holds a key of conf/ with its comment, or "" without a comment; ``line`` counts from 1."""

    key: str
    value: str
    comment: str
    file: Path
    line: int

    def place(self) -> str:
        """Returns the file and line as text; the path of a file in conf/ begins with conf/."""
        folder = conf_folder()
        inside = self.file.is_relative_to(folder)
        return f"{Path('conf') / self.file.relative_to(folder) if inside else self.file}, line {self.line}"


def keys_of_root() -> list[DocumentedKey]:
    """Returns the keys of conf/config.yaml."""
    return list(_keys_in(conf_folder() / "config.yaml", prefix=""))


def keys_of_option(group: str, file: Path) -> list[DocumentedKey]:
    """Returns the keys in one option's YAML file; for an experiment, full keys of the whole run."""
    text = file.read_text(encoding="utf-8")
    whole = re.search(r"^#\s*@package\s+_global_", text, re.MULTILINE)
    return list(_keys_in(file, prefix="" if whole else f"{group}."))


def keys_of_plugin(kind: Kind, name: str) -> list[DocumentedKey]:
    """Returns the settings of a plug-in that has no YAML file, with their defaults.

    If plug-ins of a kind have no settings, returns the keys of the option ``plugin``. Raises
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
    """Yields the keys of a file.

    Files of conf/ use block style, so the indentation of a key determines its section.
    """
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


_HEAD = """\
Relax: reinforcement-learning post-training of language models.

  relax [group=option ...] [key=value ...]

Examples
  relax                                          the demo: a tiny model learns to reverse digits
  relax mode=colocate run.steps=60 seed=1        strict on-policy, another seed
  relax data=file data.path=train.jsonl reward=math model=qwen3 model.path=/models/Qwen3-0.6B
  relax -m mode.max_staleness=0,1,4              three runs, one after another
  relax plan=true experiment=qwen3_4b_async_8gpu   what would run, where, in how much memory

Commands (relax is python -m relax_core); each has --help
{commands}

Groups: each is a set of keys that belong together; group=option chooses a file of conf/group (the default is marked *)
"""

_GROUPS = {
    "algo": "the loss and the advantages",
    "bus": "the transfer of samples between roles",
    "data": "the source of prompts",
    "engine": "the inference engine that generates responses",
    "env": "the environment of an episode",
    "experiment": "settings of several groups under one name; keys on the command line override them",
    "gateway": "the HTTP server for the page and for orders",
    "launcher": "the scheduler and the machines of a run",
    "modality": "inputs of the model in addition to text",
    "mode": "whether rollout and trainer alternate, and the maximum staleness",
    "model": "the model that is trained",
    "parallel": "layout of the trainer: ranks and micro-batches",
    "placement": "GPUs of each role",
    "reward": "the score of an answer",
    "tracker": "where metrics go",
}

_KEYS = """
Common keys
  seed                     seed of data order, sampling and trainer
  run.steps                train steps
  run.dir                  the run's folder
  resume                   auto, or a checkpoint's folder
  plan                     true: print what would run and stop | json: the same for a program | rehearse: docs/plan.md
  optimizer.lr             learning rate
  algo.group_size          samples per prompt
  rollout.prompts_per_step prompts per train step
  rollout.max_new_tokens   maximum response tokens
  rollout.temperature      sampling temperature
  mode.max_staleness       weight versions that a trained token may lag behind
  parallel.dp, .tp, .pp …  layout of the trainer ranks; or a layout by name: parallel=tp2
  model.path, data.path    a Hugging Face folder; a .jsonl or .parquet file
  eval.every               train steps between greedy evaluations

Flags
  --cfg job                print the whole configuration and stop
  --config-dir FOLDER      your own options in addition to conf/: FOLDER/experiment/mine.yaml is experiment=mine
  --version                Relax's version
  algo=ppo --help          the keys of an option, here PPO
  -m, --multirun           run every combination of comma-separated values, one after another
  --hydra-help             Hydra's own flags

Completion with the tab key: put this line into ~/.bashrc (for other shells: install=zsh, install=fish)
  eval "$(relax -sc install=bash)"

Comments in conf/ and relax explain KEY document every key. Your own plug-in:
algo.name=/path/my_algo.py (docs/plugins/README.md).
"""


def help_text(chosen: Sequence[str] = ()) -> str:
    """Returns the help page; if options are chosen (``algo=ppo``), returns the keys of each option.

    Raises `ConfigError` for an option that does not exist.
    """
    options = [word.partition("=") for word in chosen if word.partition("=")[0].removesuffix(".name") in groups()]
    if options:
        return "\n".join(_option_help(key, choice) for key, _, choice in options)
    return _full_page()


def _option_help(key: str, choice: str) -> str:
    """Returns the help for one option; ``key`` is a group, or the key of a plug-in's name, such as algo.name."""
    group = key.removesuffix(".name")
    if key == group and not choice:
        options = ", ".join(group_options(group))
        raise ConfigError([f"{group} has no option here: relax {group}=OPTION --help, with one of {options}."])
    if key == group and choice not in group_options(group):
        raise ConfigError([missing_name(group, choice, group_options(group))])
    if choice in yaml_options(group):
        about, keys = first_comment(group, choice), keys_of_option(group, conf_folder() / group / f"{choice}.yaml")
    else:
        kind = next(
            group_kind for group_kind in GROUP_KINDS if group_kind == group
        )  # in all other groups every option has a YAML file
        try:
            about, keys = find(kind, choice).summary, keys_of_plugin(kind, choice)
        except PluginError as error:
            raise ConfigError([str(error)]) from error
    return "\n".join([f"{group}={choice}: {about}", *_key_lines(keys), ""])


def _key_lines(keys: Sequence[DocumentedKey]) -> list[str]:
    typed = [f"{field.key}={field.value}" for field in keys if field.key != "name" and not field.key.endswith(".name")]
    width = min(40, max(map(len, typed), default=0))
    comments = [field.comment for field in keys if field.key != "name" and not field.key.endswith(".name")]
    return [f"  {word:<{width}}  {comment}".rstrip() for word, comment in zip(typed, comments, strict=True)]


def _full_page() -> str:
    from omegaconf import OmegaConf

    defaults: dict[str, str] = {}
    for entry in OmegaConf.load(conf_folder() / "config.yaml").defaults:
        if not isinstance(entry, str):
            defaults.update({str(key): str(value) for key, value in entry.items()})
    lines = []
    for group in groups():
        lines.append(f"  {group:<18} {_GROUPS[group]}")
        width = max(15, *map(len, yaml_options(group)))
        for option in yaml_options(group):
            mark = "*" if defaults.get(group) == option else " "
            lines.append(f"   {mark} {option:<{width}} {first_comment(group, option)}")
        for kind in GROUP_KINDS:
            if kind == group and (options := plugin_options(group)):
                summaries = known(kind)
                lines += [f"     {option:<{width}} {summaries[option]}" for option in options]
    commands = "\n".join(f"  relax {usage:<24} {what}" for usage, what in COMMANDS.values())
    return _HEAD.format(commands=commands) + "\n".join(lines) + "\n" + _KEYS
