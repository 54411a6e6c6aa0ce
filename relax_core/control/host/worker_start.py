"""Is the program with which the run's own Ray starts a worker, in place of Ray's `setup_worker.py`.

Ray's program imports Ray, prepares the worker's runtime environment and executes the worker, which imports Ray again.
A worker without a runtime environment needs no preparation, so this program, which imports nothing, executes it at
once. For another worker it executes Ray's program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

CONTEXT, LANGUAGE = "--serialized-runtime-env-context", "--language"
NO_ENVIRONMENT = "{}"


def worker_command(words: Sequence[str]) -> list[str]:
    """Returns the words of the command line that is executed.

    ``words`` are those that the raylet gives to Ray's program: the path of the worker's program, and its arguments.
    """
    options = dict(word.partition("=")[::2] for word in words if word.startswith((CONTEXT, LANGUAGE)))
    if options == {CONTEXT: NO_ENVIRONMENT, LANGUAGE: "PYTHON"} or options == {LANGUAGE: "PYTHON"}:
        return [word for word in words if not word.startswith((CONTEXT, LANGUAGE))]
    return [os.path.join(os.path.dirname(words[0]), "setup_worker.py"), *words]


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, *worker_command(sys.argv[1:])])
