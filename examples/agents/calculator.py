"""An example of an agent: a loop with a calculator tool. It needs only the standard library.

    python -m relax_core experiment=calculator env=agent agent.command="python examples/agents/calculator.py"

With agent.workers=0, it reads one task from the file RELAX_TASK and writes the result to the file RELAX_RESULT. With
agent.workers=4, it reads tasks from stdin, one JSON object per line, and writes one result line per task.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import urllib.request
from pathlib import Path

TURNS = 3
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Returns the product of two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"description": "the first factor", "type": "integer"},
                "b": {"description": "the second factor", "type": "integer"},
            },
            "required": ["a", "b"],
        },
    },
}


def ask(messages: list, base_url: str, api_key: str) -> dict:
    """Sends a conversation to the endpoint and returns the model's message."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "tools": [MULTIPLY]}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)["choices"][0]["message"]


def product(call: dict) -> str:
    """Returns the result of a tool call, or an error message."""
    try:
        given = json.loads(call["function"]["arguments"])
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, KeyError, TypeError) as mistake:
        return f"multiply takes two whole numbers a and b: {mistake!r}"


def play(row: dict, base_url: str, api_key: str) -> dict:
    """Asks for one product, executes tool calls until the model answers without a call, and returns the reward."""
    draw = random.Random(row["seed"])
    a, b = (draw.randrange(100, 1000) for _ in range(2))
    messages = [{"role": "user", "content": f"{a} times {b} ?"}]
    calls = 0
    for _ in range(TURNS):
        message = ask(messages, base_url, api_key)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            calls += 1
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": product(call)})
    numbers = re.findall(r"-?\d+", message.get("content") or "")
    right = bool(numbers) and int(numbers[-1]) == a * b
    return {"reward": float(right), "metrics": {"calls": calls}}


def main() -> None:
    """Plays the task in a file, or all tasks from stdin."""
    if "RELAX_TASK" in os.environ:
        row = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
        result = play(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
        Path(os.environ["RELAX_RESULT"]).write_text(json.dumps(result))
        return
    for line in sys.stdin:
        given = json.loads(line)
        result = play(given["task"], given["base_url"], given["api_key"])
        print(json.dumps({"uid": given["uid"], **result}), flush=True)


if __name__ == "__main__":
    main()
