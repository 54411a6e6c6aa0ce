"""Tests conversations over HTTP with OpenAI's Chat Completions: real server, real templates, scripted engines."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relax_core.contracts.env import EpisodeLimits
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.agents.chat_messages import RequestRefused
from relax_core.rollout.agents.endpoint_app import EndpointApp
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import CONTEXT, LONG_S, Say, ScriptedPool, Served, serve, until

ASK = {"role": "user", "content": "12*7 ?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}},
    },
}
CALL = 'Let me see.\n<tool_call>\n{"name": "calc", "arguments": {"e":  "12*7"}}\n</tool_call>'
THOUGHT = f"<think>\nhm\n</think>\n\n{CALL}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


def result(call: Any, text: str = "84") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


# -- sampled tokens are preserved --------------------------------------------------------------------------------------
@pytest.mark.parametrize("rewrites", ["nothing", "langchain", "object"])
def test_a_tool_conversation_is_one_segment_of_the_sampled_tokens(tokenizer: PromptTokenizer, rewrites: str) -> None:
    pool = ScriptedPool(tokenizer, THOUGHT, THOUGHT, "It is 84.")

    async def scene(served: Served) -> None:
        messages: list[Any] = [ASK]
        for number in range(3):
            status, reply = await served.post({"messages": messages, "tools": [TOOL], "return_token_ids": True})
            choice = reply["choices"][0]
            message = choice["message"]
            assert status == 200 and choice["token_ids"] == pool.given[number]
            assert reply["prompt_token_ids"] == pool.requests[number].input_ids
            assert reply["usage"]["prompt_tokens"] == len(pool.requests[number].input_ids)
            assert reply["usage"]["completion_tokens"] == len(pool.given[number])
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
            if number == 2:
                assert message == {"role": "assistant", "content": "It is 84."} and choice["finish_reason"] == "stop"
                break
            assert choice["finish_reason"] == "tool_calls" and message["reasoning_content"] == "hm"
            assert 0 < reply["usage"]["completion_tokens_details"]["reasoning_tokens"] < len(pool.given[number])
            (call,) = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"e": "12*7"} and message["content"] == "Let me see."
            messages += [rewritten(message, rewrites), result(rewritten(message, rewrites)["tool_calls"][0])]
        tree = served.tree()
        assert len(tree.episodes[0].leaves) == 1 and served.session.counts["segments"] == 1
        assert served.session.counts["foreign"] == 0 and served.record.orphan == 0
        for before, after, sampled in zip(pool.requests, pool.requests[1:], pool.given, strict=False):
            assert after.input_ids[: len(before.input_ids) + len(sampled)] == [*before.input_ids, *sampled]

    serve(tokenizer, scene, pool)


def rewritten(message: dict[str, Any], how: str) -> dict[str, Any]:
    if how == "nothing":
        return message
    (call,) = message["tool_calls"]
    value: Any = json.loads(call["function"]["arguments"])
    function = {"name": "calc", "arguments": value if how == "object" else json.dumps(value, indent=2)}
    again = {"index": 0, "id": "theirs", "type": "function", "function": function}
    return {"role": "assistant", "content": [{"type": "text", "text": message["content"]}], "tool_calls": [again]}


def test_history_can_be_what_a_deployed_server_would_render(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, "<think>hm</think>one", "two")

    async def scene(served: Served) -> None:
        first = await served.said([ASK])
        messages = [ASK, first, {"role": "user", "content": "more"}]
        await served.said(messages)
        plain = [ASK, {"role": "assistant", "content": "one"}, messages[2]]
        assert pool.requests[1].input_ids == tokenizer.encode(plain)  # the template removes thinking
        tree = served.tree()
        assert len(tree.episodes[0].leaves) == served.session.counts["segments"] == 2

    serve(tokenizer, scene, pool, history="template")


def test_a_history_that_the_client_wrote_anew_is_a_segment_a_turn(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = ScriptedPool(tokenizer, CALL, "It is 84.", "yes")

    async def scene(served: Served) -> None:
        first = await served.said([ASK], tools=[TOOL])
        text = f"{first['content']}\nCalling tools:\n[{{'id': 'x'}}]"
        anew = [ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "Observation: 84"}]
        second = await served.said(anew, tools=[TOOL])
        await served.said([*anew, second, {"role": "user", "content": "sure?"}], tools=[TOOL])
        tree = served.tree()
        assert len(tree.episodes[0].leaves) == served.session.counts["segments"] == 2
        assert served.session.counts["foreign"] == 1
        assert [turn.after for turn in served.record.turns] == [None, None, 1]

    serve(tokenizer, scene, pool)
    assert 'was not sampled here: a segment begins: "Let me see.\\nCalling tools:' in caplog.text


def test_edits_branches_and_sub_agents_are_trained_once_each(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, *(f"answer {number}" for number in range(5)))

    async def scene(served: Served) -> None:
        first = await served.said([ASK])
        for text in ("a", "b"):  # two conversations continue the same answer
            await served.said([ASK, first, {"role": "user", "content": text}])
        await served.said([{"role": "system", "content": "You are a helper."}, ASK])  # a sub-agent
        await served.said([{"role": "user", "content": "Summary: 84. Go on."}])  # a summarised history
        tree = served.tree()
        assert len(tree.episodes[0].leaves) == 4 and [turn.after for turn in served.record.turns] == [
            None,
            0,
            0,
            None,
            None,
        ]
        assert [turn.response.output_ids.tolist() for turn in served.record.turns] == pool.given

    serve(tokenizer, scene, pool)


def test_an_answer_with_the_stop_string_put_back_and_a_note_goes_on(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, "print(1)\nSTOP", "done")

    async def scene(served: Served) -> None:
        first = await served.said([ASK], stop=["STOP", "Observation:"])
        assert first["content"] == "print(1)\n" and pool.stops[0] == ["STOP", "Observation:"]
        noted = {"role": "assistant", "content": first["content"] + "STOP\nCalling tools: x"}
        await served.said([ASK, noted, {"role": "user", "content": "1"}])
        sampled = [*pool.requests[0].input_ids, *pool.given[0]]
        assert pool.requests[1].input_ids[: len(sampled)] == sampled
        assert tokenizer.decode(pool.requests[1].input_ids[len(sampled) :]).startswith("\nCalling tools: x<|im_end|>")
        assert len(served.tree().episodes[0].leaves) == 1 and served.session.counts["foreign"] == 0

    serve(tokenizer, scene, pool)


# -- streams -----------------------------------------------------------------------------------------------------------
async def events_of(reply: aiohttp.ClientResponse) -> list[Any]:
    assert reply.content_type == "text/event-stream"
    text = (await reply.read()).decode()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_says_the_same_as_a_reply_and_before_the_answer_ends(tokenizer: PromptTokenizer) -> None:
    hold = asyncio.Event()
    pool = ScriptedPool(tokenizer, THOUGHT, Say(text="It is 84, ünd more of it.", hold=hold))
    body = {"messages": [ASK], "tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}

    async def scene(served: Served) -> None:
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body, headers=served.headers()) as reply:
            events = await events_of(reply)
        *chunks, usage = events
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(pool.given[0])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
        (call,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
        more = {"messages": [ASK, message, result(call)], "tools": [TOOL], "stream": True}
        async with served.http.post(f"{served.url}/v1/chat/completions", json=more, headers=served.headers()) as reply:
            early = b""
            while early.count(b"data: ") < 8:  # the engine has not finished; each token is one event
                early += await reply.content.readany()
            assert served.session.under_way
            hold.set()
            early += await reply.read()
        parts = [json.loads(line[6:]) for line in early.decode().split("\n\n") if line.startswith("data: {")]
        assert (
            "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == "It is 84, ünd more of it."
        )
        assert len(served.tree().episodes[0].leaves) == 1

    serve(tokenizer, scene, pool)


# -- repeated requests and clients that hang up -----------------------------------------------------------------------
def connected(served: Served) -> socket.socket:
    """Returns a client socket that the test drives byte by byte. Its receive buffer has a few kilobytes."""
    client = socket.socket()
    client.settimeout(LONG_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel's minimum
    host, port = served.url.removeprefix("http://").split(":")
    client.connect((host, int(port)))
    return client


def request_bytes(served: Served, body: Any) -> bytes:
    data = json.dumps(body)
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {served.key}"]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", data]).encode()


def around_sending(
    *, before: Callable[[Any, Any], None] = lambda scope, message: None, behind: Callable[[Any], None] = lambda _: None
) -> Callable[[EndpointApp], Any]:
    """Returns a wrapper of the endpoint with hooks on each sent message. The hooks block the event loop."""

    def around(app: EndpointApp) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            async def told(message: Any) -> None:
                before(scope, message)
                await send(message)
                behind(message)

            await app(scope, receive, told)

        return call

    return around


async def hang_up(served: Served, body: Any) -> None:
    """Sends a request, and disconnects when the engine has begun its response."""
    asking = asyncio.create_task(served.post(body))
    await until(lambda: served.pool.requests)
    asking.cancel()
    await until(lambda: served.session.under_way[0].asked.abandoned)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_a_repeated_request_gets_the_answer_that_is_under_way(
    tokenizer: PromptTokenizer, stream: bool, counted: bool
) -> None:
    hold = asyncio.Event()
    pool = ScriptedPool(tokenizer, Say(text="It is 84.", hold=hold), "never")

    async def scene(served: Served) -> None:
        body = {"messages": [ASK], "stream": stream}
        await hang_up(served, body)
        more = {"x-stainless-retry-count": "1"} if counted else {}
        again = asyncio.create_task(served.post({"messages": [ASK]}, **more))
        await until(lambda: served.session.counts["repeated"])
        hold.set()
        status, reply = await again
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "It is 84.")
        assert len(pool.requests) == 1 and len(served.tree().episodes[0].leaves) == 1 and served.record.orphan == 0

    serve(tokenizer, scene, pool)


def test_two_equal_requests_at_one_time_are_two_answers_and_a_counted_repetition_gets_one_again(
    tokenizer: PromptTokenizer,
) -> None:
    pool = ScriptedPool(tokenizer, "one", "two")

    async def scene(served: Served) -> None:
        replies = await asyncio.gather(*(served.said([ASK]) for _ in range(2)))
        assert {reply["content"] for reply in replies} == {"one", "two"}
        status, reply = await served.post({"messages": [ASK]}, **{"x-stainless-retry-count": "2"})
        assert status == 200 and reply["choices"][0]["message"]["content"] in ("one", "two")
        assert len(pool.requests) == 2 and len(served.tree().episodes[0].leaves) == 2

    serve(tokenizer, scene, pool)


def test_an_answer_that_nobody_got_is_counted_and_not_trained(tokenizer: PromptTokenizer) -> None:
    hold = asyncio.Event()
    pool = ScriptedPool(tokenizer, Say(text="lost", hold=hold), "kept", "on")

    async def scene(served: Served) -> None:
        await hang_up(served, {"messages": [ASK]})
        hold.set()
        await until(lambda: not served.session.under_way)
        other_question = [{"role": "user", "content": "another question"}]
        kept = await served.said(other_question)
        await served.said([*other_question, kept, ASK])
        tree = served.tree()
        assert served.record.orphan == len(pool.given[0]) and len(served.record.turns) == 2
        assert [turn.after for turn in served.record.turns] == [None, 0] and len(tree.episodes[0].leaves) == 1

    serve(tokenizer, scene, pool)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_while_its_client_hangs_up_is_not_given(tokenizer: PromptTokenizer, stream: bool) -> None:
    """The client closes its socket before the answer ends. The event loop sees both events in one iteration."""
    hold = asyncio.Event()
    pool = ScriptedPool(tokenizer, Say(text="lost", hold=hold), "kept")

    async def scene(served: Served) -> None:
        with connected(served) as client:
            client.sendall(request_bytes(served, {"messages": [ASK], "stream": stream}))
            await until(lambda: pool.given)  # the answer waits for `hold`, and the client waits for the answer
        hold.set()
        await until(lambda: not served.session.under_way)
        await served.said([{"role": "user", "content": "another question"}])
        served.tree()
        assert served.record.orphan == len(pool.given[0]) and len(served.record.turns) == 1

    serve(tokenizer, scene, pool)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_its_answer_is_written_has_it_only_if_it_read_it(
    tokenizer: PromptTokenizer, stream: bool, reads: bool
) -> None:
    """The client closes its socket between the endpoint's connection check and the write, or right after the write."""
    pool = ScriptedPool(tokenizer, "said", "kept")
    end = b"[DONE]" if stream else b'"usage"'
    clients: list[socket.socket] = []

    def before(scope: Any, message: Any) -> None:
        if clients and not reads and end in message.get("body", b""):
            clients.pop().close()

    def behind(message: Any) -> None:
        if clients and reads and end in message.get("body", b""):
            client, received = clients.pop(), b""
            while end not in received:
                received += client.recv(1 << 16)
            client.close()

    async def scene(served: Served) -> None:
        with connected(served) as client:
            clients.append(client)
            client.sendall(request_bytes(served, {"messages": [ASK], "stream": stream}))
            await until(lambda: client.fileno() < 0)
        await served.said([{"role": "user", "content": "another question"}])
        served.tree()
        assert served.record.orphan == (0 if reads else len(pool.given[0]))
        assert len(served.record.turns) == 1 + reads

    serve(tokenizer, scene, pool, around=around_sending(before=before, behind=behind))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("stream", "length"), [(False, 3000), (True, 100)])
