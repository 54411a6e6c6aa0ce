"""The task and the tool of all clients."""

from __future__ import annotations

TASK = "What is 12*7, and then that times 2?"
SYSTEM = "Use the tool."


def calc(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: such as 12*7
    """
    left, right = expression.split("*")
    return str(int(left) * int(right))


PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "such as 12*7"}},
    "required": ["expression"],
}

# The builtin model tiny_qwen3_tools knows this tool and calls it in some of its answers.
PRODUCT = "Returns the product of two whole numbers."
PRODUCT_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def question(turn: int) -> str:
    return f"{321 + 111 * turn} times {456 - 13 * turn} ?"


def multiply(a: object = 0, b: object = 0) -> str:
    return str(int(str(a)) * int(str(b)))
