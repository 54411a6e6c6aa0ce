"""Starts the workers of the run's Ray, in place of Ray's `setup_worker.py`.

Ray's program imports Ray, prepares the worker's runtime environment and executes the worker, which imports Ray again. A
worker without a runtime environment needs no preparation, so this program requests the worker from the run's
`fork_server`. If the fork server does not exist or does not answer, this program executes the worker. For a worker with
a runtime environment it executes Ray's program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

CONTEXT, LANGUAGE = "--serialized-runtime-env-context", "--language"
NO_ENVIRONMENT = "{}"
FORK_SERVER = "RELAX_FORK_SERVER"  # environment variable with the path of the fork server's socket
FORK_S = 20.0  # timeout in seconds for the fork server; the raylet starts another process after 30 s


def is_plain(words: Sequence[str]) -> bool:
    """Returns whether a worker needs no runtime environment.

    ``words`` are the raylet's arguments for Ray's program: the path of the worker's program, and its arguments.
    """
    options = dict(word.partition("=")[::2] for word in words if word.startswith((CONTEXT, LANGUAGE)))
    return options == {CONTEXT: NO_ENVIRONMENT, LANGUAGE: "PYTHON"} or options == {LANGUAGE: "PYTHON"}


def worker_command(words: Sequence[str]) -> list[str]:
    """Returns the command line of the program to execute, without the interpreter."""
    if is_plain(words):
        return [word for word in words if not word.startswith((CONTEXT, LANGUAGE))]
    return [os.path.join(os.path.dirname(words[0]), "setup_worker.py"), *words]


def ask_fork_server(path: str, command: Sequence[str]) -> bool:
    """Requests a process that executes ``command``. Without an answer, returns False and prints why."""
    import json
    import signal
    import socket

    request = {
        "command": list(command),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "oom_score_adj": _oom_score_adj(),
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "ignored": [signum for signum in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(signum) == signal.SIG_IGN],
    }
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(FORK_S)
            asking.connect(path)
            socket.send_fds(asking, [json.dumps(request).encode()], [0, 1, 2])
            if asking.recv(32):
                return True
            why = "it has ended"
    except OSError as error:
        why = str(error)
    print(f"relax: the fork server does not answer ({why}): the worker is started without it", file=sys.stderr)
    return False


def _oom_score_adj() -> str:
    """Returns this process's oom_score_adj, which the raylet set (the kernel's preference to kill it for memory)."""
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return file.read()


def main(words: Sequence[str]) -> None:
    """Starts the worker."""
    command, path = worker_command(words), os.environ.get(FORK_SERVER)
    if not (path and is_plain(words) and ask_fork_server(path, command)):
        os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main(sys.argv[1:])