def test_an_answer_is_given_when_its_client_reads_it_and_not_when_the_server_has_it_ready(
    tokenizer: PromptTokenizer, stream: bool, length: int, reads: bool
) -> None:
    """The answer is larger than the kernel's buffers, so the server cannot write all of it before the client reads."""
    pool = ScriptedPool(tokenizer, "x" * length, "kept")
    connections: list[Any] = []

    def before(scope: Any, message: Any) -> None:
        if not connections:
            connections.append(scope["connection"])
            server = connections[0].transport.get_extra_info("socket")
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's minimum

    async def scene(served: Served) -> None:
        body = {"messages": [ASK], "stream": stream, "return_token_ids": True}
        with connected(served) as client:
            client.sendall(request_bytes(served, body))
            await until(lambda: pool.given and not served.session.under_way)
            await until(lambda: connections and connections[0].transport.get_write_buffer_size())
            (turn,) = served.session._turns.values()
            client.setblocking(False)
            while reads and not turn.asked.given:
                try:
                    assert client.recv(1 << 16), "the server hung up"
                except BlockingIOError:
                    await asyncio.sleep(0.001)  # the server writes the next part
            assert turn.asked.given == reads
        await served.said([{"role": "user", "content": "another question"}])
        served.tree()
        assert served.record.orphan == (0 if reads else len(pool.given[0]))
        assert len(served.record.turns) == 1 + reads

    serve(tokenizer, scene, pool, around=around_sending(before=before))


