"""Is the program that stands in for one of Ray's two agents on the run's machine until that agent is needed.

The raylet starts two agents and ends with either of them. Each takes a second of processor time and about 100 MB. A run
needs neither: it has no dashboard, and its workers have no runtime environment. With the path of a port file, this
program listens in the agent's place, and executes the agent as soon as this user connects, which is when the raylet
asks for a runtime environment. The agent inherits the listening socket, with the connections that wait there, so its
port is never free: another user who could bind it would end the raylet. Without a port file, the program only waits for
the raylet's end. It imports no Ray, and `python -I -S` executes it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence
from typing import Any

PORT = "--runtime-env-agent-port="  # the options of the agent that say where it listens
HOST = "--node-ip-address="
INHERITED = "--inherited-listener="  # this program's own option: the descriptor of the listening socket
LOOK_S = 1.0  # how long this program may outlive the raylet
WAITING = 128  # connections that wait to be accepted
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # one line for each socket of this network
_ESTABLISHED = "01"
_MAPPED = "0000000000000000FFFF0000"  # comes before an address of IPv4 in a socket of IPv6


def wait_for_user(listener: socket.socket, *, raylet: int) -> bool:
    """Returns True if a process of this user connects, and False if the raylet, this process's parent, has ended.

    Connections of other users are closed. The agent asks for a token itself; here it is only not started for them.
    """
    while os.getppid() == raylet:
        if select.select([listener], [], [], LOOK_S)[0]:
            if os.geteuid() in users_of_clients(listener):
                return True
            listener.accept()[0].close()  # the first of those that wait was there before this user was looked for
    return False


def users_of_clients(listener: socket.socket) -> set[int]:
    """Returns the users on this host who have an open connection to the listener, as the kernel's tables tell."""
    host, port = listener.getsockname()[:2]
    address = _in_hex(listener.family, host)
    wanted = {f"{address}:{port:04X}", f"{_MAPPED}{address}:{port:04X}"}
    users = set()
    for table in filter(os.path.exists, _TABLES):  # a kernel without IPv6 has no second table
        with open(table, encoding="ascii") as rows:
            for fields in map(str.split, rows):
                # The kernel names user 0 for a connection that its client has closed, which has no inode any more.
                if fields[2] in wanted and fields[3] == _ESTABLISHED and fields[9] != "0":
                    users.add(int(fields[7]))
    return users


def _in_hex(family: int, host: str) -> str:
    """Returns an address as the kernel prints it: words of four bytes in the byte order of this machine."""
    packed = socket.inet_pton(family, host)
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words)


def listen(host: str, port_file: str) -> socket.socket:
    """Listens on any free port of ``host`` and writes its number to ``port_file``, for which the raylet waits.

    The socket has no SO_REUSEADDR: with it, another user could bind the port until this process listens.
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
    """Executes the agent's command line in this process, with the listener in place of the socket that it binds."""
    port, program = listener.getsockname()[1], _program(agent)
    options = [f"{PORT}{port}" if word.startswith(PORT) else word for word in agent[program:]]
    listener.set_inheritable(True)
    this = [os.path.abspath(__file__), f"{INHERITED}{listener.fileno()}"]
    os.execv(agent[0], [*agent[:program], *this, *options])


def _program(agent: Sequence[str]) -> int:
    """Returns the position of the program in a command line of Python, behind the interpreter and its options."""
    return next(at for at, word in enumerate(agent) if at and not word.startswith("-"))


def run_agent(descriptor: int, agent: Sequence[str]) -> None:
    """Runs the agent's program, whose bind to the listener's port gives it the listener itself."""
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
    """Stands in for an agent: ``words`` are the port file, "" for an agent without a port, and its command line.

    Within the agent's own process they are the listener's descriptor, and the agent's program with its options.
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
