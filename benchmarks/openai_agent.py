"""An agent with the ``openai`` client, for ``benchmarks.learning --suite agents``; it knows only its task, not Relax.

    python -m relax_core env=agent agent.command="python benchmarks/openai_agent.py calculator" …

``calculator`` asks the model for a product, offers a calculator tool and executes the model's calls. ``no_tool`` offers
no tool. ``guess`` lets the model guess a number from 1 to 7 in three turns. It rewrites the history in each turn ("so
far: 4 higher, 6 lower"), so no request continues the previous request. ``random_guess`` gives random hints. With
agent.workers=0 the program plays the task in the file RELAX_TASK. Otherwise it plays the tasks from stdin, one JSON
object per line.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

MULTIPLY: Any = {
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
TURNS, HIGHEST = 3, 7
OPENING = f"guess a number from 1 to {HIGHEST}"


def calculator(client: OpenAI, row: dict[str, Any], *, tools: list[Any]) -> float:
    """Returns 1 if the last number in the model's last answer is the product."""
    draw = random.Random(row["seed"])
    a, b = (draw.randrange(100, 1000) for _ in range(2))
    messages: list[Any] = [{"role": "user", "content": f"{a} times {b} ?"}]
    said = ""
    for _ in range(TURNS):
        more: dict[str, Any] = {"tools": tools} if tools else {}
        message = client.chat.completions.create(model="policy", messages=messages, **more).choices[0].message
        said = message.content or ""
        if not message.tool_calls:
            break
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": product(call.function.arguments)})
    numbers = re.findall(r"-?\d+", said)
    return float(bool(numbers) and int(numbers[-1]) == a * b)


def product(arguments: str) -> str:
    """Returns the result of a tool call, or an error message."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, KeyError, TypeError) as mistake:
        return f"multiply takes two whole numbers a and b: {mistake!r}"


def history(so_far: list[tuple[int, str]]) -> str:
    """Returns the only message of a turn: the question, and the earlier guesses with their hints."""
    return OPENING + (f", so far: {', '.join(f'{guess} {told}' for guess, told in so_far)}" if so_far else "")


def guess(client: OpenAI, row: dict[str, Any], *, at_random: bool) -> float:
    """Returns 1 if the model guesses the number."""
    number, so_far = 1 + row["seed"] % HIGHEST, list[tuple[int, str]]()
    for _ in range(TURNS):
        messages: list[Any] = [{"role": "user", "content": history(so_far)}]
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        found = re.search(r"\d+", said)
        if found is None:
            continue
        if int(found.group()) == number:
            return 1.0
        message = "higher" if int(found.group()) < number else "lower"
        so_far.append((int(found.group()), random.choice(("higher", "lower")) if at_random else message))
    return 0.0


GAMES: dict[str, Callable[[Any, dict[str, Any]], float]] = {
    "calculator": lambda client, row: calculator(client, row, tools=[MULTIPLY]),
    "no_tool": lambda client, row: calculator(client, row, tools=[]),
    "guess": lambda client, row: guess(client, row, at_random=False),
    "random_guess": lambda client, row: guess(client, row, at_random=True),
}


def main() -> None:
    """Plays one task, or the tasks from stdin."""
    from openai import OpenAI  # imported here because it takes seconds, and some importers need the games only

    play = GAMES[sys.argv[1]]
    if "RELAX_TASK" in os.environ:
        row = json.loads(Path(os.environ["RELAX_TASK"]).read_text(encoding="utf-8"))
        Path(os.environ["RELAX_RESULT"]).write_text(json.dumps({"reward": play(OpenAI(), row)}), encoding="utf-8")
        return
    client = OpenAI(base_url="http://127.0.0.1", api_key="the task's")  # made once: it loads certificates (30 ms)
    for line in sys.stdin:
        given = json.loads(line)
        reward = play(client.with_options(base_url=given["base_url"], api_key=given["api_key"]), given["task"])
        print(json.dumps({"uid": given["uid"], "reward": reward}), flush=True)


if __name__ == "__main__":
    main()
