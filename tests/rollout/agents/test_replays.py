"""Replays recorded requests of real clients: each answer in a request must match the sampled answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relax_core.data.tokenizer import PromptTokenizer
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import ScriptedPool, Served, serve
from tests.rollout.agents.replays import CONVERSATIONS, FOLDER, SAYS, Conversation


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.name)
def test_what_a_client_sends_back_is_what_was_sampled(conversation: Conversation, tokenizer: PromptTokenizer) -> None:
    recorded: dict[str, Any] = json.loads(conversation.file.read_text())
    pool = ScriptedPool(tokenizer, *SAYS[recorded["says"]])

    async def scene(served: Served) -> None:
        for request in recorded["requests"]:
            async with served.http.post(
                f"{served.url}{request['path']}", json=request["body"], headers=served.headers()
            ) as reply:
                assert reply.status == 200, await reply.text()
                await reply.read()
        tree = served.tree()
        segments = recorded["segments"]
        assert len(tree.episodes[0].leaves) == served.session.counts["segments"] == segments == conversation.segments
        assert served.session.counts["foreign"] == segments - 1 and served.record.orphan == 0
        nodes = [turn.after for turn in served.record.turns]
        assert nodes == ([None, 0, 1] if segments == 1 else [None] * 3)
        for before, after, sampled in zip(pool.requests, pool.requests[1:], pool.given, strict=False):
            goes_on = after.input_ids[: len(before.input_ids) + len(sampled)] == [*before.input_ids, *sampled]
            assert goes_on is (segments == 1)

    serve(tokenizer, scene, pool)


def test_every_recorded_file_is_tried() -> None:
    assert {file.name for file in FOLDER.glob("*.json")} == {conversation.file.name for conversation in CONVERSATIONS}
