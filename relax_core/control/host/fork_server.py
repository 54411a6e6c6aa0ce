"""The fork server imports torch and Megatron once for a run on CPUs, and forks the workers of the run's Ray.

Without a fork server these imports take up to three seconds of CPU time in each worker. `worker_start` requests a
worker through a Unix socket in the run's folder, and exits when it has the worker's process id. The worker is a child
of this process. Ray cannot be imported before the fork, because it would keep the settings of this process's
environment. The process must have one thread when it forks, so the imported modules must not start threads. The process
exits when its owner closes its stdin; its workers continue and belong to Ray.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REQUEST_BYTES = 1 << 20  # maximum bytes of a request; the environment is its largest part
REQUEST_S = 5.0  # seconds that a request may take after the connection
STREAMS = 3  # stdin, stdout, stderr
REAP_S = 1.0  # interval in seconds at which ended workers are reaped


def serve(listener: socket.socket, *, owner: int) -> dict[str, Any]:
    """Forks a worker for each request. Returns only in a worker, with the worker's request.

    A request is JSON with the command line, the environment, the working folder, oom_score_adj, and the blocked and the
    ignored signals. The client also sends the descriptors of stdin, stdout and stderr. The response is the worker's
    process id. This process exits at the end of file of the descriptor ``owner``.
    """
    while True:
        ready = select.select([listener.fileno(), owner], [], [], REAP_S)[0]
        _reap()
        if owner in ready and not os.read(owner, 1):
            os._exit(0)
        if listener.fileno() in ready:
            with listener.accept()[0] as asked:
                request = _fork(asked, listener)
            if request is not None:
                return request


def _fork(asked: socket.socket, listener: socket.socket) -> dict[str, Any] | None:
    """Forks the worker that a connection requests. In the worker, returns the request."""
    asked.settimeout(REQUEST_S)
    try:
        text, streams, *_ = socket.recv_fds(asked, REQUEST_BYTES, STREAMS)
    except TimeoutError:  # the client hangs between its connection and its request
        return None
    if len(streams) != STREAMS:  # the client has exited
        return None
    request: dict[str, Any] = json.loads(text)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        try:
            asked.sendall(str(pid).encode())
        except OSError:  # the client no longer waits and starts a worker itself
            os.kill(pid, signal.SIGKILL)
        return None
    os.setpgid(0, 0)  # Ray kills the process group of an exited worker, so each worker needs a separate group
    listener.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return request


def _reap() -> None:
    """Reaps the workers that have ended, so no worker stays a zombie."""
    with suppress(ChildProcessError):  # no children
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become(request: Mapping[str, Any]) -> None:
    """Executes the requested Python program in this process, as if started by its command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"], encoding="ascii")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "numpy" in sys.modules:  # only NumPy's generator: Python reseeds its generator in a fork
        sys.modules["numpy"].random.seed()
    command: list[str] = request["command"]
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def main(path: Path, modules: Sequence[str]) -> None:
    """Imports the modules, and forks workers for clients of the Unix socket ``path``.

    Connections wait until the imports have ended.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches every process of the terminal
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(128)
    gc.disable()  # during the imports, garbage collections would take a fifth of the time and free almost nothing
    for name in modules:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"fork server: {threads} threads after the imports, but a fork keeps only one: no worker is forked")
    gc.freeze()  # without this, a collection in a worker writes to every object, and so copies the shared memory pages
    gc.enable()
    become(serve(listener, owner=sys.stdin.fileno()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
