"""Is the process that imports torch and Megatron once for a run on CPUs, and forks the workers of the run's Ray.

A worker that imports them itself takes up to three seconds of processor time. `worker_start` asks for a worker at a
Unix socket in the run's folder, and ends when it has the worker's process id; the worker is a child of this process.
Ray itself cannot be imported before the fork, because it then keeps the settings that it finds in this process's
environment. The process has one thread when it forks, so what it imports may start none. It ends when its stdin, which
its owner holds, is closed, and leaves the workers to Ray.
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

REQUEST_BYTES = 1 << 20  # the most of a request; its environment is the largest part
REQUEST_S = 5.0  # how long a request may take after its connection
STREAMS = 3  # stdin, stdout, stderr
REAP_S = 1.0  # interval at which workers that have ended are waited for


def serve(listener: socket.socket, *, owner: int) -> dict[str, Any]:
    """Forks a worker for each request. Returns in the worker alone, with its request.

    A request is JSON with the command line, the environment, the working folder, the kernel's preference to end the
    worker for memory, and the blocked and the ignored signals. It comes with the descriptors of stdin, stdout and
    stderr. The answer is the worker's process id. ``owner`` is a descriptor at whose end this process exits.
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
    """Forks the worker that a connection asks for, and returns the request in the worker."""
    asked.settimeout(REQUEST_S)
    try:
        text, streams, *_ = socket.recv_fds(asked, REQUEST_BYTES, STREAMS)
    except TimeoutError:  # the other side hangs between its connection and its request
        return None
    if len(streams) != STREAMS:  # the other side has ended
        return None
    request: dict[str, Any] = json.loads(text)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        try:
            asked.sendall(str(pid).encode())
        except OSError:  # the other side waits no longer and starts a worker itself
            os.kill(pid, signal.SIGKILL)
        return None
    os.setpgid(0, 0)  # Ray kills the process group of a worker that has exited, which must not have the others
    listener.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    return request


def _reap() -> None:
    """Waits for the workers that have ended, so that none stays a zombie."""
    with suppress(ChildProcessError):  # there is none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become(request: Mapping[str, Any]) -> None:
    """Executes the requested Python program in this process, as if it had been started by its command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    Path("/proc/self/oom_score_adj").write_text(request["oom_score_adj"], encoding="ascii")
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "numpy" in sys.modules:  # Python reseeds its own generator in a fork
        sys.modules["numpy"].random.seed()
    command: list[str] = request["command"]
    sys.argv[:] = command
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def main(path: Path, modules: Sequence[str]) -> None:
    """Imports the modules, and forks workers for those who connect to the Unix socket ``path``.

    Connections made before the imports have ended wait.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches every process of the terminal
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(128)
    gc.disable()  # during the imports: a fifth of their time would be collections, which find nothing worth freeing
    for name in modules:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"fork server: {threads} threads after the imports, and a fork has one of them: no worker is forked")
    gc.freeze()  # a collection in a worker would write to every object, and so copy what all of them share
    gc.enable()
    become(serve(listener, owner=sys.stdin.fileno()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
