"""Asks the gateway of a run from a program on the same machine; with the standard library alone."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.host.no_redirect import NoRedirect
from relax_core.gateway.gateway_settings import FILE, GatewayAddress, read_address

ANSWER_S = 30.0  # longest time of one request
AGAIN_S = 10.0  # how long a gateway that does not answer is asked again, because it may be starting again
PAUSE_S = 0.25


class GatewayRefused(Exception):
    """Says why the gateway refuses a request; ``problem`` is the body of its answer."""

    def __init__(self, problem: dict[str, Any]) -> None:
        words = problem.get("detail", "")
        key, value, fix = (problem.get(name) for name in ("key", "value", "fix"))
        named = f" ({key}={value})" if key and value else f" ({key})" if key else ""
        super().__init__(f"{words}{named}" + (f"; {fix}" if fix else ""))
        self.problem = problem


class GatewayUnreachable(Exception):
    """Says why the gateway of a run does not answer."""


class GatewayClient:
    """Asks the gateway of the run in ``folder`` directly, whatever proxies the environment names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect())

    def ask(self, method: str, route: str, body: dict[str, Any] | None = None, *, key: str = "") -> Any:
        """Returns the JSON of the answer; ``key`` is the Idempotency-Key.

        A request without an answer is repeated for `AGAIN_S` seconds, so ``route`` has to be one that may be asked
        twice, or needs a ``key``. Raises `GatewayRefused` and `GatewayUnreachable`.
        """
        deadline = time.monotonic() + AGAIN_S
        while True:
            address = self._address()
            request = urllib.request.Request(
                address.url + route,
                method=method,
                data=None if body is None else msgspec.json.encode(body),
                headers={"Authorization": f"Bearer {address.token}", "Content-Type": "application/json"}
                | ({"Idempotency-Key": key} if key else {}),
            )
            try:
                with self._opener.open(request, timeout=ANSWER_S) as answer:
                    return msgspec.json.decode(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    raise GatewayRefused(_problem(error)) from error
            except OSError as error:
                if time.monotonic() > deadline:
                    raise GatewayUnreachable(f"the gateway at {address.url} does not answer: {error}") from error
            time.sleep(PAUSE_S)

    def _address(self) -> GatewayAddress:
        try:
            return read_address(self._folder)
        except FileNotFoundError as error:
            raise GatewayUnreachable(
                f"{self._folder / FILE} does not exist: no run that has a gateway works in this folder now"
            ) from error
        except (OSError, msgspec.DecodeError) as error:
            raise GatewayUnreachable(f"{self._folder / FILE} cannot be read: {error}") from error


def _problem(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        return msgspec.json.decode(error.read(), type=dict[str, Any])
    except msgspec.DecodeError:
        return {"status": error.code, "detail": f"it answers {error.code} {error.reason}"}
