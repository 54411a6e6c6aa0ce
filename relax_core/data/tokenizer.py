"""Implements the tokenizer of a model folder. It renders conversations with the folder's chat template.

The module reads tokenizer.json with the library tokenizers, and renders the chat template (`chat_template.py`) with
jinja2. So the rollout imports neither transformers nor torch; their imports take seconds and hundreds of megabytes. A
test checks that the result equals transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.contracts.media import MEDIA_KINDS, Media, MediaItem, MediaKind
from relax_core.contracts.untrusted_files import open_regular
from relax_core.contracts.untrusted_values import clean_text, clean_value
from relax_core.data.chat_template import (
    OWN_VARIABLES,
    SETTINGS,
    chat_templates,
    check_template_arguments,
    compile_template,
    read_json,
    special_tokens,
    utc_date,
)
from relax_core.families.hf_config import (
    end_token_ids,
    has_hf_config,
    inner_config,
    language_values,
    read_hf_config,
)

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_MAX_TOKENIZER_BYTES = 256 << 20
_GOES_ON = f"Relax{secrets.token_hex(16)}GoesOnHere"  # added at the end of a message that the model continues
LARGE_TEXT = 1 << 16  # in characters; other threads can run while a longer text is tokenised
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")
_CHARACTERS_A_TOKEN = 16  # minimum of `_longest_token`, because an unknown word may be one token or lose characters


class TextTooLong(ValueError):
    """A text has more characters than the allowed number of tokens can represent. The text was not tokenised.

    ``tokens`` is a lower bound of the text's number of tokens; this bound is above the allowed number.
    """

    def __init__(self, text: str, *, tokens: int) -> None:
        super().__init__(text)
        self.tokens = tokens


class PromptTokenizer:
    """Converts text to token ids and back.

    ``stop_token_ids`` lists the tokens that end a response, sorted. ``media_ids`` maps each kind of media to its
    placeholder token in the rendered text. It is empty for a text-only model. ``template_arguments`` are additional
    variables for the chat template, such as Qwen3's enable_thinking. For a template that reads the clock, the time is
    midnight of ``date``, such as 2026-11-28; None means the current day in UTC. Raises ValueError for a folder without
    a required file, and for a variable that the folder's template does not read.
    """

    def __init__(
        self, model_folder: Path, *, template_arguments: Mapping[str, Any] | None = None, date: str | None = None
    ) -> None:
        self._tokenizer = load_tokenizer(model_folder)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = read_json(model_folder / SETTINGS)
        self.special_tokens = special_tokens(settings)
        template, self._tool_text = chat_templates(model_folder, settings)
        clock, what = datetime.fromisoformat(date or utc_date()), f"model folder {model_folder}"
        self._template = self._tool_template = compile_template(template, what=what, clock=clock)
        if self._tool_text != template:
            self._tool_template = compile_template(self._tool_text, what=what, clock=clock)
        self._arguments = dict(template_arguments or {})
        check_template_arguments(self._arguments, template + self._tool_text, model_folder)
        self.stop_token_ids = self._stop_token_ids(model_folder)
        self.media_ids = self._media_ids(model_folder)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        goes_on: bool = False,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, rendered by the chat template up to the start of the next answer.

        ``tools`` are the schemas of tools that the template shows. A media item becomes its placeholder
        (`place_items`). Names of special tokens in the messages are encoded as plain text; only names that the template
        writes become special tokens. With ``goes_on`` the next answer continues the last message. Raises ValueError,
        with the template's message, for a conversation that the template does not accept. Raises `TextTooLong` for a
        text that certainly has more than ``most_tokens`` tokens.
        """
        hidden_tools = None if tools is None else [self.hidden(tool) for tool in tools]
        rendered = self.render(messages, tools=hidden_tools, goes_on=goes_on, hides=True)
        return self.encode_shown(self.short_enough(rendered, most_tokens))

    def max_characters(self, tokens: int) -> int:
        """Returns the maximum number of characters in ``tokens`` tokens, from the longest token of the vocabulary."""
        return tokens * self._longest_token

    def short_enough(self, text: str, most_tokens: int | None) -> str:
        """Returns the text. Raises `TextTooLong` if the text certainly has more than ``most_tokens`` tokens."""
        if most_tokens is None or len(text) <= most_tokens * _CHARACTERS_A_TOKEN:
            return text
        if len(text) <= self.max_characters(most_tokens):
            return text
        raise TextTooLong(
            f"it has {len(text):,} characters, which are more than {most_tokens:,} tokens can represent",
            tokens=max(most_tokens + 1, len(text) // self._longest_token),
        )

    def hidden(self, value: Any) -> Any:
        """Replaces the names of special tokens in the texts and keys of a message or another JSON value.

        A part of such a name is also replaced if adjacent text could complete the name, because the template joins
        texts and writes keys between signs such as "<" and ">". `encode_shown` converts the replacements in the
        rendered text back to plain text.
        """
        return self._hidden(_with_arguments(value, as_text=False) if isinstance(value, Mapping) else value)

    def _hidden(self, value: Any) -> Any:
        return value if self._special_names is None else _with_texts(value, self._hidden_text)

    def _hidden_text(self, text: str) -> str:
        special, names = self._special_names, self._special_parts
        assert special is not None
        core = text.strip()  # replaced too, because a template may trim it
        if core and len(core) <= names.longest and core in names.inside:
            return text.replace(core, _hide_text(core))
        begins = next((k for k in range(min(names.longest, len(core)), 0, -1) if core[:k] in names.ends), 0)
        ends = next((k for k in range(min(names.longest, len(core)), 0, -1) if core[-k:] in names.begins), 0)
        if not begins and not ends:
            return special.sub(_hide, text)
        at = len(text) - len(text.lstrip())
        middle = core[begins : len(core) - ends] if begins + ends < len(core) else ""
        if not middle:
            return text.replace(core, _hide_text(core))
        first, last = _hide_text(core[:begins]), _hide_text(core[len(core) - ends :])
        return text[:at] + first + special.sub(_hide, middle) + last + text[at + len(core) :]

    def encode_shown(self, rendered: str) -> list[int]:
        """Returns the token ids of a text that `render` made from `hidden` messages."""
        special = self._special_names
        if special is None:
            return self.encode_text(rendered)
        shown = _HIDDEN.sub(_shown, rendered)
        if special.findall(shown) == special.findall(rendered):
            # All special tokens in the text come from the template. The text is encoded as a whole, because separate
            # pieces may have different tokens if a tokenizer marks the first word.
            return self.encode_text(shown)
        ids: list[int] = []
        # The pattern has one group, so every second piece is a special token that the template wrote.
        for number, piece in enumerate(special.split(rendered)):
            if piece:
                ids += self.encode_text(piece) if number % 2 else self.encode_plain(_HIDDEN.sub(_shown, piece))
        return ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        opens_answer: bool = True,
        goes_on: bool = False,
        hides: bool = False,
    ) -> str:
        """Renders a conversation to the text that `encode_shown` converts to token ids.

        With ``opens_answer`` the text ends with the tokens that begin the next answer. With ``goes_on`` the text ends
        with the last text of the last message. Arguments of tool calls may be an object or JSON text. The template gets
        the arguments as an object; if the template does not accept objects, as JSON text. With ``hides`` the messages
        are `hidden`. Raises ValueError as `encode` does.
        """
        if goes_on:
            marked = [*messages[:-1], _marked_end(messages[-1])]
            rendered = self.render(marked, tools=tools, opens_answer=False, hides=hides)
            shown, found, _ = rendered.rpartition(_GOES_ON)
            if not found or _GOES_ON in shown or self._closes_thinking(messages, tools, shown):
                raise ValueError("the chat template changes the end of the last message's text")
            return shown
        shown_messages = [_without_sources(message) for message in messages]
        problem: ValueError | None = None
        for as_text in (False, True) if any(message.get("tool_calls") for message in messages) else (False,):
            of_form = [_with_arguments(message, as_text=as_text) for message in shown_messages]
            of_form = [self._hidden(message) for message in of_form] if hides else of_form
            own = dict(zip(OWN_VARIABLES, (of_form, tools, None, opens_answer), strict=True))
            try:
                template = self._tool_template if tools else self._template
                return template.render(**(self.special_tokens | self._arguments | own))
            except Exception as error:  # A template is code of the model's author and may raise any error.
                cause = error
                problem = problem or ValueError(f"the chat template refuses it: {type(error).__name__}: {error}")
                problem.__cause__ = problem.__cause__ or cause
        assert problem is not None
        raise problem

    def _closes_thinking(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, shown: str
    ) -> bool:
        """Returns whether the template closes thinking that the last message began; ``shown`` is the rendered text."""
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if "<think>" not in text or "</think>" in text:
            return False
        before = self.render(messages[:-1], tools=tools, opens_answer=False) if messages[1:] else ""
        return shown.count("</think>") > before.count("</think>")

    def place_items(self, ids: Sequence[int], items: Sequence[MediaItem]) -> tuple[list[int], list[Media]]:
        """Replaces the placeholders in ``ids`` by the items' ids, in order; also returns the items' positions.

        Raises ValueError if the placeholders in ``ids`` do not match the items.
        """
        kinds = {token: kind for kind, token in self.media_ids.items()}
        places = [place for place, token in enumerate(ids) if token in kinds]
        _check_kinds([kinds[ids[place]] for place in places], [item.kind for item in items])
        whole: list[int] = []
        media: list[Media] = []
        done = 0
        for place, item in zip(places, items, strict=True):
            first = place - item.placeholder.index(ids[place])
            behind = first + len(item.placeholder)
            if first < done or list(ids[first:behind]) != item.placeholder:
                raise ValueError(f"the chat template does not write the placeholder {item.placeholder} of {item.kind}")
            whole += ids[done:first]
            media.append(Media(item, len(whole), len(whole) + item.rows))
            whole += item.ids.tolist()
            done = behind
        return whole + list(ids[done:]), media

    def check_places(self, messages: Sequence[Mapping[str, Any]], kinds: Sequence[MediaKind]) -> None:
        """Raises ValueError as `place_items` does, if the template omits media of a conversation or adds media."""
        names = {self.token_text(token): kind for kind, token in self.media_ids.items()}
        rendered = self.render([self.hidden(message) for message in messages])
        _check_kinds([names[name] for name in re.findall("|".join(map(re.escape, names)), rendered)], kinds)

    def encode_text(self, text: str) -> list[int]:
        """Returns the token ids of a text from `render`."""
        ids: list[int] = _encoded(self._tokenizer, text).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Returns the token ids of a text, with names of special tokens encoded as plain text.

        So an environment's text never contains a token that ends a turn.
        """
        ids: list[int] = _encoded(self._plain, text).ids
        return ids

    def encode_document(self, text: str) -> list[int]:
        """Returns the token ids of a plain text without a template, such as a document for pre-training.

        Names of special tokens are encoded as plain text. The token that the tokenizer adds at the beginning of a text,
        if any, comes first, and the token that ends a text comes last.
        """
        begin = [self._tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))]
        added = _encoded(self._tokenizer, "", adds_special=True).ids
        return [*(token for token in added[:1] if token in begin), *self.encode_plain(text), self._end_of_text()]

    def _end_of_text(self) -> int:
        """Returns the token that ends a text; in a chat model, eos_token may end only a message."""
        found = (
            self._tokenizer.token_to_id(name) for name in (*_ENDS_OF_TEXT, self.special_tokens.get("eos_token", ""))
        )
        return next((token for token in found if token is not None), self.stop_token_ids[0])

    def plain_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the start and the end of each token of `encode_plain` in the text, in characters."""
        offsets: list[tuple[int, int]] = _encoded(self._plain, text).offsets
        return offsets

    @cached_property
    def _plain(self) -> Tokenizer:
        """Returns a tokenizer that encodes names of special tokens as text.

        It is a separate object, because a change of this setting in the shared tokenizer would affect other threads.
        """
        from tokenizers import Tokenizer

        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _longest_token(self) -> int:
        """Returns the number of characters of the longest token; in a byte-level vocabulary, its number of bytes."""
        names = self._tokenizer.get_vocab(with_added_tokens=True)
        return max(_CHARACTERS_A_TOKEN, *map(len, names)) if names else _CHARACTERS_A_TOKEN

    def token_text(self, token: int) -> str:
        """Returns the text of one token of the vocabulary, such as the name of a special token."""
        return str(self._tokenizer.id_to_token(token))

    def is_special(self, token: int) -> bool:
        """Returns whether a token is one of the tokenizer's special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        return added is not None and bool(added.special)

    @property
    def template(self) -> str:
        """Returns the text of the chat template; if there are two, the text of the tool-use template."""
        return self._tool_text

    @cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        """Returns a pattern for the names of special tokens, longest first; None without special tokens."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special and token.content), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    @cached_property
    def _special_parts(self) -> _NameParts:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return _name_parts(token.content for token in added if token.special and token.content)

    def special_spans(self, rendered: str) -> list[tuple[int, int]]:
        """Returns the start and the end of each special token in a text from `render` with ``hides``."""
        special = self._special_names
        return [] if special is None else [found.span() for found in special.finditer(rendered)]

    @property
    def vocabulary_size(self) -> int:
        """Returns the number of rows that an embedding of all tokens needs: the largest token id plus 1."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of response tokens, including the names of special tokens.

        So the texts of a response with and without a special token differ.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _media_ids(self, model_folder: Path) -> dict[MediaKind, int]:
        """Returns the placeholders that config.json names; without config.json, the placeholders in the vocabulary."""
        if has_hf_config(model_folder):
            values = inner_config(read_hf_config(model_folder))
            found = {kind: values.get(f"{kind}_token_id") for kind in MEDIA_KINDS}
        else:
            found = {kind: self._tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in MEDIA_KINDS}
        return {kind: token for kind, token in found.items() if token is not None}

    def _stop_token_ids(self, model_folder: Path) -> list[int]:
        """Returns the tokenizer's end token and the end tokens in the model's generation settings, sorted."""
        found: set[int] = set()
        end = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        if end is not None:
            found.add(end)
        found.update(end_token_ids(model_folder))
        if not found:
            raise ValueError(
                f"model folder {model_folder} names no end token. Set eos_token in tokenizer_config.json, or "
                "eos_token_id in generation_config.json."
            )
        return sorted(found)


def vocabulary_problem(model_folder: Path, tokenizer: PromptTokenizer) -> str:
    """Returns an error text if the tokenizer has token ids without a row in the folder's weights, else ""."""
    rows = language_values(read_hf_config(model_folder)).get("vocab_size")
    if not isinstance(rows, int) or tokenizer.vocabulary_size <= rows:
        return ""
    return (
        f"model.path={model_folder}: its tokenizer has token ids up to {tokenizer.vocabulary_size - 1}, its weights "
        f"only {rows} rows (vocab_size in config.json). Give the tokenizer that belongs to these weights."
    )


