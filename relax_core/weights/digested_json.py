"""Encodes JSON files that carry a digest of their own content.

It has no heavy imports.

A file is ``{"digest": …, "content": …}``. The digest is xxh3-128, in hex, of the content's bytes in the file. It
detects damage but does not protect against an attacker.
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
    """Returns the file's bytes; ``indent`` is the number of spaces a level, or None for one line."""
    data = msgspec.json.encode(content)
    if indent is not None:
        data = msgspec.json.format(data, indent=indent)
    return b'{"digest": "%s",\n"content": %s}\n' % (xxhash.xxh3_128_hexdigest(data).encode(), data)


def decode_digested(data: bytes, *, type: type[Content]) -> Content:
    """Returns the content of a file's bytes; raises ValueError, which names the problem, if the file is damaged."""
    try:
        file = msgspec.json.decode(data, type=_Digested)
        found = xxhash.xxh3_128_hexdigest(file.content)
        if found != file.digest:
            raise ValueError(f"its digest does not agree: {found}, but it was written with {file.digest}")
        return msgspec.json.decode(file.content, type=type)
    except msgspec.DecodeError as error:  # A ValidationError is a DecodeError.
        raise ValueError(str(error)) from error
