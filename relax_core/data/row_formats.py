"""Converts formats in data rows: chat messages with ShareGPT's keys or as JSON text, and reference answers (labels)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from relax_core.contracts.untrusted_values import decode_json
from relax_core.data.row_media import is_content

_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
    **{"tool": "tool", "observation": "tool"},
}
_FIRST_KEY = re.compile(r"""\s*\[\s*\{\s*(['"])(?:role|content|from|value)\1\s*:""")
_ROLE_KEY = re.compile(r"""['"](?:role|from)['"]\s*:""")


class MessagesOfText(list[Any]):
    """Marks a list of messages that is JSON text in the file."""


def messages_of(prompt: Any) -> Any:
    """Converts JSON text, or messages with the keys "from" and "value", to messages with "role" and "content".

    Returns any other prompt unchanged. Returns (does not raise) a ValueError for text that begins like messages but is
    not JSON, and for an unknown "from".
    """
    if isinstance(prompt, str) and _FIRST_KEY.match(prompt) and _ROLE_KEY.search(prompt):
        try:
            found = messages_of(decode_json(prompt, list[dict[str, Any]]))
        except ValueError:
            return ValueError("looks like a list of messages, and is not JSON. Write it with json.dumps.")
        return found if isinstance(found, ValueError) else MessagesOfText(found)
    if not isinstance(prompt, list) or not prompt:
        return prompt
    if not all(isinstance(message, dict) and {"from", "value"} <= message.keys() for message in prompt):
        return prompt
    if unknown := [message["from"] for message in prompt if str(message["from"]) not in _ROLES]:
        return ValueError(f"has a message from {unknown[0]!r}. Use one of: {', '.join(_ROLES)}.")
    rest = [{key: value for key, value in message.items() if key not in ("from", "value")} for message in prompt]
    return [
        {"role": _ROLES[message["from"]], "content": message["value"], **more}
        for message, more in zip(prompt, rest, strict=True)
    ]


def is_conversation(prompt: Any) -> bool:
    """Returns whether a prompt is a non-empty list of messages with role and content."""
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and is_content(message.get("content"))
            for message in prompt
        )
    )


def without_null_keys(prompt: Any) -> Any:
    """Returns a conversation without null-valued keys in messages, parts and tool calls.

    A message with tool calls gets empty content if its content was null. The arguments of tool calls are unchanged.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt
    made = [without_nulls(message, but="arguments") for message in prompt]
    return [
        {**message, "content": message.get("content", "")} if message.get("tool_calls") else message for message in made
    ]


def without_nulls(value: Any, *, but: str = "") -> Any:
    """Returns a value without null-valued keys at any depth, except below the key ``but``."""
    if isinstance(value, dict):
        return {
            key: inner if key == but else without_nulls(inner, but=but)
            for key, inner in value.items()
            if inner is not None
        }
    return [without_nulls(element, but=but) for element in value] if isinstance(value, list) else value


_MAX_EXPONENT = 400  # above the exponent of any float; a number below 1e-400 becomes 0
# Matches floats, including NaN, as programs write them into text files. It does not match integers and texts such as
# 1.50, which stay unchanged.
FLOAT_TEXT = re.compile(r"-?\d+\.0|-?\d(\.\d+)?e[+-]\d+|nan|NaN|-?inf", re.ASCII)


@dataclass(frozen=True)
class WrittenNumber:
    """Holds a number from a file with its text, such as 1e-05; the row's column keeps ``value``."""

    value: float | str
    text: str


def value_at(row: Any, key: str, *, missing: Any = None) -> Any:
    """Returns the value of a column or of a dotted key such as reward_model.ground_truth, or ``missing``.

    If a column has exactly this name, its value is returned. A part that is a number is an index in a list; a negative
    number counts from the end, as in conversations.-1.value.
    """
    if isinstance(row, Mapping) and key in row:
        return row[key]
    value = row
    for part in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(part, missing)
        elif isinstance(value, list) and re.fullmatch(r"-?\d{1,9}", part, re.ASCII):
            number = int(part)
            value = value[number] if -len(value) <= number < len(value) else missing
        else:
            return missing
    return value


def written_number(content: bytes | str, key: str) -> Any:
    """Returns the float at a key of a JSON object as a `WrittenNumber`."""
    return value_at(json.loads(content, parse_float=lambda text: WrittenNumber(float(text), text)), key)


def label_text(label: Any, *, may_be_empty: bool = False) -> str:
    """Returns a label as text.

    A number has decimal notation: 0.00001 for 1e-05. A whole number has no point: 72 for 72.0. Raises ValueError for
    empty text, and for values that are neither text nor a finite number; the error's text is the second part of a
    sentence that begins with the label.
    """
    if isinstance(label, str):
        if not (label.strip() or may_be_empty):
            raise ValueError("is empty. Write the answer; if the reward does not read it, write any word.")
        return label
    if isinstance(label, bool) or not isinstance(label, int | float | Decimal | WrittenNumber):
        raise ValueError(f"is neither text nor a number.{_inner_key(label)}")
    if isinstance(label, int):
        try:
            return str(label)
        except ValueError:  # an integer with thousands of digits
            raise ValueError("has too many digits.") from None
    number = label if isinstance(label, Decimal) else Decimal(_literal(label))
    if not number.is_finite() or number.adjusted() > _MAX_EXPONENT:
        raise ValueError("is not a finite number. Give a number or text.")
    text = format(number if number.adjusted() > -_MAX_EXPONENT else Decimal(0), "f")
    whole, _, rest = text.partition(".")
    if rest.strip("0"):
        return text
    return "0" if whole == "-0" else whole


def _inner_key(label: Any) -> str:
    """Returns the key of the text inside a label that is a list of messages or a mapping; "" for any other label."""
    if isinstance(label, list) and label and isinstance(label[-1], Mapping):
        inner = next((f"-1.{name}" for name in ("content", "value") if isinstance(label[-1].get(name), str)), None)
    else:
        values = label if isinstance(label, Mapping) else {}
        inner = next((str(name) for name, value in values.items() if isinstance(value, str | int | float)), None)
    return "" if inner is None else f" Add .{inner} to data.answer_key, to read the value inside it."


def _literal(label: float | WrittenNumber) -> str:
    return label.text if isinstance(label, WrittenNumber) else repr(label)