def _check_kinds(shown: Sequence[MediaKind], wanted: Sequence[MediaKind]) -> None:
    if list(shown) != list(wanted):
        raise ValueError(
            f"the chat template shows {', '.join(shown) or 'no item'}, but the conversation has "
            f"{', '.join(wanted) or 'none'}. Many templates show media of the user's messages only"
        )


def load_tokenizer(model_folder: Path) -> Tokenizer:
    """Reads the tokenizer from a folder's tokenizer.json. Raises ValueError if the file is missing or wrong."""
    from tokenizers import Tokenizer

    file = model_folder / "tokenizer.json"
    if not file.exists():
        raise ValueError(
            f"model folder {model_folder} has no tokenizer.json. Write one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    try:
        with open_regular(file) as opened:
            if (size := os.fstat(opened.fileno()).st_size) > _MAX_TOKENIZER_BYTES:
                raise ValueError(f"it has {size} bytes, more than {_MAX_TOKENIZER_BYTES}")
        return Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises the class Exception itself.
        raise ValueError(f"model folder {model_folder}: tokenizer.json cannot be read: {error}") from error


def _encoded(tokenizer: Tokenizer, text: str, *, adds_special: bool = False) -> Encoding:
    """Returns the tokens of a text. Releases the interpreter's lock while it tokenises a text above `LARGE_TEXT`."""
    text = clean_text(text)
    if len(text) <= LARGE_TEXT:
        return tokenizer.encode(text, add_special_tokens=adds_special)
    return tokenizer.encode_batch([text], add_special_tokens=adds_special)[0]


# Names of special tokens in a user's text are replaced until the rendered text has been split at the special tokens
# that the template wrote. Each character of a name becomes a code point of the private use area.
_HIDE_FROM, _HIDE_MARK = 0xF0000, "\U00100000"
_HIDDEN = re.compile(f"{_HIDE_MARK}([{chr(_HIDE_FROM)}-{chr(_HIDE_FROM + 0xFFFD)}]+)")


_WORDS = ("role", "type")  # keys with values that a template compares, such as "assistant" and "image"
_COMPARED = frozenset(
    {
        *("system", "user", "assistant", "tool", "developer", "function", "text", "image", "video", "audio"),
        *("object", "string", "number", "integer", "boolean", "array", "null"),
    }
)


# Keys that templates read. Names that a tool or an agent chooses for its keys are not listed.
_KNOWN_KEYS = frozenset(
    {
        *("role", "content", "type", "text", "name", "id", "tool_calls", "tool_call_id", "function", "arguments"),
        *("reasoning_content", "thinking", "parameters", "properties", "required", "description", "enum", "items"),
        *("return", "default"),
    }
)


@dataclass(frozen=True, kw_only=True)
class _NameParts:
    """Holds parts of the names of special tokens: proper prefixes, proper suffixes and all substrings."""

    begins: frozenset[str]
    ends: frozenset[str]
    inside: frozenset[str]
    longest: int


def _name_parts(names: Iterable[str]) -> _NameParts:
    known = list(names)
    return _NameParts(
        begins=frozenset(name[:k] for name in known for k in range(1, len(name))),
        ends=frozenset(name[k:] for name in known for k in range(1, len(name))),
        inside=frozenset(name[i:j] for name in known for i in range(len(name)) for j in range(i + 1, len(name) + 1)),
        longest=max(map(len, known)),
    )


def _hide_text(text: str) -> str:
    """Returns the replacement of a text; the replacement begins with `_HIDE_MARK`."""
    return _HIDE_MARK + "".join(chr(_HIDE_FROM + ord(char)) for char in text) if text else ""


def _hide(found: re.Match[str]) -> str:
    return _hide_text(found[0])


def _shown(found: re.Match[str]) -> str:
    return "".join(chr(ord(char) - _HIDE_FROM) for char in found[1])


def _with_texts(value: Any, change: Callable[[str], str], key: str = "") -> Any:
    """Applies ``change`` to the texts and keys of a JSON value, except to known keys, roles and types."""
    if isinstance(value, str):
        return value if key in _WORDS and value in _COMPARED else change(value)
    if isinstance(value, Mapping):
        return {_changed_key(name, change): _with_texts(inner, change, name) for name, inner in value.items()}
    return [_with_texts(element, change, key) for element in value] if isinstance(value, list | tuple) else value


def _changed_key(name: Any, change: Callable[[str], str]) -> Any:
    return change(name) if isinstance(name, str) and name not in _KNOWN_KEYS else name


def _without_sources(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes everything but the type from a message's media parts, so no template writes their content."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [part if part["type"] == "text" else {"type": part["type"]} for part in content]}


def _with_arguments(message: Mapping[str, Any], *, as_text: bool) -> Mapping[str, Any]:
    """Converts the arguments of a message's tool calls to JSON text or, without ``as_text``, to an object."""
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list | tuple):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, as_text=as_text) for call in calls]}


