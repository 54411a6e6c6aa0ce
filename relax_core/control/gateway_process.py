"""Runs the gateway as a child process of the supervisor, which restarts a dead gateway and ends it with the run."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.child_process import Child, ChildLost, Limit, module_command
from relax_core.contracts.monitor import Check, Finding
from relax_core.contracts.stop_signals import STOP_SIGNALS
from relax_core.control.engine_set import limits_of
from relax_core.engines.held_port import listening_socket, refuse_waiting
from relax_core.server.engine_order_service import channel
from relax_core.server.gateway_client import FILE, GatewayAddress, GatewaySettings

PORTS = 100  # number of ports to try, from gateway.port upwards
START_S = 60.0
STOP_S = 5.0
AGAIN_S = 1.0  # seconds between two starts of the gateway


class GatewayUnstarted(RuntimeError):
    """Raised if the gateway does not start; the text is the cause."""


@contextmanager
def gateway(config: RelaxConfig) -> Iterator[GatewayProcess | None]:
    """Runs the gateway of a run while the block runs. Yields None with gateway=none. Does not wait for the start."""
    if config.gateway.name == "none":
        yield None
        return
    process = GatewayProcess(config)
    try:
        yield process
    finally:
        process.stop()


def listener_of(host: str, first_port: int) -> socket.socket:
    """Returns a listener on the first free port from ``first_port`` on (0: any port). Raises `GatewayUnstarted`."""
    ports = range(first_port, first_port + PORTS) if first_port else [0]
    for port in ports:
        try:
            return listening_socket(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                message = f"gateway.port={first_port} on gateway.host={host}: {os.strerror(error.errno or 0)}"
                raise GatewayUnstarted(f"the gateway did not start: {message}; choose others") from error
    raise AssertionError("the last port raises")


class GatewayProcess:
    """Owns the gateway's process. The process blocks the stop signals, so only the supervisor handles them.

    This object also owns the listening socket, so no other process can take the port during a restart. During a restart
    new connections wait at the socket; after the last restart they are refused. ``controller_end`` is the controllers'
    end of the channel for requests.
    """

    def __init__(self, config: RelaxConfig) -> None:
        self._folder = Path(config.run.dir)
        self._log = self._folder / "logs" / "gateway.log"
        self._restarts_left = self._max_restarts = config.run.max_restarts
        self._given_up = self._greeted = False
        self._listener = listener_of(config.gateway.host, config.gateway.port)
        self._channel, self.controller_end = channel()
        self._settings = GatewaySettings(
            folder=str(self._folder),
            host=config.gateway.host,
            listener=self._listener.fileno(),
            channel=self._channel.fileno(),
            hosts=[*config.gateway.allowed_hosts, config.gateway.host, self._listener.getsockname()[0]],
            token=secrets.token_urlsafe(32),
            limits=limits_of(config),
        )
        self._child = self._start()
        self._started = time.monotonic()
        self.is_up = False  # whether the current process has reported its address

    @property
    def pid(self) -> int:
        """Returns the process id of the gateway."""
        return self._child.pid

    def _start(self) -> Child:
        child = Child(
            module_command("relax_core.server.gateway_server"),
            name="the gateway",
            log=self._log,
            inherited=(self._settings.listener, self._settings.channel),
            blocked=STOP_SIGNALS,
            start=Limit(START_S),
        )
        child.send(msgspec.json.encode(self._settings) + b"\n")
        return child

    def _look_for_address(self) -> Finding | None:
        """Prints the gateway's address when it is known. Until then, detects a gateway that died or is late."""
        try:
            line = self._child.first_line(wait_s=0.0)
        except ChildLost as lost:
            return Finding(failed_part=self._child.name, how=str(lost).removeprefix(f"{self._child.name} "))
        if line is not None:
            self.is_up = True
            if not self._greeted:
                self._greeted = True
                self._greet(msgspec.json.decode(line, type=GatewayAddress))
        return None

    def _greet(self, address: GatewayAddress) -> None:
        port = self._listener.getsockname()[1]
        lines = [f"gateway: {address.url}; its token is in {self._folder / FILE}"]
        if sys.stderr.isatty():  # other users may read a log, so it gets no link
            lines.append(f"page: {address.page} (it works once; {self._folder / FILE} has the next link)")
        else:
            lines.append(f"page: its link, which works once, is in {self._folder / FILE}")
        if os.environ.get("SSH_CONNECTION"):
            lines.append(f"from your machine: ssh -L {port}:{self._settings.host}:{port} {socket.gethostname()}")
        _report(*lines)

    def check(self) -> Check:
        """Returns the check that reports the address of a gateway that is up, and restarts a lost gateway.

        A gateway is lost if it dies, or if it is not up within `START_S` seconds. The check restarts it at most
        run.max_restarts times, with the same port and token. After that the run continues without a gateway.
        """
        return Check(name="gateway", every_s=0.0, look=self._look, act=self._start_again)

    def _look(self) -> Finding | None:
        if self._given_up:
            refuse_waiting(self._listener)
        elif time.monotonic() - self._started < AGAIN_S:
            return None
        elif not self.is_up:
            return self._look_for_address()
        elif (code := self._child.poll()) is not None:
            return Finding(failed_part=self._child.name, how=f"ended with exit code {code}")
        return None

    def _start_again(self, lost: Finding) -> None:
        self._child.end(grace_s=0.0)
        if not self._restarts_left:
            self._given_up = True
            (self._folder / FILE).unlink(missing_ok=True)
            _report(
                f"{lost}, after run.max_restarts={self._max_restarts} restarts, and the run takes no more orders; see "
                f"{self._log}"
            )
            return
        _report(f"{lost}; it is started again")
        self._restarts_left -= 1
        self._started, self.is_up = time.monotonic(), False
        self._child = self._start()

    def stop(self) -> None:
        """Ends the gateway by closing its stdin and, after some seconds, by SIGKILL.

        Removes the file with its address.
        """
        self._child.end(grace_s=STOP_S)
        for held in (self._listener, self._channel, self.controller_end):
            held.close()
        (self._folder / FILE).unlink(missing_ok=True)


def _report(*lines: str) -> None:
    print("\n".join(f"relax: {line}" for line in lines), file=sys.stderr, flush=True)
