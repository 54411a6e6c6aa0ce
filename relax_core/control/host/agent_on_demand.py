"""Is the program that stands in for one of Ray's two agents on the run's machine until that agent is needed.

The raylet starts two agents and ends with either of them. Each takes a second of processor time and about 100 MB. A run
needs neither: it has no dashboard, and its workers have no runtime environment. With the path of a port file, this
program listens in the agent's place, and executes the agent as soon as the raylet asks for a runtime environment; the
raylet repeats its request until the agent answers. Without one, it only waits for the raylet's end. The program imports
no Ray, and `python -I -S` executes it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence

PORT = "--runtime-env-agent-port="  # the options of the agent that say where it listens
HOST = "--node-ip-address="
LOOK_S = 1.0  # how long this program may outlive the raylet


def wait_for_raylet(raylet: int, listener: socket.socket | None) -> bool:
    """Returns True if somebody connects, and False if the raylet has ended, which was this process's parent."""
    while os.getppid() == raylet:
        if select.select([] if listener is None else [listener], [], [], LOOK_S)[0]:
            return True
    return False


def listen(host: str, port_file: str) -> socket.socket:
    """Listens on any free port of ``host`` and writes its number to ``port_file``, for which the raylet waits."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    partial = f"{port_file}.partial"
    with open(partial, "w", encoding="ascii") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(partial, port_file)
    return listener


def main(port_file: str, agent: Sequence[str]) -> None:
    """Executes the command line ``agent`` at the first connection; ``port_file`` is "" for an agent without a port."""
    raylet = os.getppid()
    if not port_file:
        wait_for_raylet(raylet, None)
        return
    host = next(word.removeprefix(HOST) for word in agent if word.startswith(HOST))
    with listen(host, port_file) as listener:
        port = listener.getsockname()[1]
        is_needed = wait_for_raylet(raylet, listener)
    if is_needed:
        os.execv(agent[0], [f"{PORT}{port}" if word.startswith(PORT) else word for word in agent])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
