"""Runs `relax eval MODEL|CHECKPOINT|RUN [key=value …]`: finds what the words name and evaluates it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import yaml

from relax_core.cli.evaluate import Target, evaluate
from relax_core.config.checks.validate import Check
from relax_core.config.command_line.override_words import CommandLine, is_hub_name, of_hub
from relax_core.config.command_line.rerun import rerun_line
from relax_core.config.compose import Settle, run
from relax_core.config.errors import ConfigError
from relax_core.config.options import COMMANDS, conf_folder, yaml_options
from relax_core.families.folder import family_key
from relax_core.families.hf_config import has_hf_config, read_hf_config
from relax_core.train.checkpoints.checkpoint_store import CONFIG, META, CheckpointStore, recover_replaced

USAGE = f"relax {COMMANDS['eval'][0]}"
_TRAINING = (
    "mode",
    "resume",
    "run.steps",
    "run.epochs",
    "run.save_every",
    "run.keep_best",
    "run.patience",
    "eval.every",
)
_BESIDE = "${now:%Y-%m-%d_%H-%M-%S}"


def eval_command(words: Sequence[str], *, checks: Sequence[Check], settle: Settle) -> int:
    """Evaluates the model, checkpoint or run that the first word names; returns the exit code of `evaluate`.

    The word is a Hugging Face folder, an option of conf/model, a checkpoint, or a run, of which the newest checkpoint
    is taken. A checkpoint and a run have their own settings, which ``key=value`` changes. ``checks`` are further checks
    of the configuration that an evaluation needs; ``settle`` derives the values that are not set.
    """
    if "--help" in words or "-h" in words:
        print(f"{USAGE}: {COMMANDS['eval'][1]}")
        return 0
    if not words or words[0].startswith("-") or "=" in words[0].rpartition("/")[2]:
        print(f"relax: {USAGE}", file=sys.stderr)
        return 2
    if problems := list(_not_read(words[1:])):
        print(ConfigError(problems).report(), file=sys.stderr)
        return 2
    try:
        target, line = _target(words[0], words[1:])
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return 2
    return run(line, partial(evaluate, target=target), checks=checks, settle=settle)


def _not_read(overrides: Sequence[str]) -> Iterator[str]:
    """Yields a sentence for each key that only training reads."""
    for word in overrides:
        key, _, value = word.partition("=")
        if key == "plan" and value != "false":
            yield f"{word}: relax eval has no plan. Drop it; plan=true belongs to a run."
        elif key in _TRAINING or key.startswith(("optimizer.", "mode.")):
            yield f"{word}: an evaluation trains nothing, and does not read {key}. Drop it."


def _target(word: str, overrides: Sequence[str]) -> tuple[Target, CommandLine]:
    """Returns what is evaluated, and the command line of its configuration. Raises ValueError."""
    folder = Path(word).expanduser().absolute()
    if (folder / META).is_file():
        return _checkpoint(folder, folder.parent.parent, overrides)
    if (folder / CONFIG).is_file() and (folder / "checkpoints").is_dir():
        recover_replaced(folder / "checkpoints")
        newest = CheckpointStore(folder / "checkpoints", keep_last=1).newest_whole(requirements=(CONFIG,))
        if newest is None:
            raise ValueError(f"{folder} has no checkpoint.")
        for left in newest.left:
            print(f"relax: {left}", file=sys.stderr)
        return _checkpoint(newest.folder, folder, overrides)
    if has_hf_config(folder):
        chosen = any(override.startswith("model=") for override in overrides)
        families = [word.partition("=")[2] for word in overrides if word.startswith("model.family=")]
        option = [] if chosen else [f"model={_option_for(folder, also=next(iter(families), None))}"]
        own = [_in_folder("evaluations/${name}"), *option, f"model.path={folder}"]
        return Target(), CommandLine.of([*own, *overrides])
    if word in yaml_options("model"):
        return Target(), CommandLine.of([_in_folder("evaluations/${name}"), f"model={word}", *overrides])
    if is_hub_name(word) and not folder.exists():
        raise ValueError(f"{word}: no such folder. A model of the hub: {of_hub(word, then='relax eval ')}.")
    raise ValueError(
        f"{word}: neither a run's folder, a checkpoint, a Hugging Face folder, nor one of the models "
        f"{', '.join(yaml_options('model'))}. {USAGE}"
    )


def _checkpoint(checkpoint: Path, run_folder: Path, overrides: Sequence[str]) -> tuple[Target, CommandLine]:
    checkpoint = checkpoint.resolve()  # `best` is a link
    step = CheckpointStore.read_meta(checkpoint).step
    own = [_in_folder(str(run_folder / "evaluations" / f"step_{step}"))]
    if not any(override.startswith("launcher=") for override in overrides):
        own.append("launcher=local")  # the run's own launcher does not matter
    line = rerun_line([str(checkpoint), *own, *overrides])
    return Target(checkpoint=checkpoint, step=step), line


def _in_folder(folder: str) -> str:
    return f"run.dir={folder}/{_BESIDE}"


def _option_for(folder: Path, *, also: str | None) -> str:
    """Returns the option of conf/model that takes a folder of this model's family.

    ``also`` is a further family's name or file. Raises ValueError if there is no option.
    """
    family = read_hf_config(folder).get("model_type")
    for option in yaml_options("model"):
        values = yaml.safe_load((conf_folder() / "model" / f"{option}.yaml").read_text(encoding="utf-8"))
        if values.get("family") == family and values.get("builtin") is None:
            return option
    if family_key(family, also=also) is not None:
        return "folder"
    raise ValueError(f"{folder}: model_type={family!r} in its config.json is of no family that Relax knows.")
