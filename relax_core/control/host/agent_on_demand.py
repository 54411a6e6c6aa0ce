"""Is the program that stands in for one of Ray's two agents on the run's machine until that agent is needed.

The raylet starts two agents and ends with either of them. Each takes a second of processor time and about 100 MB. A run
needs neither: it has no dashboard, and its workers have no runtime environment. With the path of a port file, this
program listens in the agent's place. At the first connection of this user it starts the agent, which listens on a port
that the kernel chooses, and passes all connections on to it. Its own port stays bound for its whole life: another user
who could bind it would end the raylet. Without a port file, it only waits for the raylet's end. The program imports no
Ray, and `python -I -S` executes it.
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
START_S = 60.0  # how long the agent may take until it has written its port
POLL_S = 0.02
PART_BYTES = 1 << 16


def accepted(listener: socket.socket, *, raylet: int) -> socket.socket | None:
    """Returns the next connection of this user, or None if the raylet has ended, which was this process's parent.

    A connection of another user is closed. The agent has a token of its own; this only spares its start.
    """
    while os.getppid() == raylet:
        if select.select([listener], [], [], LOOK_S)[0]:
            connection = listener.accept()[0]
            if uid_of_client(connection) == os.getuid():
                return connection
            connection.close()
    return None


def uid_of_client(connection: socket.socket) -> int | None:
    """Returns the user who has the other end of a connection on this host, None if there is none."""
    client, server = connection.getpeername()[:2], connection.getsockname()[:2]
    wanted = [_in_hex(connection.family, *client), _in_hex(connection.family, *server)]
    table = "/proc/net/tcp6" if connection.family == socket.AF_INET6 else "/proc/net/tcp"
    with open(table, encoding="ascii") as rows:
        for row in rows:
            fields = row.split()
            if fields[1:3] == wanted and fields[9] != "0":  # the inode: an end that is closed has none, and no user
                return int(fields[7])
    return None


def _in_hex(family: int, host: str, port: int) -> str:
    """Returns an address as the kernel prints it: words of four bytes in the byte order of this machine."""
    packed = socket.inet_pton(family, host)
    words = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def listen(host: str, port_file: str) -> socket.socket:
    """Listens on any free port of ``host`` and writes its number to ``port_file``, for which the raylet waits."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    partial = f"{port_file}.partial"
    with open(partial, "w", encoding="ascii") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(partial, port_file)
    return listener


def serve(listener: socket.socket, first: socket.socket, agent: Sequence[str], *, port_file: str, raylet: int) -> None:
    """Starts the agent and passes connections on to it, until the raylet or the agent has ended."""
    import subprocess
    import threading
    import time

    os.unlink(port_file)  # the raylet has read it; the agent writes its own port there
    process = subprocess.Popen([f"{PORT}0" if word.startswith(PORT) else word for word in agent])
    deadline = time.monotonic() + START_S
    while not os.path.exists(port_file):
        if process.poll() is not None or os.getppid() != raylet or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"Ray's agent did not write its port to {port_file}: exit code {process.wait(LOOK_S)}")
        time.sleep(POLL_S)
    with open(port_file, encoding="ascii") as file:
        address = listener.getsockname()[0], int(file.read())
    connection: socket.socket | None = first
    try:
        while connection is not None and process.poll() is None:
            threading.Thread(target=forward, args=[connection, address], daemon=True).start()
            connection = accepted(listener, raylet=raylet)
    finally:
        process.kill()
        process.wait(START_S)


def forward(client: socket.socket, address: tuple[str, int]) -> None:
    """Passes bytes between a client and the agent at ``address`` until either of them closes its connection."""
    with client, socket.create_connection(address, START_S) as agent:
        other = {client: agent, agent: client}
        while True:
            for one in select.select([*other], [], [], LOOK_S)[0]:
                if not (data := one.recv(PART_BYTES)):
                    return
                other[one].sendall(data)


def main(port_file: str, agent: Sequence[str]) -> None:
    """Stands in for the command line ``agent``; ``port_file`` is "" for an agent without a port."""
    raylet = os.getppid()
    if not port_file:
        while os.getppid() == raylet:
            select.select([], [], [], LOOK_S)
        return
    host = next(word.removeprefix(HOST) for word in agent if word.startswith(HOST))
    with listen(host, port_file) as listener:
        first = accepted(listener, raylet=raylet)
        if first is not None:
            serve(listener, first, agent, port_file=port_file, raylet=raylet)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