def test_a_client_that_hangs_up_and_asks_again_at_once_gets_the_answer_that_is_under_way(
    tokenizer: PromptTokenizer,
) -> None:
    """In one iteration the event loop reads the end of the first connection and the request on a second connection."""
    hold = asyncio.Event()
    pool = ScriptedPool(tokenizer, "earlier", Say(text="It is 84.", hold=hold), "never")

    async def scene(served: Served) -> None:
        asks = request_bytes(served, {"messages": [ASK]})
        with connected(served) as first, connected(served) as second:
            second.sendall(request_bytes(served, {"messages": [{"role": "user", "content": "earlier"}]}))
            await until(lambda: served.session._ended and served.session._ended[0].asked.given)
            first.sendall(asks)
            await until(lambda: len(pool.given) == 2)
            first.close()
            second.sendall(asks)
            await until(lambda: served.session.counts["requests"] == 3)
            assert served.session.counts["repeated"] == 1
            hold.set()
            await until(lambda: not served.session.under_way and served.session._ended[-1].asked.given)
        served.tree()
        assert len(pool.requests) == 2 and len(served.record.turns) == 2 and served.record.orphan == 0

    serve(tokenizer, scene, pool)


# -- keys --------------------------------------------------------------------------------------------------------------
def test_keys_open_their_session_alone_and_end_with_it(
    tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pool = ScriptedPool(tokenizer, "one", "two", "three")
    keys = []

    async def scene(served: Served) -> None:
        keys.append(served.key)
        body = {"messages": [ASK]}
        path = "/v1/chat/completions"
        for headers, route in (
            ({"Authorization": f"bearer {served.key}"}, path),
            ({"x-api-key": served.key}, path),
            ({"Authorization": "Bearer sk-dummy"}, f"/s/{served.key}{path}"),
        ):
            async with served.http.post(f"{served.url}{route}", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xff"}, {"x-api-key": ""}):
            async with served.http.post(f"{served.url}{path}", json=body, headers=headers) as reply:
                assert reply.status == 401 and (await reply.json())["error"]["code"] == "invalid_api_key"
        async with served.http.get(f"{served.url}/v1/models", headers=served.headers()) as reply:
            assert [model["id"] for model in (await reply.json())["data"]] == ["policy"]
        async with served.http.get(f"{served.url}/v1/models/policy", headers=served.headers()) as reply:
            assert (await reply.json())["id"] == "policy"
        served.session.end()
        assert (await served.post(body))[0] == 410
        served.table.close(served.key)
        assert (await served.post(body))[0] == 410

    serve(tokenizer, scene, pool)
    assert not [record for record in caplog.records if keys[0] in record.getMessage()]


def test_a_full_table_says_when_to_come_again(tokenizer: PromptTokenizer) -> None:
    async def scene(served: Served) -> None:
        with pytest.raises(RequestRefused, match="sessions are open") as error:
            served.table.open(served.session)
        assert (error.value.status, error.value.retry_after_s) == (429, 5)

    serve(tokenizer, scene, ScriptedPool(tokenizer), max_sessions=1)


# -- limits ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (EpisodeLimits(turns=2, sampled_tokens=500, context_tokens=CONTEXT), "max_turns"),
        (EpisodeLimits(turns=9, sampled_tokens=7, context_tokens=CONTEXT), "token_budget"),
    ],
)
def test_an_episode_that_has_had_its_share_ends(tokenizer: PromptTokenizer, limits: EpisodeLimits, reason: str) -> None:
    pool = ScriptedPool(tokenizer, "one", "two!")

    async def scene(served: Served) -> None:
        await served.said([ASK])
        status, reply = await served.post({"messages": [{"role": "user", "content": "b"}]})
        assert reply["choices"][0]["finish_reason"] == ("stop" if reason == "max_turns" else "length")
        status, reply = await served.post({"messages": [{"role": "user", "content": "c"}]})
        assert (status, reply["error"]["code"]) == (410, reason) and served.ended == ["end"]
        assert served.record.ended == reason and len(served.record.turns) == 2

    serve(tokenizer, scene, pool, limits=limits)


