"""Sends requests to a run's gateway from a program on the same machine."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from relax_core.engines.protocol.generate_messages import printable_text, reply_object
from relax_core.engines.protocol.server_proof import ProvenConnection
from relax_core.server.order_types import TYPE, Limits

FILE = "gateway.json"  # in the run's folder
ANSWER_S = 30.0  # timeout of one request
ANSWER_BYTES = 16 << 20
AGAIN_S = 10.0  # time during which a request is retried, because the gateway may be restarting
STARTS = TYPE + "run-starts"  # type of the problem while no controller answers the gateway
PAUSE_S = 0.25


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the start parameters of a run's gateway.

    ``folder`` is the run's folder. ``listener`` is the descriptor of the listening socket, and ``channel`` the
    descriptor of the channel to the controller. The supervisor keeps both descriptors open. ``hosts`` are further
    allowed names in the Host header. ``token`` authenticates clients.
    """

    folder: str
    host: str
    listener: int
    channel: int
    hosts: list[str]
    token: str
    limits: Limits


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the content of ``gateway.json``. Only the user may read the file.

    ``page`` is a link to the run's page. The link works once.
    """

    url: str
    token: str
    page: str
    pid: int


def read_address(folder: Path) -> GatewayAddress:
    """Reads the address of a run's gateway from its file.

    Raises OSError or, for an invalid file, msgspec.DecodeError.
    """
    return msgspec.json.decode((folder / FILE).read_bytes(), type=GatewayAddress)


class GatewayRefused(Exception):
    """The gateway refused a request. ``problem`` is the body of its response."""

    def __init__(self, problem: dict[str, Any]) -> None:
        words = problem.get("detail", "")
        key, value, fix = (problem.get(name) for name in ("key", "value", "fix"))
        named = f" ({key}={value})" if key and value else f" ({key})" if key else ""
        super().__init__(f"{words}{named}" + (f"; {fix}" if fix else ""))
        self.problem = problem


class GatewayUnreachable(Exception):
    """The gateway of a run does not answer. The text of the exception says why."""


class GatewayClient:
    """Sends requests to the gateway of the run in ``folder``. Ignores proxy settings of the environment.

    On each connection, the gateway first proves that it knows the token. Then the client sends the token.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, method: str, route: str, body: dict[str, Any] | None = None, *, key: str = "") -> dict[str, Any]:
        """Sends a request and returns the JSON object of the response. ``key`` is the Idempotency-Key.

        If no readable response arrives, the request is repeated for `AGAIN_S` seconds. So the request must be safe to
        repeat or have a ``key``. Raises `GatewayRefused` and `GatewayUnreachable`.
        """
        deadline = time.monotonic() + AGAIN_S
        while True:
            address = self._address()
            try:
                status, data = _answer(address, method, route, body, key=key)
                answer = reply_object(data, None)
                if 200 <= status < 300:
                    return answer
                if not 400 <= status <= 599:
                    raise ValueError(f"status {status}")
                if answer.get("type") == STARTS and time.monotonic() < deadline:
                    time.sleep(PAUSE_S)
                    continue
            except (OSError, http.client.HTTPException, ValueError) as error:
                if time.monotonic() > deadline:
                    why = printable_text(f"{type(error).__name__}: {error}")
                    raise GatewayUnreachable(f"the gateway at {address.url} does not answer: {why}") from error
            else:
                raise GatewayRefused({"status": status, "detail": f"it answers {status}"} | answer)
            time.sleep(PAUSE_S)

    def _address(self) -> GatewayAddress:
        try:
            return read_address(self._folder)
        except FileNotFoundError as error:
            raise GatewayUnreachable(
                f"{self._folder / FILE} does not exist: no run that has a gateway works in this folder now. "
                "Name the folder of a live run with gateway=local"
            ) from error
        except (OSError, msgspec.DecodeError) as error:
            raise GatewayUnreachable(f"{self._folder / FILE} cannot be read: {error}") from error


def _answer(
    address: GatewayAddress, method: str, route: str, body: dict[str, Any] | None, *, key: str
) -> tuple[int, bytes]:
    parts = urlsplit(address.url)
    connection = ProvenConnection(parts.hostname or "", parts.port, token=address.token)
    headers = {"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"}
    if key:
        headers["Idempotency-Key"] = key
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        return connection.call(method, route, data, headers, timeout_s=ANSWER_S, max_bytes=ANSWER_BYTES)
    finally:
        connection.close()
