"""Is a plain client of the endpoint for `benchmarks.endpoint_times`, in a process of its own.

It writes "ready", reads jobs from stdin, one JSON object a line, and answers each with one line. A job has ``url``,
``keys`` (sessions, which play at the same time), ``openings`` (the first messages of each), ``turns``, ``more`` (the
message behind each answer), and ``body`` (other fields of a request). The answer has ``seconds``,
``histories`` (the messages of each session at its end) and, of streamed requests, ``first``: when the first delta with
text came, by the monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

TIMEOUT_S = 600.0


async def play(http: aiohttp.ClientSession, job: dict[str, Any], number: int, first: list[float]) -> list[Any]:
    """Plays one session, and returns its messages."""
    key, messages = job["keys"][number], list(job["openings"][number])
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(job["turns"]):
        body = {"messages": messages, **job["body"]}
        async with http.post(f"{job['url']}/v1/chat/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                raise RuntimeError(f"status {reply.status}: {await reply.text()}")
            if body.get("stream"):
                message = {"role": "assistant", "content": await streamed(reply, first)}
            else:
                message = (await reply.json())["choices"][0]["message"]
        messages += [message, job["more"]]
    return messages


async def streamed(reply: aiohttp.ClientResponse, first: list[float]) -> str:
    """Returns the text of a streamed answer, and notes when the first delta with text came."""
    text = ""
    async for line in reply.content:
        if not line.startswith(b"data: {"):
            continue
        piece = json.loads(line[6:])["choices"][0]["delta"].get("content")
        if piece and not text:
            first.append(time.monotonic())
        text += piece or ""
    return text


async def done(job: dict[str, Any]) -> dict[str, Any]:
    """Returns what one job took."""
    first: list[float] = []
    limits = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=len(job["keys"]))
    began = time.monotonic()
    async with aiohttp.ClientSession(timeout=limits, connector=connector) as http, asyncio.TaskGroup() as tasks:
        playing = [tasks.create_task(play(http, job, number, first)) for number in range(len(job["keys"]))]
    histories = [one.result() for one in playing]
    return {"seconds": time.monotonic() - began, "first": first, "histories": histories}


def main() -> None:
    """Does the jobs of stdin until it ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(done(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
