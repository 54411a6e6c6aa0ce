"""`python -m launchers.saved_run` executes a submitted run, in a Ray job or in the first task of a Slurm job."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launchers.local import USAGE, run_in_folder, save_config
from launchers.submitted import read_submitted
from relax_core.config.choices import LauncherKind
from relax_core.config.compose import settled
from relax_core.config.errors import ConfigError
from relax_core.config.schema import LauncherConfig, RelaxConfig
from relax_core.contracts.private_folder import private_files, private_folder
from relax_core.preflight import CHECKS, settle

CONFIG_VARIABLE = "RELAX_SUBMITTED"  # variable with the text of submitted.yaml, for a launcher that cannot send a file


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes the run and returns its exit code. Returns 2 without starting anything if the run cannot work here."""
    parser = argparse.ArgumentParser(prog="python -m launchers.saved_run", description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help=f"submitted.yaml; default: content of ${CONFIG_VARIABLE}")
    parser.add_argument("--ray-address", help="join this Ray cluster; default: start a new cluster on this machine")
    parser.add_argument("--again", action="store_true", help="continue from the newest checkpoint in run.dir, if any")
    parsed = parser.parse_args(arguments)
    if parsed.file is None and CONFIG_VARIABLE not in os.environ:
        parser.error(f"give a file, or set {CONFIG_VARIABLE}")
    try:
        text = os.environ.pop(CONFIG_VARIABLE) if parsed.file is None else parsed.file.read_text(encoding="utf-8")
        config, overrides = read_submitted(text)
        here = as_run_here(config, ray_address=parsed.ray_address)
        config, problems = settled(here, checks=CHECKS, settle=settle)
        if problems:
            raise ConfigError(problems)
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return USAGE
    sys.argv = ["relax", *overrides]  # the summary records them as the run's command line
    with private_files():
        return run_saved(config, again=parsed.again)


def as_run_here(config: RelaxConfig, *, ray_address: str | None) -> RelaxConfig:
    """Returns the configuration with launcher=local.

    ``ray_address`` is the Ray cluster to join, or None for a new cluster.
    """
    submitted = config.launcher
    here = LauncherConfig(
        name=LauncherKind.local,
        ray_address=ray_address,
        nodes=submitted.nodes if ray_address is not None else 1,
        object_store_mb=submitted.object_store_mb,
    )
    return replace(config, launcher=here, run=replace(config.run, panel=False))


def run_saved(config: RelaxConfig, *, again: bool) -> int:
    """Executes the run in ``run.dir`` and returns the exit code.

    With ``again``, resumes from the newest checkpoint, if any.
    """
    folder = Path(config.run.dir)

    def prepare(folder: Path) -> None:
        if not (folder / "config.yaml").exists():  # the submitting machine had no access to the folder
            save_config(config, folder)

    def make() -> Path:
        return private_folder(folder, key="run.dir")

    return run_in_folder(config, make=make, prepare=prepare, again=again)


if __name__ == "__main__":
    sys.exit(main())
