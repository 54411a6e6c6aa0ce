"""Tests engine addresses from clients: accepted forms, normalization, and refusals before any request is sent."""

from __future__ import annotations

import asyncio

import pytest

from relax_core.server.order_routes import engine_address
from relax_core.server.order_types import Refusal

ALLOWED = ["127.0.0.1", "localhost", "10.0.0.7"]


def address(url: str, *, allowed: list[str] = ALLOWED) -> str:
    return asyncio.run(engine_address(url, allowed_hosts=allowed))


def test_one_engine_has_one_address_however_it_is_written() -> None:
    written = ["http://127.0.0.1:30000", "http://127.0.0.1:30000/", "http://LOCALHOST:30000", "HTTP://localhost:30000/"]
    assert {address(url) for url in written} == {"http://127.0.0.1:30000"}
    assert address("http://10.0.0.7:1") == "http://10.0.0.7:1"


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "https://127.0.0.1:30000",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:70000",
        "http://127.0.0.1:port",
        "http://user@127.0.0.1:30000",
        "http://127.0.0.1:30000@10.9.9.9:1",
        "http://127.0.0.1:30000/v1",
        "http://127.0.0.1:30000?x=1",
        "http://127.0.0.1:30000#x",
        "http://:30000",
        "http://[::1]:30000",
        "http://[:30000",
        "127.0.0.1:30000",
        "",
        "http://nowhere.invalid:30000",
        "http://" + "a" * 300 + ":1",
        "http://\u2100.example:1",
    ],
)
def test_an_invalid_server_address_is_refused(url: str) -> None:
    with pytest.raises(Refusal) as refused:
        address(url)
    assert refused.value.status == 400


@pytest.mark.parametrize("url", ["http://169.254.169.254:80", "http://0.0.0.0:1", "http://224.0.0.1:1"])
def test_addresses_of_no_engine_are_refused_whatever_is_allowed(url: str) -> None:
    with pytest.raises(Refusal, match="is not an address of an engine"):
        address(url, allowed=["169.254.169.254", "0.0.0.0", "224.0.0.1"])


def test_other_hosts_are_refused_unless_they_are_allowed() -> None:
    with pytest.raises(Refusal, match=r"engine.elastic.allowed_hosts does not name 10.0.0.8"):
        address("http://10.0.0.8:1")
    with pytest.raises(Refusal, match="does not name localhost"):
        address("http://localhost:1", allowed=["10.0.0.7"])
