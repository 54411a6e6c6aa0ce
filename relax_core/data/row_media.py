"""Finds the images, videos and sounds of a data row, in content parts or in columns that placeholders refer to.

The result is a conversation with a `MediaSource` in each media part (`relax_core.contracts.env.ContentPart`). This
module neither opens nor checks the files. `unread_media` finds media that no key of the configuration names.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.config.choices import MediaPlace
from relax_core.config.modality import modality_of
from relax_core.contracts.data import BadRow
from relax_core.contracts.media import MEDIA_KINDS, MediaError, MediaKind, MediaSource
from relax_core.contracts.untrusted_values import shown
from relax_core.data.media.source_files import FORMATS, sniffed_format

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
_PLAIN_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}=*\s*")
_SOURCE_KEYS = ("url", "path", "bytes", "base64")  # further keys of a content part's source; its type is the first
_SETTINGS = ("detail", "text", "cache_control")  # keys of a content part that never contain a source
_MAX_PATH = 4096  # in characters, the limit of Linux
_SUFFIXES: dict[str, MediaKind] = {
    **dict.fromkeys(("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff"), "image"),
    **dict.fromkeys(("mp4", "m4v", "mov", "mkv", "webm", "avi"), "video"),
    **dict.fromkeys(("wav", "flac", "ogg", "oga", "opus", "mp3", "m4a", "aac", "aiff"), "audio"),
}
_NAMES: dict[str, MediaKind] = {
    **dict.fromkeys(("image", "img", "picture", "photo"), "image"),
    **dict.fromkeys(("video", "clip"), "video"),
    **dict.fromkeys(("audio", "sound", "speech"), "audio"),
}
_NAME = re.compile(rf"(?:^|[\W_\d])({'|'.join(_NAMES)})s?(?=$|[\W_\d])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MediaColumns:
    """Names the columns with media by kind; relative paths begin at ``root``.

    ``place`` says where to put media if the prompt has no placeholder for their kind; with None such a row is refused.
    """

    columns: Mapping[MediaKind, str] = field(default_factory=dict)
    root: Path = Path()
    place: MediaPlace | None = None


TEXT_ONLY = MediaColumns()


def row_with_sources(row: Mapping[str, Any], media: MediaColumns, *, where: str, prompt_key: str) -> dict[str, Any]:
    """Returns a data row with `MediaSource`s in its media columns and in its prompt's content parts.

    A row without media is returned unchanged. Raises `MediaError` if the number of placeholders in the prompt differs
    from the number of items in the columns, and `BadRow` for unknown content parts.
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
    if media.place is MediaPlace.first:
        made = found.placed_first(made)
    found.check_none_waits()
    if all(isinstance(message["content"], str) for message in made):
        return {**row, **columns}
    return {**row, **columns, prompt_key: made}