def test_an_answer_keeps_to_its_limits_and_a_long_history_is_told(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, "abcdefgh", "abcdefgh")

    async def scene(served: Served) -> None:
        status, reply = await served.post({"messages": [ASK], "max_tokens": 5, "max_completion_tokens": 3})
        assert (reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]) == ("abc", "length")
        await served.said([{"role": "user", "content": "b"}])
        assert pool.requests[1].max_new_tokens == 6
        status, reply = await served.post({"messages": [{"role": "user", "content": "x" * CONTEXT}]})
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded") and not served.session.over

    serve(tokenizer, scene, pool, max_turn_tokens=6)


def test_a_busy_session_says_when_to_come_again(tokenizer: PromptTokenizer) -> None:
    hold = asyncio.Event()
    pool = ScriptedPool(tokenizer, Say(text="one", hold=hold))

    async def scene(served: Served) -> None:
        first = asyncio.create_task(served.said([ASK]))
        await until(lambda: served.session.under_way)
        body = {"messages": [{"role": "user", "content": "b"}]}
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body, headers=served.headers()) as reply:
            assert reply.status == 429 and reply.headers["Retry-After"] == "1"
        hold.set()
        await first

    serve(tokenizer, scene, pool, open_requests=1)


def test_the_end_of_an_episode_gives_up_what_is_under_way(tokenizer: PromptTokenizer) -> None:
    pool = ScriptedPool(tokenizer, Say(text="one", hold=asyncio.Event()))

    async def scene(served: Served) -> None:
        asked = asyncio.create_task(served.post({"messages": [ASK]}))
        await until(lambda: pool.requests)
        assert served.session.end("straggler") == ["r.0"]
        status, reply = await asked
        assert status == 410 and "abandoned" in reply["error"]["message"] and not served.record.turns
        pool.requests.clear()
        for task in asyncio.all_tasks():
            if "SharedRequests._send" in repr(task):
                task.cancel()

    serve(tokenizer, scene, pool)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engines_gave_up_can_be_asked_again(tokenizer: PromptTokenizer, stream: bool) -> None:
    pool = ScriptedPool(tokenizer, Say(text="", finish="given up"), "one")

    async def scene(served: Served) -> None:
        body = {"messages": [ASK], "stream": stream}
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body, headers=served.headers()) as reply:
            text = await reply.text()
            assert "abandoned" in text and (reply.status == 503 or stream) and "server_error" in text
        assert (await served.said([ASK]))["content"] == "one" and served.session.counts["repeated"] == 0
        assert len(served.tree().episodes[0].turns) == 1

    serve(tokenizer, scene, pool)


