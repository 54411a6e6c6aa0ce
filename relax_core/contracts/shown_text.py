"""Shows by its code each character of foreign text that a terminal or a browser would obey or hide.

`relax_core/server/static/dom.js` has the same list for the page.
"""

from __future__ import annotations

import json
import re

# Control characters but for tab and newline, characters without a width, those that turn the direction of text, line
# separators, halves of surrogate pairs, tags and other invisible format characters.
_HIDDEN = re.compile(
    "[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)


def shown(text: str) -> str:
    """Returns ``text`` with each hidden character as its code, such as ``U+202E``; tab and newline stay."""
    return _HIDDEN.sub(lambda match: f"U+{ord(match[0]):04X}", text)


def shown_json(text: str) -> str:
    """Returns the JSON ``text`` with each hidden character, which only a string of it can hold, as JSON escapes it."""
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], text)


def shown_line(text: str) -> str:
    """Returns ``text`` as `shown` does, on one line: each newline is a space."""
    return shown(text.replace("\n", " "))
