"""Carries requests of the gateway's process to the run's controller, and answers back.

The supervisor makes the pair of sockets and gives one end to each gateway that it starts and the other end to each
controller that it forks, so nobody else can reach them, and either side may die. A request is one datagram with a
socket for its answer, so nobody reads a part of one. A request whose asker has left is not executed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_REQUEST = 192 << 10  # bytes; the guard takes bodies of 64 KiB
WRITE_S = 5.0  # a gateway that does not read its answer for so long gets none
END_S = 10.0
END = b"\n"  # of an answer that is whole
log = logging.getLogger(__name__)


def channel() -> tuple[socket.socket, socket.socket]:
    """Returns the gateway's end, which does not block, and the controller's end."""
    gateway, controller = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    gateway.setblocking(False)
    return gateway, controller


async def ask(end: socket.socket, request: bytes, *, timeout_s: float) -> bytes | None:
    """Returns the controller's answer; None if no controller takes the request and answers it in time."""
    own, theirs = socket.socketpair()
    with own:
        with theirs:
            try:
                socket.send_fds(end, [request], [theirs.fileno()])
            except OSError:  # the queue is full
                return None
        own.setblocking(False)
        loop, parts = asyncio.get_running_loop(), []
        try:
            async with asyncio.timeout(timeout_s):
                while part := await loop.sock_recv(own, 1 << 16):
                    parts.append(part)
        except (OSError, TimeoutError):
            return None
    answer = b"".join(parts)
    return answer.removesuffix(END) if answer.endswith(END) else None


@contextmanager
def answering(end: socket.socket, answer: Callable[[bytes], bytes]) -> Iterator[None]:
    """Answers requests in a thread while the block runs; an answer is a line without its end."""
    ending = os.eventfd(0)
    thread = threading.Thread(target=_answer_all, args=(end, answer, ending), name="orders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.eventfd_write(ending, 1)
        thread.join(END_S)
        os.close(ending)


def _answer_all(end: socket.socket, answer: Callable[[bytes], bytes], ending: int) -> None:
    while ending not in select.select([end.fileno(), ending], [], [])[0]:
        request, descriptors, _, _ = socket.recv_fds(end, MOST_REQUEST, 1)
        with socket.socket(fileno=descriptors[0]) as asker:
            if _has_left(asker):
                continue
            asker.settimeout(WRITE_S)
            try:
                asker.sendall(answer(request) + END)
            except OSError as error:
                log.info("an answer to the gateway was not read: %s", error)


def _has_left(asker: socket.socket) -> bool:
    asker.setblocking(False)
    try:
        return asker.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
