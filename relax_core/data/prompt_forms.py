"""Reads the other forms that files have for chat messages: ShareGPT's keys, and messages as JSON text."""

from __future__ import annotations

import re
from typing import Any

from relax_core.contracts.checks.foreign_values import decode_json

_ROLES = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
    **{"tool": "tool", "observation": "tool"},
}
_FIRST_KEY = re.compile(r"""\s*\[\s*\{\s*(['"])(?:role|content|from|value)\1\s*:""")
_ROLE_KEY = re.compile(r"""['"](?:role|from)['"]\s*:""")


class MessagesOfText(list[Any]):
    """Is a list of messages that the file has as JSON text."""


def messages_of(prompt: Any) -> Any:
    """Returns a prompt whose messages have role and content, also where the file has from and value, or JSON text.

    Any other prompt is returned as it is. For text that begins like messages and is none, and for an unknown "from",
    it returns a ValueError that says so.
    """
    if isinstance(prompt, str) and _FIRST_KEY.match(prompt) and _ROLE_KEY.search(prompt):
        try:
            found = messages_of(decode_json(prompt, list[dict[str, Any]]))
        except ValueError:
            return ValueError("looks like a list of messages, and is no JSON. Write it with json.dumps.")
        return found if isinstance(found, ValueError) else MessagesOfText(found)
    if not isinstance(prompt, list) or not prompt:
        return prompt
    if not all(isinstance(one, dict) and {"from", "value"} <= one.keys() for one in prompt):
        return prompt
    if other := [one["from"] for one in prompt if str(one["from"]) not in _ROLES]:
        return ValueError(f"has a message from {other[0]!r}. Use one of: {', '.join(_ROLES)}.")
    rest = [{key: value for key, value in one.items() if key not in ("from", "value")} for one in prompt]
    return [
        {"role": _ROLES[one["from"]], "content": one["value"], **more} for one, more in zip(prompt, rest, strict=True)
    ]
