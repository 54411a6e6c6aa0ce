"""Keeps the listening socket of a server process open: the port stays bound while the owner process runs."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time

BACKLOG = 512  # maximum connections that wait to be accepted; all clients may connect at the same time
BUSY_S = 0.05  # pause before refusing again if the process has no free descriptor
END_S = 5.0  # maximum seconds that `close` waits for the port's thread
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset and leaves no connection in TIME_WAIT


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on the port; 0 takes any free port. Raises OSError.

    The socket listens at once. With SO_REUSEADDR, another user could bind the port of a socket that does not listen
    yet.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    # Connections inherit TCP_NODELAY. asyncio does not set it for a given listener, and each response would wait 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """Returns the URL of a listener, with the numeric address.

    A host name such as localhost may also resolve to ::1, where another user may bind the port.
    """
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def refuse_waiting(listener: socket.socket) -> None:
    """Resets all waiting connections of the socket, as the kernel does for a port without a listener."""
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except ConnectionAbortedError:
            continue
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class HeldPort:
    """Owns the listening socket that successive child processes serve from.

    While no process serves, a thread resets every new connection. Otherwise the kernel would accept connections, and a
    client would detect the dead server only at its deadline. ``descriptor`` is passed to the child. Raises OSError if
    the port cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._listener = listening_socket(host, port)
        self.descriptor = self._listener.fileno()
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards the fields below; also held while connections are refused
        self._refuses, self._closed = True, False
        self._next: int | None = None  # pidfd of a new process, to be read by `_watch`
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._watch, name=f"port-{self.port}", daemon=True)
        self._thread.start()

    def hand_over(self, pid: int) -> None:
        """Leaves new connections to the child ``pid`` until the child ends. The child must not have been reaped."""
        with self._lock:
            if self._next is not None:
                os.close(self._next)
            self._next = os.pidfd_open(pid)
            self._refuses = False
        os.write(self._wake, b".")

    def close(self) -> None:
        """Frees the port."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
        os.write(self._wake, b".")
        self._thread.join(END_S)
        for descriptor in (self._woken, self._wake):
            os.close(descriptor)
        self._listener.close()

    def _watch(self) -> None:
        """Refuses connections while no process serves."""
        serving: int | None = None
        while True:
            with self._lock:
                if self._next is not None:
                    if serving is not None:
                        os.close(serving)
                    serving, self._next = self._next, None
                if self._closed:
                    break
                if self._refuses:
                    self._refuse()
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._woken, selectors.EVENT_READ)
                if serving is not None:
                    waiting.register(serving, selectors.EVENT_READ)
                else:
                    waiting.register(self._listener, selectors.EVENT_READ)
                ready = {key.fd for key, _ in waiting.select()}
            if self._woken in ready:
                os.read(self._woken, 64)
            if serving in ready:
                with self._lock:
                    self._refuses = self._next is None
                os.close(serving)
                serving = None
        if serving is not None:
            os.close(serving)

    def _refuse(self) -> None:
        try:
            refuse_waiting(self._listener)
        except OSError:  # no free descriptor or memory: the connections wait
            time.sleep(BUSY_S)