# -- unsupported and refused parameters -------------------------------------------------------------------------------
def test_wishes_are_served_counted_and_told_once(tokenizer: PromptTokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool = ScriptedPool(tokenizer, "one", "two", "three")

    async def scene(served: Served) -> None:
        await served.said(
            [ASK], temperature=1.0, frequency_penalty=0, tool_choice="auto", response_format={"type": "text"}
        )
        assert served.session.counts["wishes"] == 0
        for text in ("b", "c"):
            await served.said(
                [{"role": "user", "content": text}], temperature=0.3, tools=[TOOL], tool_choice="required", seed=5
            )
        assert served.session.counts["wishes"] == 6

    serve(tokenizer, scene, pool)
    told = [record.getMessage() for record in caplog.records if "the run decides" in record.getMessage()]
    assert len(told) == 3 and told[0].startswith("an agent asks for temperature=0.3")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n=2: one answer"),
    ({"logit_bias": {"5": 1}}, "logit_bias: it changes the distribution"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.type='json_schema'"),
    ({"guided_json": {"a": 1}}, "guided_json: a grammar"),
    ({"logprobs": True}, "logprobs: they are not returned"),
    ({"messages": []}, "messages: there is none"),
    ({"messages": [{"content": "x"}]}, "missing required field `role`"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: it is missing"),
    ({"messages": [{"role": "king", "content": "x"}]}, "Invalid enum value 'king'"),
    ({"messages": [ASK, {"role": "assistant", "content": "It is"}]}, "the last message is an assistant message"),
    ({"messages": [ASK, {"role": "tool", "tool_call_id": "z", "content": "1"}]}, "the id 'z', which no earlier call"),
    ({"messages": [ASK] * 5000}, "there are 5000, at most 4096"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "a part of type 'image_url'; only text",
    ),
    ({"messages": "hi"}, "Expected `array`"),
    ({"max_tokens": 0}, "max_tokens=0: give 1 or more"),
    ({"stop": [""]}, "stop: at most 16 strings"),
    ({"tools": [TOOL, TOOL]}, "two of them have the name 'calc'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
]


def test_what_cannot_be_trained_or_read_is_refused_in_words(tokenizer: PromptTokenizer) -> None:
    async def scene(served: Served) -> None:
        for body, words in REFUSED:
            status, reply = await served.post({"messages": [ASK], **body})
            assert status == 400 and words in reply["error"]["message"], reply
            assert reply["error"]["type"] == "invalid_request_error"

    serve(tokenizer, scene, ScriptedPool(tokenizer))


def test_other_routes_large_bodies_and_broken_json_are_refused_in_words(tokenizer: PromptTokenizer) -> None:
    async def scene(served: Served) -> None:
        for path, wanted, words in (("/v2/chat", 404, "no route"), ("/v1/models", 405, "takes GET")):
            status, reply = await served.post({}, path)
            assert status == wanted and words in reply["error"]["message"]
        for data, wanted in ((b"x" * 5000, 413), (b"{", 400), (b"\xff", 400), (b"[" * 4000, 400)):
            url = f"{served.url}/v1/chat/completions"
            async with served.http.post(url, data=data, headers=served.headers()) as reply:
                assert reply.status == wanted and (await reply.json())["error"]["message"]

    serve(tokenizer, scene, ScriptedPool(tokenizer), max_body_bytes=4096)


def test_a_template_that_leaves_tools_out_is_told(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path / "model", FAMILIES["ignores_tools"]))
    pool = ScriptedPool(tokenizer, "one")

    async def scene(served: Served) -> None:
        status, reply = await served.post({"messages": [ASK], "tools": [TOOL]})
        assert status == 400 and "leaves out the tools" in reply["error"]["message"]
        await served.said([ASK])

    serve(tokenizer, scene, pool)
