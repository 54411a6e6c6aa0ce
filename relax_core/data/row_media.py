"""Finds the images, videos and sounds of a data row: in columns with places in the prompt, or in content parts.

The result is a conversation whose content parts hold a `MediaSource` each (`relax_core.contracts.env.ContentPart`).
Files are neither opened nor looked for here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.config.modality_shares import modality_of
from relax_core.contracts.data import BadRow
from relax_core.contracts.media import MEDIA_KINDS, MediaError, MediaKind, MediaSource

_PLACES = {kind: f"<{kind}>" for kind in MEDIA_KINDS}
_KINDS = {place: kind for kind, place in _PLACES.items()}
_PART_KEYS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_DATA_URI = re.compile(r"data:[^,]*,", re.IGNORECASE)
_BASE64 = re.compile(r"data:[^,\s]{0,80};base64,[A-Za-z0-9+/=_-]*")


@dataclass(frozen=True, kw_only=True)
class MediaColumns:
    """Names the columns with media by kind; relative paths begin at ``root``."""

    columns: Mapping[MediaKind, str] = field(default_factory=dict)
    root: Path = Path()


TEXT_ONLY = MediaColumns()


def row_with_sources(row: Mapping[str, Any], media: MediaColumns, *, where: str, prompt_key: str) -> dict[str, Any]:
    """Returns a data row whose media are sources: in its columns, and in its prompt's content parts.

    Rows of text stay as they are. Raises `MediaError` if the prompt has not as many places as the columns have items,
    and `BadRow` for content parts of another kind.
    """
    found = _Sources(media, where, columns=row)
    columns: dict[str, Any] = {}
    for kind, column in media.columns.items():
        sources = list(found.of_column(row.get(column), kind))
        found.waiting[kind] = sources[::-1]
        if sources:
            columns[column] = sources
    prompt = row[prompt_key]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    made = [{**message, "content": found.content(message["content"])} for message in messages]
    found.check_none_waits()
    if all(isinstance(message["content"], str) for message in made):
        return {**row, **columns}
    return {**row, **columns, prompt_key: made}


def prompt_modality(prompt: Any, media: MediaColumns) -> str:
    """Returns the modality of a data row, from its prompt alone: its places for media and its content parts.

    A prompt that is no text and no list of messages counts as text.
    """
    messages = prompt if isinstance(prompt, list) else [{"content": prompt}]
    kinds: set[MediaKind] = set()
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            kinds |= {kind for kind in media.columns if _PLACES[kind] in content}
        elif isinstance(content, Sequence) and not isinstance(content, bytes):
            types = [part.get("type") for part in content if isinstance(part, Mapping)]
            kinds |= {_PART_KEYS[name] for name in types if name in _PART_KEYS}
    return modality_of(kinds)


class _Sources:
    """Holds the items of a row's columns that no place has taken yet, the next one last."""

    def __init__(self, media: MediaColumns, where: str, *, columns: Collection[str]) -> None:
        self._media, self._where, self._columns = media, where, columns
        self.waiting: dict[MediaKind, list[MediaSource]] = {}
        self._places: dict[MediaKind, int] = dict.fromkeys(MEDIA_KINDS, 0)
        names = [_PLACES[kind] for kind in MEDIA_KINDS if kind in media.columns]
        self._place = re.compile(f"({'|'.join(names)})") if names else None

    def of_column(self, value: Any, kind: MediaKind) -> Iterator[MediaSource]:
        if value is None:
            return
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            for one in value:
                yield self.source(one, kind)
        else:
            yield self.source(value, kind)

    def source(self, value: Any, kind: MediaKind) -> MediaSource:
        """Returns the source that a path, bytes, ``{bytes, path}`` or a ``data:`` URI names."""
        if isinstance(value, MediaSource):
            return value
        if isinstance(value, Mapping):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes | bytearray | memoryview):
            return MediaSource(kind=kind, data=bytes(value))
        if not isinstance(value, str) or not value:
            told = f"{self._where}: its {kind} is neither a path, bytes, {{bytes, path}} nor a data: URI."
            raise MediaError(kind, "unknown_format", told)
        if _DATA_URI.match(value):
            return MediaSource(kind=kind, data=self._of_uri(value, kind))
        if _SCHEME.match(value):
            return MediaSource(kind=kind, path=value)  # it is refused by name where items are opened
        return MediaSource(kind=kind, path=str(self._media.root / value))

    def _of_uri(self, uri: str, kind: MediaKind) -> bytes:
        head, _, text = uri.partition(",")
        if not head.lower().endswith(";base64"):
            told = f"{self._where}: its {kind} is a data: URI that cannot be read: it is not base64."
            raise MediaError(kind, "unknown_format", told)
        return self._of_base64(text, kind)

    def _of_base64(self, text: Any, kind: MediaKind) -> bytes:
        try:
            return base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            told = f"{self._where}: the base64 of its {kind} cannot be read: {error}."
            raise MediaError(kind, "unknown_format", told) from error

    def content(self, content: Any) -> Any:
        """Returns a message's content: text without a place stays text."""
        if isinstance(content, str):
            if self._place is None or not self._place.search(content):
                return content
            pieces = self._place.split(content)
            return [self._piece(piece, number % 2 == 1) for number, piece in enumerate(pieces) if piece]
        return [self._part(part) for part in content]

    def _piece(self, piece: str, is_place: bool) -> dict[str, Any]:
        if not is_place:
            return {"type": "text", "text": piece}
        kind = _KINDS[piece]
        return {"type": kind, kind: self._next(kind)}

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        name = part.get("type")
        if name == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if name not in _PART_KEYS:
            known = ", ".join(("text", *_PART_KEYS))
            raise BadRow.because(
                "prompt", f"{self._where}: a content part of type {name!r} is not read. Use one of: {known}."
            )
        kind = _PART_KEYS[name]
        value = part.get(name)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if name == "input_audio" and isinstance(value, Mapping) and "data" in value:
            value = self._of_base64(value["data"], kind)
        return {"type": kind, kind: self._next(kind) if value is None else self.source(value, kind)}

    def _next(self, kind: MediaKind) -> MediaSource:
        self._places[kind] += 1
        if not self.waiting.get(kind):
            raise self._count_error(kind)
        return self.waiting[kind].pop()

    def check_none_waits(self) -> None:
        """Raises `MediaError` if a column has more items than the prompt has places."""
        for kind, sources in self.waiting.items():
            if sources:
                raise self._count_error(kind)

    def _count_error(self, kind: MediaKind) -> MediaError:
        column = self._media.columns.get(kind)
        has = "no column of them is named" if column is None else f"column {column} has another number of items"
        if column is not None and column not in self._columns:
            has = f"the row has no column {column}, only {', '.join(sorted(self._columns))}"
        told = (
            f"{self._where}: the prompt's places {_PLACES[kind]} and the items differ: {has}. Write one for each item, "
            f"and name its column in data.media_keys.{kind}."
        )
        return MediaError(kind, "placeholder_count", told)


def is_content(content: Any) -> bool:
    """Returns whether a message's content is text, or a list of parts that are not empty."""
    if isinstance(content, str):
        return True
    return (
        isinstance(content, Sequence)
        and not isinstance(content, bytes)
        and len(content) > 0
        and all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    )


def without_base64(text: str) -> str:
    """Returns a text for an error or a log in which no item's content stands."""
    return _BASE64.sub("data:…", text)
