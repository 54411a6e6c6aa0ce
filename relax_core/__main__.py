"""`python -m relax_core`: compose → validate → plan, or hand to a launcher. And the commands beside a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from relax_core.config.compose import run
from relax_core.config.help import help_text
from relax_core.config.schema import RelaxConfig
from relax_core.plan.command import show_plan
from relax_core.preflight import CHECKS


def launch(config: RelaxConfig) -> int:
    """Runs a validated configuration where ``launcher`` says. Returns the exit code."""
    from launchers import choose

    return choose.launch(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, the run's own, or 2 for a mistake in the configuration."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        print(help_text())
        return 0
    if words[:1] == ["list"]:
        from relax_core.cli.listing import list_command

        return list_command(words[1:])
    if words == ["doctor"]:
        from relax_core.cli.doctor import doctor_command

        return doctor_command()
    from launchers.sweep import Sweep

    return run(words, launch, checks=CHECKS, show_plan=show_plan, sweep=Sweep())


if __name__ == "__main__":
    sys.exit(main())