def prompt_modality(prompt: Any, media: MediaColumns) -> str:
    """Returns the modality of a data row, only from the media placeholders and content parts of its prompt.

    Returns "text" for a prompt that is neither text nor a list of messages.
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
    """Holds the items of a row's columns that no placeholder has used yet.

    Lists are reversed: the next item is the last.
    """

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
            for element in value:
                yield self.source(element, kind)
        else:
            yield self.source(value, kind)

    def source(self, value: Any, kind: MediaKind) -> MediaSource:
        """Returns the source of a path, bytes, ``{bytes, path}`` or a ``data:`` URI."""
        if isinstance(value, MediaSource):
            return value
        if isinstance(value, Mapping):
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes | bytearray | memoryview):
            return MediaSource(kind=kind, data=bytes(value))
        if not isinstance(value, str) or not value:
            message = f"{self._where}: its {kind} is neither a path, bytes, {{bytes, path}} nor a data: URI."
            raise MediaError(kind, "unknown_format", message)
        if _DATA_URI.match(value):
            return MediaSource(kind=kind, data=self._of_uri(value, kind))
        if _is_base64(value):
            return MediaSource(kind=kind, data=self._of_base64(value, kind))
        if len(value) > _MAX_PATH:
            message = f"{self._where}: its {kind} is a text of {len(value):,} characters, neither a path nor base64."
            raise MediaError(kind, "unknown_format", message)
        if _SCHEME.match(value):
            return MediaSource(kind=kind, path=value)  # `open_source` refuses this path later and names it
        return MediaSource(kind=kind, path=str(self._media.root / value))

    def _of_uri(self, uri: str, kind: MediaKind) -> bytes:
        head, _, text = uri.partition(",")
        if not head.lower().endswith(";base64"):
            message = f"{self._where}: its {kind} is a data: URI that cannot be read: it is not base64."
            raise MediaError(kind, "unknown_format", message)
        return self._of_base64(text, kind)

    def _of_base64(self, text: Any, kind: MediaKind) -> bytes:
        try:
            return base64.b64decode("".join(text.split()) if isinstance(text, str) else text, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            message = f"{self._where}: the base64 of its {kind} cannot be read: {error}."
            raise MediaError(kind, "unknown_format", message) from error

    def content(self, content: Any) -> Any:
        """Returns a message's content with sources; text without a placeholder stays text."""
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
                "prompt", f"{self._where}: a content part of type {shown(name, 60)} is not read. Use one of: {known}."
            )
        kind = _PART_KEYS[name]
        value = self._part_value(part, name, kind)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if name == "input_audio" and isinstance(value, Mapping) and "data" in value:
            value = self._of_base64(value["data"], kind)
        return {"type": kind, kind: self._next(kind) if value is None else self.source(value, kind)}

    def _part_value(self, part: Mapping[str, Any], name: str, kind: MediaKind) -> Any:
        """Returns the source of a content part, from the key of its type or of `_SOURCE_KEYS`; None without source."""
        given = {key: part[key] for key in (name, *_SOURCE_KEYS) if part.get(key) is not None}
        if given.keys() == {"path", "bytes"}:
            return given["bytes"]
        other_keys = [
            key
            for key, value in part.items()
            if not given and key not in ("type", *_SETTINGS) and isinstance(value, str | bytes | Mapping | list)
        ]
        if len(given) > 1 or other_keys:
            keys, read = ", ".join(shown(key, 60) for key in (given or other_keys)), ", ".join((name, *_SOURCE_KEYS))
            text = f"{self._where}: a content part of type {name} has {keys}. Give its source under one of: {read}."
            raise BadRow.because("prompt", text)
        if "base64" in given and isinstance(given["base64"], str) and not _DATA_URI.match(given["base64"]):
            return self._of_base64(given["base64"], kind)
        return next(iter(given.values()), None)

    def _next(self, kind: MediaKind) -> MediaSource:
        self._places[kind] += 1
        if not self.waiting.get(kind):
            raise self._count_error(kind)
        return self.waiting[kind].pop()

    def placed_first(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds the items of all kinds without placeholders to the start of the first user message."""
        first = [
            {"type": kind, kind: self._next(kind)}
            for kind in MEDIA_KINDS
            if not self._places[kind]
            for _ in range(len(self.waiting.get(kind, ())))
        ]
        at = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
        if not first:
            return messages
        if at is None:
            text = f"{self._where}: data.media_place=first needs a message of the user, and the prompt has none."
            raise BadRow.because("prompt", text)
        content = messages[at]["content"]
        rest = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return [*messages[:at], {**messages[at], "content": [*first, *rest]}, *messages[at + 1 :]]

    def check_none_waits(self) -> None:
        """Raises `MediaError` if a column has more items than the prompt has placeholders."""
        for kind, sources in self.waiting.items():
            if sources:
                raise self._count_error(kind)

    def _count_error(self, kind: MediaKind) -> MediaError:
        column = self._media.columns.get(kind)
        has = "no column is configured" if column is None else f"column {column} has another number of items"
        if column is not None and column not in self._columns:
            has = f"the row has no column {column}, only {', '.join(sorted(self._columns))}"
        message = (
            f"{self._where}: the prompt's placeholders {_PLACES[kind]} and items differ: {has}. Write one for each, "
            f"and name its column in data.media_keys.{kind}."
        )
        if column in self._columns and not self._places[kind]:
            message += " If no prompt has placeholders, data.media_place=first puts the items before its text."
        return MediaError(kind, "placeholder_count", message)


def unread_media(row: Mapping[str, Any], media: MediaColumns) -> dict[MediaKind, tuple[str | None, bool]]:
    """Returns the kinds of media in a row (from `row_with_sources`) for which ``media`` has no column.

    Maps each kind to its column (None if only the prompt shows this kind), and to whether the prompt has a placeholder
    for this kind. A placeholder without a column counts only at the beginning or the end of a message, where data sets
    write placeholders; elsewhere a text may be about the tag <video>.
    """
    contents: list[Any] = (
        [row["prompt"]] if isinstance(row["prompt"], str) else [message["content"] for message in row["prompt"]]
    )
    parts: list[Any] = [
        {"type": "text", "text": content} if isinstance(content, str) else part
        for content in contents
        for part in ([content] if isinstance(content, str) else content)
    ]
    texts = [part["text"].strip() for part in parts if part["type"] == "text"]
    given = {part["type"] for part in parts}
    columns = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
    found: dict[MediaKind, tuple[str | None, bool]] = {}
    for kind in MEDIA_KINDS:
        if kind in media.columns or kind in given:
            continue
        place = _PLACES[kind]
        has_place = any(place in text for text in texts)
        fitting = [name for name, value in columns.items() if _column_kind(name, value, sure=not has_place) == kind]
        if fitting:
            found[kind] = fitting[0], has_place
        elif any(text.startswith(place) or text.endswith(place) for text in texts):
            found[kind] = None, True
    return found


def _column_kind(name: str, value: Any, *, sure: bool) -> MediaKind | None:
    """Returns the kind of media in a column of a row, None for another column.

    The content of the column determines the kind. For a path, the suffix determines the kind, if the column also has
    the name of a kind, such as "image". If ``sure`` is False, such a column name is sufficient.
    """
    if isinstance(value, list):
        value = next((element for element in value if element is not None), None)
    words = _NAME.search(name)
    named = None if words is None else _NAMES[words[1].lower()]
    if isinstance(value, Mapping):
        is_struct = any(value.get(key) is not None for key in ("bytes", "path"))
        value = (value.get("bytes") or value.get("path")) if is_struct else None
        named = named or (_SUFFIXES.get(value.rpartition(".")[2].lower()) if isinstance(value, str) else None)
    if not value or not isinstance(value, str | bytes):
        return None
    if isinstance(value, bytes):
        form = sniffed_format(value[:32])
        kinds = [kind for kind in MEDIA_KINDS if form in FORMATS[kind]]
        return named if named in kinds else next(iter(kinds), None if sure else named)
    if _DATA_URI.match(value):
        kind = value[5:].partition("/")[0].lower()
        return next((media_kind for media_kind in MEDIA_KINDS if media_kind == kind), named)
    if _is_base64(value):
        return named or "image"
    if named is None or "\n" in value:
        return None
    return _SUFFIXES.get(value[:_MAX_PATH].rpartition(".")[2].lower(), None if sure else named)


def _is_base64(text: str) -> bool:
    """Returns whether a text is a file of a known format in base64, without the prefix of a data: URI."""
    if len(text) < 64 or _PLAIN_BASE64.fullmatch(text) is None:
        return False
    head = "".join(text[:80].split())
    return bool(sniffed_format(base64.b64decode(head[: len(head) // 4 * 4])[:32]))


def is_content(content: Any) -> bool:
    """Returns whether a message's content is text or a non-empty list of parts."""
    if isinstance(content, str):
        return True
    return (
        isinstance(content, Sequence)
        and not isinstance(content, bytes)
        and len(content) > 0
        and all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    )


def without_base64(text: str) -> str:
    """Returns a text without the base64 content of items, for errors and logs."""
    return _BASE64.sub("data:…", text)