def _call_with_arguments(call: Any, *, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _call_with_arguments(function, as_text=as_text)}
    given = call.get("arguments")
    if as_text and isinstance(given, Mapping):
        return {**call, "arguments": json.dumps(given, ensure_ascii=False)}
    if not as_text and isinstance(given, str):
        try:
            read = clean_value(json.loads(given)) if given.strip() else {}
        except (ValueError, RecursionError):
            return call
        return {**call, "arguments": read} if isinstance(read, dict) else call
    return call


def _marked_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """Appends a mark to a message's text. Raises ValueError for a message that does not end with text."""
    content = message["content"]
    if isinstance(content, str) and content.strip() and not message.get("tool_calls"):
        return {**message, "content": content + _GOES_ON}
    last = content[-1] if isinstance(content, list) and content else {}
    if last.get("type") != "text" or not last["text"].strip() or message.get("tool_calls"):
        raise ValueError("the last message does not end with text, so no answer can continue it")
    return {**message, "content": [*content[:-1], {**last, "text": last["text"] + _GOES_ON}]}


def token_difference(first: Path, second: Path) -> str | None:
    """Returns the first difference between the vocabularies of two model folders; None if they are equal."""
    vocabularies = [load_tokenizer(folder).get_vocab(with_added_tokens=True) for folder in (first, second)]
    if vocabularies[0] == vocabularies[1]:
        return None
    odd = min(set(vocabularies[0].items()) ^ set(vocabularies[1].items()), key=lambda pair: (pair[1], pair[0]))
    ids = [vocabulary.get(odd[0], "not there") for vocabulary in vocabularies]
    sizes = [len(vocabulary) for vocabulary in vocabularies]
    return f"{odd[0]!r} is {ids[0]} in the first ({sizes[0]} tokens) and {ids[1]} in the second ({sizes[1]})"
