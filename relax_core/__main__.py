"""`python -m relax_core`: compose → validate → plan, or hand to a launcher. And the commands beside a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_core.config.schema import RelaxConfig

INTERRUPTED = 130


def launch(config: RelaxConfig) -> int:
    """Runs a validated configuration where ``launcher`` says. Returns the exit code."""
    from launchers import choose

    return choose.launch(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, the run's own, 2 for a mistake in the configuration, or 130 for a
    Ctrl-C while nothing ran yet: a run takes its own."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("relax: interrupted", file=sys.stderr)
        return INTERRUPTED


def _main(words: list[str]) -> int:
    from relax_core.config.compose import run  # these take a second, in which a Ctrl-C may come
    from relax_core.config.help import help_text
    from relax_core.plan.command import show_plan
    from relax_core.preflight import CHECKS

    if "--help" in words or "-h" in words:
        print(help_text())
        return 0
    if words[:1] == ["list"]:
        from relax_core.cli.listing import list_command

        return list_command(words[1:])
    if words in (["doctor"], ["doctor", "--clean"]):
        from relax_core.cli.doctor import doctor_command

        return doctor_command(clean="--clean" in words)
    from launchers.sweep import Sweep

    return run(words, launch, checks=CHECKS, show_plan=show_plan, sweep=Sweep())


if __name__ == "__main__":
    sys.exit(main())
