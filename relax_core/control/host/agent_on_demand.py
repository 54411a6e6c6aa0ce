"""Replaces one of Ray's two agents on the run's machine until the agent is needed.

The raylet starts two agents and ends if an agent ends. Each agent takes a second of CPU time and about 100 MB. A run
does not need the agents, because it has no dashboard and its workers have no runtime environment. With the path of a
port file, this program listens at the agent's port. When this user connects (the raylet requests a runtime
environment), it executes the agent. The agent inherits the listening socket with its waiting connections, so the port
is never free. If it were free, another user could bind it and end the raylet. Without a port file, the program only
waits for the raylet's end. It does not import Ray, and is executed by `python -I -S`.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import Any

PORT = "--runtime-env-agent-port="  # options of the agent for its listening address
HOST = "--node-ip-address="
INHERITED = "--inherited-listener="  # this program's option: the descriptor of the listening socket
LOOK_S = 1.0  # seconds that this program may outlive the raylet
WAITING = 128  # backlog of the listening socket
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # one line per socket of this network namespace
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"  # prefix of an IPv4 address in an IPv6 socket


def wait_for_user(listener: socket.socket, *, raylet: int) -> bool:
    """Returns True if a process of this user connects, and False if the raylet, this process's parent, has ended.

    Connections of other users are closed, so other users cannot start the agent. The agent also requires a token.
    """
    while os.getppid() == raylet:
        if select.select([listener], [], [], LOOK_S)[0]:
            if os.geteuid() in users_of_clients(listener):
                return True
            listener.accept()[0].close()  # the oldest waiting connection existed before the users were checked
    return False


def users_of_clients(listener: socket.socket) -> set[int]:
    """Returns the users on this host with an open connection to the listener, from the kernel's socket tables."""
    host, port = listener.getsockname()[:2]
    address = _in_hex(listener.family, host)
    wanted = {f"{address}:{port:04X}", f"{_MAPPED}{address}:{port:04X}"}
    users = set()
    for table in filter(os.path.exists, _TABLES):  # a kernel without IPv6 has no table for IPv6
        with open(table, encoding="ascii") as rows:
            for fields in map(str.split, rows):
                # The kernel reports user 0 and no inode for a connection that its client has closed.
                if fields[2] in wanted and fields[3] == _ESTABLISHED and fields[9] != "0":
                    users.add(int(fields[7]))
    return users


def _in_hex(family: int, host: str) -> str:
    """Returns an address in the kernel's format: words of four bytes in the byte order of this machine."""
    packed = socket.inet_pton(family, host)
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words)


def listen(host: str, port_file: str) -> socket.socket:
    """Listens on any free port of ``host``. Writes the port to ``port_file``; the raylet waits for this file.

    The socket does not have SO_REUSEADDR, because another user could then bind the port before this process listens.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen(WAITING)
    partial = f"{port_file}.partial"
    with open(partial, "w", encoding="ascii") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(partial, port_file)
    return listener


def become_agent(listener: socket.socket, agent: Sequence[str]) -> None:
    """Executes the agent's command line in this process. The agent uses the listener and binds no socket."""
    port, program = listener.getsockname()[1], _program(agent)
    options = [f"{PORT}{port}" if word.startswith(PORT) else word for word in agent[program:]]
    listener.set_inheritable(True)
    own_words = [os.path.abspath(__file__), f"{INHERITED}{listener.fileno()}"]
    os.execv(agent[0], [*agent[:program], *own_words, *options])


def _program(agent: Sequence[str]) -> int:
    """Returns the index of the program in a Python command line, after the interpreter and its options."""
    return next(at for at, word in enumerate(agent) if at and not word.startswith("-"))


def run_agent(descriptor: int, agent: Sequence[str]) -> None:
    """Runs the agent's program. When the agent's program binds the listener's port, it gets the listener."""
    import runpy

    port = socket.socket(fileno=os.dup(descriptor)).getsockname()[1]

    class Socket(socket.socket):
        def bind(self, address: Any, /) -> None:
            if isinstance(address, tuple) and address[1] == port:
                os.dup2(descriptor, self.fileno(), inheritable=False)
                os.close(descriptor)
            else:
                super().bind(address)

    socket.socket = Socket  # type: ignore[misc]
    sys.argv[:] = agent
    sys.path[0] = os.path.dirname(agent[0])
    runpy.run_path(agent[0], run_name="__main__")


def main(words: Sequence[str]) -> None:
    """Replaces an agent. ``words`` has the port file ("" for an agent without a port) and the agent's command line.

    After `become_agent`, ``words`` has the listener's descriptor, and the agent's program with its options.
    """
    first, *agent = words
    if first.startswith(INHERITED):
        run_agent(int(first.removeprefix(INHERITED)), agent)
        return
    raylet = os.getppid()
    if not first:
        while os.getppid() == raylet:
            select.select([], [], [], LOOK_S)
        return
    host = next(word.removeprefix(HOST) for word in agent if word.startswith(HOST))
    with listen(host, first) as listener:
        if wait_for_user(listener, raylet=raylet):
            become_agent(listener, agent)


if __name__ == "__main__":
    main(sys.argv[1:])
