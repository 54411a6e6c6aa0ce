"""`python -m relax_core`: compose → validate → hand to a launcher. Nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from relax_core.config.compose import run
from relax_core.config.help import help_text
from relax_core.config.schema import RelaxConfig
from relax_core.preflight import CHECKS


def launch(config: RelaxConfig) -> int:
    """Runs a validated configuration where ``launcher`` says. Returns the exit code."""
    from launchers import local

    return local.launch(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, the run's own, or 2 for a mistake in the configuration."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        print(help_text())
        return 0
    return run(words, launch, checks=CHECKS)


if __name__ == "__main__":
    sys.exit(main())
