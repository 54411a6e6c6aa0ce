"""Real receivers on loopback: an HTTP server and an SMTP server that record the received messages."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_string
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DEADLINE_S = 60.0


@dataclass
class Message:
    """Holds the received titles and texts in order. The first ``refusals`` messages are refused."""

    messages: list[tuple[str, str]] = field(default_factory=list)
    refusals: int = 0
    port: int = 0
    came: threading.Condition = field(default_factory=threading.Condition)

    def take(self, title: str, text: str) -> bool:
        with self.came:
            if self.refusals:
                self.refusals -= 1
                return False
            self.messages.append((title, text))
            self.came.notify_all()
            return True

    def wait(self, count: int) -> list[tuple[str, str]]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.messages) >= count, DEADLINE_S), self.messages
            return list(self.messages)


@contextmanager
def serving(make: Callable[[], socketserver.BaseServer]) -> Iterator[int]:
    server = make()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        assert isinstance(server.server_address, tuple)
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join(DEADLINE_S)
        server.server_close()


@contextmanager
def http_receiver() -> Iterator[Message]:
    """Runs an HTTP server that receives the JSON messages of Apprise."""
    told = Message()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200 if told.take(body["title"], body["message"]) else 503)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Logs nothing."""

    with serving(lambda: ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as told.port:
        yield told


@contextmanager
def smtp_receiver() -> Iterator[Message]:
    """Runs a server with the few SMTP commands that an e-mail needs (RFC 5321)."""
    told = Message()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 ready\r\n")
            while line := self.rfile.readline():
                match line.split()[0].upper():
                    case b"DATA":
                        self.wfile.write(b"354 go on\r\n")
                        lines = []
                        while (part := self.rfile.readline()) not in (b".\r\n", b""):
                            lines.append(part)
                        mail = message_from_string(b"".join(lines).decode())
                        parts = [mail_part for mail_part in mail.walk() if not mail_part.is_multipart()]
                        text = parts[0].get_payload(decode=True)
                        assert isinstance(text, bytes)
                        told.take(str(mail["Subject"]), text.decode())
                        self.wfile.write(b"250 taken\r\n")
                    case b"QUIT":
                        self.wfile.write(b"221 bye\r\n")
                        return
                    case _:
                        self.wfile.write(b"250 ok\r\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with serving(lambda: Server(("127.0.0.1", 0), Handler)) as told.port:
        yield told
