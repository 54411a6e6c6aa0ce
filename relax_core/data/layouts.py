"""Finds the layout of a data row for training without engines, and converts the row to conversations.

The columns of a row determine its layout, and data.prompt_key and data.answer_key name columns with other names. The
converted row has its conversation under `MESSAGES`, or two conversations under `CHOSEN` and `REJECTED`, or plain text
under `TEXT`. It also has the keys "prompt" and "answer" of every data row, for tables and for its modality.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.untrusted_values import decode_json, holds_huge_integer, shown
from relax_core.data.row_formats import (
    WrittenNumber,
    is_conversation,
    label_text,
    messages_of,
    value_at,
    without_null_keys,
    without_nulls,
)
from relax_core.data.row_media import MediaColumns, row_with_sources, without_base64

MESSAGES, CHOSEN, REJECTED, LABEL, TEXT, TOOLS = "messages", "chosen", "rejected", "label", "text", "tools"
COMPLETION = "completion"
CONVERSATIONS = (MESSAGES, "conversations", "conversation")
ASSISTANT = "assistant"
_MISSING = object()
_WANTED: dict[Offline, str] = {
    "demonstrations": "messages; conversations; prompt and completion; data.prompt_key and data.answer_key; or text",
    "pairs": "chosen and rejected, with the prompt in data.prompt_key, in messages or as their common first messages",
    "labels": "label, and messages; conversations; prompt and completion; or data.prompt_key and data.answer_key",
}


@dataclass(frozen=True, kw_only=True)
class OfflineKeys:
    """Names the ``kind`` of rows and the columns that the configuration names (data.prompt_key, data.answer_key)."""

    kind: Offline
    prompt: str
    answer: str
    media: MediaColumns = field(default_factory=MediaColumns)


def check_layout(row: Mapping[str, Any], keys: OfflineKeys, *, where: str) -> None:
    """Raises ValueError if the columns of a table match no layout of this kind.

    ``row`` maps each column to None, or to a mapping with its inner keys. A dotted key may also be an index in a list.
    """
    has = {
        name
        for name in (keys.prompt, keys.answer)
        if value_at(row, name, missing=_MISSING) is not _MISSING or row.get(name.partition(".")[0], {}) is None
    }
    if _layout(has | row.keys(), keys) is None:
        raise ValueError(_no_layout(row, keys, where))


def offline_row(row: Mapping[str, Any], keys: OfflineKeys, *, where: str) -> DataRow:
    """Returns the data row with its conversations, and with `MediaSource`s in their media parts.

    Messages have the keys "role" and "content", and no null-valued keys. `LABEL` is a bool, and `TOOLS` a list of
    schemas. Raises `BadRow`, with a text that starts with ``where``, for a row that cannot be trained.
    """
    found = {name: value for name in (keys.prompt, keys.answer) if (value := value_at(row, name)) is not None}
    given = found | {name: value for name, value in row.items() if value is not None}
    layout = _layout(given.keys(), keys)
    if layout is None:
        raise BadRow.because("missing_key", _no_layout(row, keys, where))
    if holds_huge_integer(row):
        raise BadRow.because("malformed", f"{where}: a number has more than 64 bits. Write it as text.")
    made = {name: value for name, value in row.items() if name not in (MESSAGES, TEXT)} | _tools(row, where)
    name = layout[0]
    if keys.kind == "demonstrations" and len(layout) == 1 and name.rpartition(".")[2] == TEXT:
        text = given[name]
        if not isinstance(text, str) or not text.strip():
            raise BadRow.because("empty", f"{where}: {name}={_short(text)} is not a text, or it is empty.")
        return made | {TEXT: text, "prompt": text, "answer": ""}
    if keys.kind == "pairs":
        made |= _pair(given, row, layout, keys, where)
    else:
        made[MESSAGES] = _whole(given, row, layout, keys, where)
        made |= _shown(made[MESSAGES], _last_answer(made[MESSAGES], where))
    if keys.kind == "labels":
        made[LABEL] = _label(row[LABEL], where)
    return made


def _layout(names: Collection[str], keys: OfflineKeys) -> tuple[str, ...] | None:
    """Returns the columns to read: the prompt and the answers, or a column with everything; None without a layout."""
    if keys.kind == "pairs":
        if not {CHOSEN, REJECTED} <= set(names):
            return None
        asked = next((name for name in (keys.prompt, *CONVERSATIONS) if name in names), None)
        return (CHOSEN, REJECTED) if asked is None else (asked, CHOSEN, REJECTED)
    if keys.kind == "labels" and LABEL not in names:
        return None
    for answer in (keys.answer, COMPLETION):
        if keys.prompt in names and answer in names:
            return keys.prompt, answer
    named = (keys.prompt,) if keys.prompt != "prompt" else ()  # a column that the user names has whole conversations
    for whole in (*named, *CONVERSATIONS):
        if whole in names:
            return (whole,)
    return (TEXT,) if keys.kind == "demonstrations" and TEXT in names else None


def _no_layout(row: Mapping[str, Any], keys: OfflineKeys, where: str) -> str:
    inner = [f"{name}.{key}" for name, value in row.items() if isinstance(value, Mapping) for key in value]
    return (
        f"{where}: its keys {', '.join(sorted([*row, *inner]))} match no layout. Wanted are {_WANTED[keys.kind]} "
        f"(data.prompt_key={keys.prompt}, data.answer_key={keys.answer})."
    )


def _whole(
    given: Mapping[str, Any], row: Mapping[str, Any], layout: tuple[str, ...], keys: OfflineKeys, where: str
) -> list[Any]:
    """Returns a complete conversation, with media sources."""
    prompt = _messages(given[layout[0]], layout[0], where, text_role="user" if len(layout) > 1 else None)
    if len(layout) == 1 or prompt[-1]["role"] == ASSISTANT:
        return _checked(prompt, row, keys, where)
    answer = given[layout[1]]
    if isinstance(answer, int | float | WrittenNumber) and not isinstance(answer, bool):
        answer = _number_text(answer, layout[1], where)
    return _checked([*prompt, *_messages(answer, layout[1], where, text_role=ASSISTANT)], row, keys, where)


def _pair(
    given: Mapping[str, Any], row: Mapping[str, Any], layout: tuple[str, ...], keys: OfflineKeys, where: str
) -> dict[str, Any]:
    """Returns the two conversations of a pair, and the keys "prompt" and "answer"."""
    asked = _messages(given[layout[0]], layout[0], where, text_role="user") if len(layout) == 3 else []
    pair = []
    for name in (CHOSEN, REJECTED):
        answer = _messages(given[name], name, where, text_role=ASSISTANT if asked else None)
        # Some data sets repeat the prompt in front of both answers.
        whole = answer if answer[0]["role"] != ASSISTANT else [*asked, *answer]
        pair.append(_checked(whole, row, keys, where))
    chosen, rejected = pair
    first = next((at for at, (mine, its) in enumerate(zip(chosen, rejected, strict=False)) if mine != its), None)
    if first is None:
        if len(chosen) == len(rejected):
            raise BadRow.because("identical", f"{where}: {CHOSEN} and {REJECTED} are the same.")
        first = min(len(chosen), len(rejected))
    for name, whole in zip((CHOSEN, REJECTED), pair, strict=True):
        if first == len(whole):
            raise BadRow.because("empty", f"{where}: {name} has no message after the common messages.")
        if first == 0 or whole[first]["role"] != ASSISTANT:
            text = f"{where}: {CHOSEN} and {REJECTED} differ before an answer of the assistant, in message {first + 1}."
            raise BadRow.because("prompt", text)
        if any(not isinstance(message["content"], str | list) for message in whole[first:]) or _has_media(
            whole[first:]
        ):
            raise BadRow.because("prompt", f"{where}: {name} has media after the common messages; a pair shares them.")
    return {CHOSEN: chosen, REJECTED: rejected, **_shown(chosen, _last_answer(chosen, where))}


def _messages(value: Any, name: str, where: str, *, text_role: str | None) -> list[Any]:
    """Returns a column as messages. A text becomes a message of ``text_role``; None refuses a text."""
    found = messages_of([value] if isinstance(value, Mapping) else value)
    if isinstance(found, ValueError):
        raise BadRow.because("prompt", f"{where}: {name}={_short(value)} {found}")
    if isinstance(found, str) and text_role is not None:
        if not found.strip():
            raise BadRow.because("empty", f"{where}: {name} is empty.")
        return [{"role": text_role, "content": found}]
    found = without_null_keys(found)
    if not is_conversation(found):
        wanted = "a list of messages with role and content"
        wanted = wanted if text_role is None else f"text or {wanted}"
        raise BadRow.because("prompt", f"{where}: {name}={_short(found)} is not {wanted}.")
    return list(found)


def _checked(messages: list[Any], row: Mapping[str, Any], keys: OfflineKeys, where: str) -> list[Any]:
    """Returns a conversation with media sources. Raises `BadRow` for answers that cannot be trained."""
    if keys.media.columns or not all(isinstance(message["content"], str) for message in messages):
        messages = row_with_sources({**row, MESSAGES: messages}, keys.media, where=where, prompt_key=MESSAGES)[MESSAGES]
    before = ""
    for number, message in enumerate(messages, start=1):
        if message["role"] == ASSISTANT:
            if before == ASSISTANT:
                text = f"{where}: message {number} of the assistant follows another. Join the two messages."
                raise BadRow.because("prompt", text)
            if not message.get("tool_calls") and not _text(message).strip():
                raise BadRow.because("empty", f"{where}: message {number} of the assistant is empty.")
            if _has_media([message]):
                raise BadRow.because("prompt", f"{where}: message {number} of the assistant has media.")
        before = message["role"]
    return messages


def _last_answer(messages: list[Any], where: str) -> int:
    """Returns the number of the last message of the assistant that has a message before it."""
    found = [number for number, message in enumerate(messages) if number and message["role"] == ASSISTANT]
    if not found:
        raise BadRow.because("no_answer", f"{where}: no message of the assistant follows another message.")
    return found[-1]


def _shown(messages: list[Any], answer: int) -> dict[str, Any]:
    return {"prompt": messages[:answer], "answer": _text(messages[answer])}


def _text(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _has_media(messages: list[Any]) -> bool:
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return any(part["type"] != "text" for content in contents for part in content)


def _tools(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the schemas in the column `TOOLS`, a list or its JSON text; nothing without tools."""
    value = row.get(TOOLS)
    if isinstance(value, str):
        try:
            value = decode_json(value, list[dict[str, Any]]) if value.strip() else None
        except ValueError as error:
            raise BadRow.because("tools", f"{where}: {TOOLS} is not a JSON list of schemas: {error}.") from error
    if not value:
        return {TOOLS: None}
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRow.because("tools", f"{where}: {TOOLS}={_short(value)} is not a list of schemas.")
    return {TOOLS: without_nulls(value)}


def _label(value: Any, where: str) -> bool:
    if isinstance(value, WrittenNumber):
        value = value.value
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise BadRow.because("label", f"{where}: {LABEL}={_short(value)} is neither true, false, 0 nor 1.")


def _number_text(value: int | float | WrittenNumber, name: str, where: str) -> str:
    try:
        return label_text(value)
    except ValueError as error:
        raise BadRow.because("answer", f"{where}: {name}={_short(value)} {error}") from error


def _short(value: Any) -> str:
    text = without_base64(shown(value, 200))
    return text if len(text) <= 60 else text[:57] + "..."
