"""Tests that another local user who takes a server's port gets no token or prompt, and cannot end anything."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from relax_core.config.compose import load_config
from relax_core.config.schema import EngineConfig
from relax_core.contracts.engine import EngineUnreachable, PromptRequest, SamplingParams
from relax_core.control.gateway_process import gateway
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.held_port import HeldPort
from relax_core.engines.protocol import server_proof
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.server_proof import ProofExchange, ServerUnproven, proof, proof_answer
from relax_core.server import gateway_client
from relax_core.server.gateway_client import FILE, GatewayAddress, GatewayClient, GatewayUnreachable, read_address
from tests.contracts.engine.harness import make_model
from tests.control.gateway_harness import look_after, until_up
from tests.security.intruders import intruder, ways_to_take

TOKEN = "token-of-this-run-which-nobody-else-knows"
SECRET_IDS = [41, 42, 43]  # tokens of a prompt
NONCE = b"0123456789abcdef" * 4
SOON_S = 1.0  # time to notice a dead engine on a busy machine; the engine's timeouts are 20 s
LONG_S = 20.0
UP_S = 60.0
Start = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> EngineLaunch:
    folder = tmp_path_factory.mktemp("engine")
    make_model(folder / "model", seed=0)
    (folder / "token").write_text(TOKEN)
    return EngineLaunch(
        model_folder=folder / "model",
        engine=EngineConfig(
            name="embedded",
            count=1,
            port=0,
            max_running_samples=16,
            max_total_tokens=4096,
            context_length=256,
            threads=1,
            start_timeout_s=UP_S,
        ),
        dtype="float32",
        token_file=folder / "token",
        log_file=folder / "engine.log",
        load_weights=True,
    )


@pytest.fixture(scope="module")
def engine(launch: EngineLaunch) -> Iterator[EngineProcess]:
    process = EngineProcess.start(launch)
    yield process
    process.stop(timeout_s=5.0)


def client_of(url: str, *, timeout_s: float = LONG_S) -> EngineClient:
    return EngineClient(url, TOKEN, request_timeout_s=timeout_s, control_timeout_s=timeout_s)


async def generated(client: EngineClient) -> list[int]:
    prompts = [PromptRequest(rid="secret-prompt", input_ids=SECRET_IDS, sampling_seed=1)]
    try:
        found = [response async for response in client.generate(prompts, SamplingParams(max_new_tokens=4))]
    finally:
        await client.aclose()
    return [len(response.output_ids) for response in found]


async def answers(client: EngineClient) -> None:
    try:
        await client.answers(timeout_s=LONG_S)
    finally:
        await client.aclose()


def all_calls_fail(url: str, *, timeout_s: float = LONG_S) -> None:
    client = client_of(url, timeout_s=timeout_s)
    for call in (client.ready, client.model_info, client.loads, client.abort, lambda: client.pause("abort")):
        with pytest.raises(EngineUnreachable):
            call()
    client.close()
    for work in (generated(client_of(url, timeout_s=timeout_s)), answers(client_of(url, timeout_s=timeout_s))):
        with pytest.raises(EngineUnreachable):
            asyncio.run(work)


def tells_nothing(received: bytes) -> None:
    assert b"/relax_proof?nonce=" in received
    for word in (TOKEN.encode(), b"earer", b"uthorization", b"generate", b"secret-prompt", b"input_ids", b"model_info"):
        assert word not in received, received


# -- the proof itself -------------------------------------------------------------------------------------------------
def test_the_proof_belongs_to_the_nonce_the_token_and_the_address() -> None:
    own = proof(TOKEN, nonce=NONCE, address=("127.0.0.1", 4000))
    other_proofs = [
        proof(TOKEN, nonce=NONCE, address=("127.0.0.1", 4001)),
        proof(TOKEN, nonce=NONCE, address=("127.0.0.2", 4000)),
        proof(TOKEN, nonce=NONCE[::-1], address=("127.0.0.1", 4000)),
        proof(TOKEN + "x", nonce=NONCE, address=("127.0.0.1", 4000)),
    ]
    assert own not in other_proofs and len({*other_proofs}) == 4
    assert own == proof(TOKEN, nonce=NONCE, address=("::ffff:127.0.0.1", 4000)), "an IPv4-mapped IPv6 address"


@pytest.mark.parametrize(
    "query",
    [
        b"",
        b"nonce=",
        b"nonce=" + NONCE[:-1],
        b"nonce=" + NONCE + b"0",
        b"nonce=" + NONCE.upper(),
        b"nonce=" + NONCE + b"\n",
        b"x=1&nonce=" + NONCE,
        b"nonce=" + NONCE + b"&x=1",
        b"nonce=" + 64 * b"g",
        b"nonce=" + 64 * "٣".encode(),
    ],
)
def test_a_server_answers_nonces_alone(query: bytes) -> None:
    assert proof_answer(TOKEN, query=query, address=("127.0.0.1", 4000)) is None


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 401 No\r\nContent-Length: 64\r\n\r\n%(right)s",
        b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n%(right)s\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n%(wrong)s",
        b"HTTP/1.1 200 OK\r\nContent-Length: 640\r\n\r\n%(right)s",
        b"HTTP/1.1 200 OK\r\n" + 5000 * b"a",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 64\r\n\r\n%(right)s",
    ],
)
def test_a_wrong_answer_proves_nothing(answer: bytes) -> None:
    exchange = ProofExchange(TOKEN, address=("127.0.0.1", 4000))
    nonce = exchange.request.partition(b"nonce=")[2][:64]
    right = proof(TOKEN, nonce=nonce, address=("127.0.0.1", 4000))
    sent = answer.replace(b"%(right)s", right).replace(b"%(wrong)s", right[::-1])
    with pytest.raises(ServerUnproven):
        assert not (exchange.feed(sent) or exchange.feed(b""))


def test_the_real_engine_answers_the_proof_and_nothing_else_without_a_token(engine: EngineProcess) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=LONG_S)
    expected = proof(TOKEN, nonce=NONCE, address=("127.0.0.1", engine.port))
    for method, query, status in (("GET", NONCE.decode(), 200), ("GET", "0", 400), ("POST", NONCE.decode(), 400)):
        connection.request(method, f"{server_proof.PATH}?nonce={query}", headers={"Host": "127.0.0.1:1"})
        response = connection.getresponse()
        body = response.read()
        assert response.status == status and (body == expected) == (status == 200)
    connection.close()


# -- an intruder at the port ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["empty", "close"])
def test_a_process_on_the_port_of_an_engine_gets_no_token_and_no_prompt(mode: str) -> None:
    with intruder(mode) as found:
        all_calls_fail(found.url)
        received = found.received()
    if mode == "empty":
        tells_nothing(received)


def test_a_relay_to_the_real_engine_gets_nothing(engine: EngineProcess) -> None:
    with intruder("relay", told=engine.port) as found:
        all_calls_fail(found.url)
        tells_nothing(found.received())
    assert client_of(engine.url).model_info()["weight_version"] == "0", "the engine still works"


def test_a_recorded_proof_is_not_accepted_again(engine: EngineProcess) -> None:
    """The recorded proof even has the address at which the intruder now listens."""
    port = HeldPort("127.0.0.1", 0)
    recorded = proof(TOKEN, nonce=NONCE, address=("127.0.0.1", port.port)).decode()
    port.close()
    with intruder("replay", port=port.port, told=recorded) as found:
        all_calls_fail(found.url)
        tells_nothing(found.received())


@pytest.mark.parametrize("mode", ["silent", "trickle"])
def test_an_endless_answer_does_not_block_the_caller(mode: str) -> None:
    with intruder(mode) as found:
        began = time.monotonic()
        with pytest.raises(EngineUnreachable):
            client_of(found.url, timeout_s=0.5).model_info()
        assert time.monotonic() - began < LONG_S / 2
        with pytest.raises(EngineUnreachable):
            asyncio.run(generated(client_of(found.url, timeout_s=0.5)))
        tells_nothing(found.received())


def test_a_client_with_the_proof_works_and_keeps_its_connection(engine: EngineProcess) -> None:
    async def twice() -> None:
        client = client_of(engine.url)
        prompts = [PromptRequest(rid="a", input_ids=SECRET_IDS, sampling_seed=1)]
        try:
            for _ in range(2):
                assert [response async for response in client.generate(prompts, SamplingParams(max_new_tokens=4))]
            session = client._http_session()
            assert len(session.connector._proven) == 1  # type: ignore[union-attr]
        finally:
            await client.aclose()

    asyncio.run(twice())


# -- the port of an engine that died ----------------------------------------------------------------------------------
def test_the_port_of_an_engine_that_died_stays_taken_and_refuses(launch: EngineLaunch) -> None:
    process = EngineProcess.start(launch)
    client = client_of(process.url)
    try:
        assert client.model_info()["weight_version"] == "0"
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + LONG_S
        while process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began = time.monotonic()
        all_calls_fail(process.url)
        with pytest.raises(EngineUnreachable):
            client.model_info()
        assert time.monotonic() - began < 10 * SOON_S, "a call waited for its deadline"
        assert set(ways_to_take(process.port)) == {str(errno.EADDRINUSE)}
        process.stop(timeout_s=0.0, keeps_port=True)
        assert set(ways_to_take(process.port)) == {str(errno.EADDRINUSE)}
        process = EngineProcess.start(launch, held_port=process.held_port)
        assert set(ways_to_take(process.port)) == {str(errno.EADDRINUSE)}
        assert client.model_info()["weight_version"] == "0", "the same client works at the same address"
        assert asyncio.run(generated(client_of(process.url))) == [4]
    finally:
        client.close()
        process.stop(timeout_s=5.0)
    assert "taken" in ways_to_take(process.port)[0], "the run releases the port at the end"


def test_a_held_port_refuses_until_a_process_serves_and_is_free_after_its_end() -> None:
    port = HeldPort("127.0.0.1", 0)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port.port)) as connection, pytest.raises(ConnectionResetError):
        connection.recv(1)
    assert time.monotonic() - began < 10 * SOON_S
    port.close()
    port.close()
    assert "taken" in ways_to_take(port.port)[0]


# -- the gateway ------------------------------------------------------------------------------------------------------
def test_the_port_of_a_gateway_that_died_stays_taken(tmp_path: Path) -> None:
    config = load_config(["gateway=local", "gateway.port=0", f"run.dir={tmp_path}", "run.max_restarts=1"])
    with gateway(config) as process:
        assert process is not None
        until_up(process)
        address = read_address(tmp_path)
        port = int(address.url.rpartition(":")[2])
        for restarts in (1, 0):
            died = process.pid
            os.kill(died, signal.SIGKILL)
            deadline = time.monotonic() + LONG_S
            while process._child.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert set(ways_to_take(port)) == {str(errno.EADDRINUSE)}
            while restarts and process.pid == died:
                assert time.monotonic() < deadline
                look_after(process)
                time.sleep(0.05)
            assert set(ways_to_take(port)) == {str(errno.EADDRINUSE)}
            if restarts:
                assert GatewayClient(tmp_path).ask("GET", "/healthz") == {"status": "ok"}
                assert read_address(tmp_path).url == address.url
        while not process._given_up:
            look_after(process)
            time.sleep(0.05)
        look_after(process)
        assert set(ways_to_take(port)) == {str(errno.EADDRINUSE)}, "the token is valid until the run ends"
    assert "taken" in ways_to_take(port)[0]


@pytest.mark.parametrize("mode", ["empty", "close", "relay", "silent"])
def test_a_process_on_the_port_of_a_gateway_gets_no_token(
    mode: str, engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with the same token replaces the real gateway; the intruder relays to it."""
    monkeypatch.setattr(gateway_client, "AGAIN_S", 0.3)
    monkeypatch.setattr(gateway_client, "ANSWER_S", 0.5)
    with intruder(mode, told=engine.port) as found:
        address = GatewayAddress(url=found.url, token=TOKEN, page="", pid=1)
        (tmp_path / FILE).write_bytes(msgspec.json.encode(address))
        with pytest.raises(GatewayUnreachable):
            GatewayClient(tmp_path).ask("POST", "/rollout/scale_out", {"num_replicas": 41}, key="a")
        received = found.received()
    if mode != "close":
        tells_nothing(received)
