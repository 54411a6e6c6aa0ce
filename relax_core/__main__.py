"""Implements the command line `python -m relax_core`: starts, plans or sweeps runs, and executes the other commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from relax_core.contracts.host_network import exempt_loopback_from_proxy
from relax_core.observe.standard_streams import show_uncaught, unread_streams

if TYPE_CHECKING:
    from relax_core.config.schema import RelaxConfig

INTERRUPTED = 130
USAGE = 2
SHARED = ("export", "import-gguf", "trace", "compare")  # commands that write files that a user may share


def launch(config: RelaxConfig) -> int:
    """Passes a validated configuration to its launcher; returns the exit code."""
    from relax_core.config.choices import LauncherKind

    match config.launcher.name:
        case LauncherKind.local:
            from launchers import local

            return local.launch(config)
        case LauncherKind.slurm:
            from launchers.slurm import sbatch

            return sbatch.launch(config)
        case LauncherKind.ray_job:
            from launchers.ray_job import job_client

            return job_client.launch(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Executes the command line; returns the run's exit code, or 2 for a mistake in the configuration.

    Returns 130 for a Ctrl-C before a run has started. A started run handles Ctrl-C itself.
    """
    sys.excepthook = show_uncaught
    exempt_loopback_from_proxy()
    with unread_streams():
        try:
            return _main(_without_secrets(arguments))
        except KeyboardInterrupt:
            print("relax: interrupted", file=sys.stderr)
            return INTERRUPTED


def _without_secrets(arguments: Sequence[str] | None) -> list[str]:
    """Returns the command-line arguments without secrets, and removes the secrets from the output of `ps`.

    Raises SystemExit for a secret that cannot be read.
    """
    from relax_core.config.errors import ConfigError
    from relax_core.config.hydra_overrides import hide_arguments, without_secrets

    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args = without_secrets(typed)
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        raise SystemExit(USAGE) from None
    if arguments is None:
        hide_arguments(typed, args)
        sys.argv[1:] = args
    return args


def _main(args: list[str]) -> int:
    from relax_core.config.options import COMMANDS

    command, rest = (args[0], args[1:]) if args and args[0] in COMMANDS else ("train", args)
    from relax_core.contracts.private_folder import private_files, unshared_writes

    with unshared_writes() if command in SHARED else private_files():
        if command in ("train", "demo", "rerun"):
            return _run(args, rest, again=command == "rerun")
        return _tool(command, rest)


def _run(args: Sequence[str], rest: Sequence[str], *, again: bool) -> int:
    """Starts a run or a sweep and returns its exit code.

    ``args`` is the command line as typed, and ``rest`` is the command line without the command. With ``again``, repeats
    a saved run.
    """
    if "--version" in rest:
        from relax_core import __version__

        print(f"relax {__version__}")
        return 0
    from relax_core.config.errors import ConfigError

    try:
        if "--help" in rest or "-h" in rest:
            from relax_core.config.help import help_text
            from relax_core.config.rerun import USAGE as RERUN

            print(RERUN if again else help_text(rest))
            return 0
        from relax_core.config.hydra_overrides import CommandLine
        from relax_core.config.rerun import rerun_line

        line = rerun_line(rest) if again else CommandLine.of(rest, typed=args)
    except ConfigError as error:
        print(error.report(), file=sys.stderr)
        return USAGE
    for key, value in line.duplicate_keys().items():
        print(f"relax: {key} is given twice; the last value is used: {key}={value}", file=sys.stderr)
    from launchers.sweep import Sweep  # these imports take a second, and the user may press Ctrl-C during this time
    from relax_core.config.compose import run
    from relax_core.plan.plan_command import show_plan
    from relax_core.plan.unused_keys import unused_keys, warn_of_unused
    from relax_core.preflight import CHECKS, settle

    def launch_warned(config: RelaxConfig) -> int:
        warn_of_unused(unused_keys(config), line.typed)
        return launch(config)

    plan = partial(show_plan, overrides=line.typed)
    return run(line, launch_warned, checks=CHECKS, settle=settle, show_plan=plan, sweep=Sweep(launch))


def _tool(command: str, args: list[str]) -> int:
    if command == "list":
        from relax_core.cli.listing import list_command

        return list_command(args)
    if command == "explain":
        from relax_core.cli.explain_key import explain_command

        return explain_command(args)
    if command == "doctor":
        from relax_core.cli import doctor

        return doctor.main(args)
    if command == "engines":
        from relax_core.cli import engines_command

        return engines_command.main(args)
    if command == "stall":
        from relax_core.cli import stall_command

        return stall_command.main(args)
    if command == "notify":
        from relax_core.cli import notify_command

        return notify_command.main(args)
    if command == "eval":
        from relax_core.cli.eval_command import eval_command
        from relax_core.preflight import EVAL_CHECKS, settle_evaluation

        return eval_command(args, checks=EVAL_CHECKS, settle=settle_evaluation)
    if command == "dashboard":
        from relax_core.cli import dashboard_command

        return dashboard_command.main(args)
    if command == "trace":
        from relax_core.cli import trace_command

        return trace_command.main(args)
    from relax_core.tools import check_model, check_reward, compare, export, import_gguf, lineage

    tools = {
        "compare": compare,
        "lineage": lineage,
        "export": export,
        "import-gguf": import_gguf,
        "check-model": check_model,
        "check-reward": check_reward,
    }
    return tools[command].main(args)


if __name__ == "__main__":
    sys.exit(main())
