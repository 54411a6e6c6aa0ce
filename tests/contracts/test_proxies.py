"""Tests that requests to loopback use no proxy, and that errors from a proxy name the proxy."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from relax_core.contracts.host_network import exempt_loopback_from_proxy, is_loopback_url, opener, proxy_description


class Answers(BaseHTTPRequestHandler):
    """Answers each request with the request's path."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *words: object) -> None:
        """Prints no log lines."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")


def test_loopback_is_asked_without_the_proxy(url: str) -> None:
    with pytest.raises(OSError, match="refused"):
        urllib.request.build_opener().open(url, timeout=10)  # `urlopen` would cache the proxy for later tests
    with opener(url).open(f"{url}/a", timeout=10) as answer:
        assert answer.read() == b"/a"


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:1/x", True),
        ("https://[::1]:1", True),
        ("http://127.0.0.2", True),
        ("http://a.localhost", True),
        ("http://10.0.0.1:1", False),
        ("http://127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_an_address_of_this_host_is_known(url: str, local: bool) -> None:
    assert is_loopback_url(url) is local


def test_the_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    message = proxy_description("http://example.org/x")
    assert "http://127.0.0.1:9" in message and "http_proxy" in message and "secret" not in message
    assert proxy_description("http://127.0.0.1:5") == proxy_description("https://example.org") == ""
    monkeypatch.setenv("no_proxy", "example.org")
    assert proxy_description("http://example.org/x") == ""


def test_libraries_and_children_use_no_proxy_for_loopback() -> None:
    variables = {"HTTPS_PROXY": "http://p:1", "no_proxy": "localhost, a.b"}
    exempt_loopback_from_proxy(variables)
    assert variables["no_proxy"] == variables["NO_PROXY"] == "localhost,a.b,127.0.0.1,::1"
    for unchanged in ({}, {"no_proxy": "a"}, {"http_proxy": "p", "no_proxy": "*", "NO_PROXY": "*"}):
        before = dict(unchanged)
        exempt_loopback_from_proxy(unchanged)
        assert unchanged == before
