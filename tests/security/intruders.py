"""Programs of another local user who has taken the port of a run's server, or tries to take it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.security.conftest import INTRUDER, SecondUser

# Prints its port, then every received piece in hexadecimal digits. Modes: "empty" always responds with {}, "relay"
# passes all bytes to another port and back, "replay" always sends the same text, "silent" sends nothing, "trickle"
# sends a byte now and then, and "close" closes the connection.
SERVER = r"""
import socket, sys, threading, time
port, mode, told = int(sys.argv[1]), sys.argv[2], sys.argv[3]
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port))
server.listen(64)
print(server.getsockname()[1], flush=True)

def reply(body):
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

def serve(connection):
    onward = socket.create_connection(("127.0.0.1", int(told))) if mode == "relay" else None
    if onward is not None:
        threading.Thread(target=pump, args=(onward, connection), daemon=True).start()
    while mode != "close" and (data := connection.recv(65536)):
        print(data.hex(), flush=True)
        if mode == "empty":
            connection.sendall(reply(b"{}"))
        elif mode == "replay":
            connection.sendall(reply(told.encode()))
        elif mode == "trickle":
            for byte in b"HTTP/1.1 200 OK\r\nX: " + 2000 * b"a":
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
        elif onward is not None:
            onward.sendall(data)
    connection.close()

def safely(connection):
    try:
        serve(connection)
    except OSError:
        pass

while True:
    threading.Thread(target=safely, args=(server.accept()[0],), daemon=True).start()
"""
# Prints the error of each attempt to take the port, or "taken".
TAKER = r"""
import socket, sys
port = int(sys.argv[1])
ways = [(host, options) for host in ("127.0.0.1", "0.0.0.0", "::") for options in ((), (2,), (15,), (2, 15))]
for host, options in ways:  # 2 is SO_REUSEADDR, 15 SO_REUSEPORT
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    for option in options:
        found.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        found.bind((host, port))
        found.listen(8)
        print("taken", host, options)
    except OSError as error:
        print(error.errno)
    found.close()
"""


class Intruder:
    """Runs a server as the second user. Without root, runs it as another process of this user."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.port = int(process.stdout.readline())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def received(self) -> bytes:
        """Ends the intruder and returns all bytes that it received."""
        self._process.kill()
        text, _ = self._process.communicate(timeout=30.0)
        return b"".join(bytes.fromhex(line) for line in text.splitlines())


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    if os.getuid() == 0:
        return SecondUser(INTRUDER).popen(program, *arguments)
    return subprocess.Popen(
        [sys.executable, "-I", "-u", "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextmanager
def intruder(mode: str, *, port: int = 0, told: object = "") -> Iterator[Intruder]:
    """Runs `SERVER`."""
    with start(SERVER, port, mode, told) as process:
        try:
            yield Intruder(process)
        finally:
            process.kill()


def ways_to_take(port: int) -> list[str]:
    """Lets the second user try to bind the port and listen on it, and returns the result of each attempt."""
    with start(TAKER, port) as process:
        text, _ = process.communicate(timeout=30.0)
    return text.splitlines()
