"""A JSON file that carries a digest of its own content, for what decides where a run goes on. No heavy imports.

The file is ``{"digest": …, "content": …}``. The digest is xxh3-128, in hex, of the bytes of the content as they stand
in the file. It guards against damage, not against an attacker.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import xxhash

Content = TypeVar("Content")


class _Digested(msgspec.Struct, frozen=True):
    digest: str
    content: msgspec.Raw


def encode_digested(content: object, *, indent: int | None = None) -> bytes:
    """The bytes of such a file. ``indent``: spaces a level, for people; None writes one line."""
    data = msgspec.json.encode(content)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    return b'{"digest": "%s",\n"content": %s}\n' % (xxhash.xxh3_128_hexdigest(data).encode(), data)


def decode_digested(data: bytes, *, type: type[Content]) -> Content:
    """The content of such a file. Raises ValueError, which says what is wrong, where the file is damaged."""
    try:
        file = msgspec.json.decode(data, type=_Digested)
        found = xxhash.xxh3_128_hexdigest(file.content)
        if found != file.digest:
            raise ValueError(f"its digest does not agree: {found}, was written with {file.digest}")
        return msgspec.json.decode(file.content, type=type)
    except msgspec.DecodeError as error:  # a ValidationError among them
        raise ValueError(str(error)) from error
