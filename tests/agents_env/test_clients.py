"""Tests real clients: each holds a conversation of three turns with the endpoint, in the agents' environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_core.data.tokenizer import PromptTokenizer
from tests.agents_env.environments import AGENTS
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import ScriptedPool, Served, serve
from tests.rollout.agents.replays import CONTEXT, CONVERSATIONS, SAYS, Conversation, Recorder

pytestmark = pytest.mark.agents
CLIENTS = Path(__file__).parent / "clients"
PACKAGES = {"pydantic_ai": "pydantic-ai-slim", "openai_agents": "openai-agents"}
ANSWER_S = 120.0  # timeout of a library's import on a loaded machine, and of a conversation


class Client:
    """Runs one process with one client library. The process holds the conversations one by one."""

    def __init__(self, name: str) -> None:
        command = [AGENTS, "client_main.py", f"{name}_client"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        self._process = subprocess.Popen(
            command, cwd=CLIENTS, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        version = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
        package = PACKAGES.get(name, name)
        told = subprocess.run(
            [AGENTS, "-c", version, package], capture_output=True, text=True, check=True, timeout=ANSWER_S
        )
        self.version = f"{package} {told.stdout.strip()}"
        self.modes = json.loads(self._line())["ready"]

    def _line(self) -> str:
        assert self._process.stdout is not None
        late = threading.Timer(ANSWER_S, self._process.kill)  # ends a library that hangs
        late.start()
        try:
            return self._process.stdout.readline()
        finally:
            late.cancel()

    def converse(self, mode: str, url: str, key: str) -> dict[str, Any]:
        """Returns the program's result of the conversation: an answer, or an error."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"mode": mode, "url": url, "key": key}) + "\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(self._line() or '{"error": "the process has ended"}')
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    opened = Client(request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("client", "conversation"),
    [pytest.param(conversation.client, conversation, id=conversation.name) for conversation in CONVERSATIONS],
    indirect=["client"],
)
def test_a_client_holds_three_turns_whose_tokens_are_the_engine_s_own(
    client: Client, conversation: Conversation, tokenizer: PromptTokenizer
) -> None:
    pool = ScriptedPool(tokenizer, *SAYS[conversation.says])
    recorders: list[Recorder] = []

    def around(app: Any) -> Recorder:
        recorders.append(Recorder(app))
        return recorders[0]

    async def scene(served: Served) -> None:
        said = await asyncio.to_thread(client.converse, conversation.mode, served.url, served.key)
        assert "168" in said.get("answer", ""), said.get("error", said)
        counts = served.session.counts
        tree = served.tree()  # checks that every token is in one account
        (episode,) = tree.episodes
        assert [turn.response.output_ids.tolist() for turn in served.record.turns] == pool.given and len(
            pool.given
        ) == 3
        assert len(episode.leaves) == counts["segments"] == conversation.segments
        assert counts["foreign"] == (conversation.segments > 1) * (conversation.segments - 1)
        assert served.record.orphan == 0 and counts["repeated"] == 0
        streamed = [bool(sent["body"].get("stream")) for sent in recorders[0].requests]
        assert streamed == [conversation.mode.endswith("_stream")] * 3
        if conversation.segments == 1:
            for before, after, sampled in zip(pool.requests, pool.requests[1:], pool.given, strict=False):
                assert after.input_ids[: len(before.input_ids) + len(sampled)] == [*before.input_ids, *sampled]

    serve(tokenizer, scene, pool, context=CONTEXT, around=around, long_s=2 * ANSWER_S)
    if os.environ.get("RELAX_RECORD_REPLAYS"):
        recorders[0].write(conversation, version=client.version)


def test_every_mode_of_every_client_is_in_the_table() -> None:
    known = {conversation.name for conversation in CONVERSATIONS}
    for file in sorted(CLIENTS.glob("*_client.py")):
        name = file.stem.removesuffix("_client")
        client = Client(name)
        try:
            assert {f"{name}_{mode}" for mode in client.modes} <= known
        finally:
            client.close()


def test_the_clients_run_in_an_environment_of_their_own() -> None:
    assert Path(AGENTS).parent.resolve() != Path(sys.executable).parent.resolve()
