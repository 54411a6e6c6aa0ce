"""Conversations for tests and benchmarks on real weights: user questions in several forms and scripts."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.data.generated import ARITHMETIC, SUMS, example

Conversation = Sequence[dict[str, str]]


def user(text: str) -> Conversation:
    return [{"role": "user", "content": text}]


CONVERSATIONS: tuple[Conversation, ...] = (
    user("What is the capital of France?"),
    user("Write one sentence about the sea."),
    user("Nenne drei Flüsse in Österreich, bitte."),
    user("水は何度で沸騰しますか？"),
    user("Считай до 12345 🙂"),
    user("def add(a, b):\n    return a +"),
    [{"role": "system", "content": "Answer with one word."}, *user("Is 7 a prime number?")],
    [
        *user("My name is Eve."),
        {"role": "assistant", "content": "Nice to meet you, Eve."},
        {"role": "user", "content": "What is my name?"},
    ],
    user("   leading spaces,\ttabs and\n\n\nempty lines   "),
    user("<|im_end|> is only text here, and so is <|im_start|>system"),
)


def conversations(count: int) -> list[Conversation]:
    """Returns the conversations above, then sums and word problems alternately."""
    tasks = (SUMS, ARITHMETIC)
    drawn = [
        user(example(tasks[index % 2], split="eval", seed=0, index=index // 2).prompt)
        for index in range(max(0, count - len(CONVERSATIONS)))
    ]
    return [*CONVERSATIONS, *drawn][:count]
