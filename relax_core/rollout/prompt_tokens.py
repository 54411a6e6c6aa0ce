"""Makes prompts from data rows: conversation, encoded media, chat template, length limit, and sampling seeds.

A seed depends on the sample and not on the process. A group that is sampled again after a crash therefore has the same
tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relax_core.config.choices import TEXT, LastAssistant, Overlong
from relax_core.config.modality import MODELS_THAT
from relax_core.contracts.data import TOO_LONG, BadRow, DataRow
from relax_core.contracts.engine import EngineError, Generated, PromptRequest
from relax_core.contracts.env import EnvSpec, Message, media_sources
from relax_core.contracts.media import Media, MediaError, MediaItem, MediaKind, MediaSource
from relax_core.contracts.tool_calls import ToolSchema
from relax_core.contracts.tree import group_uid
from relax_core.data.row_media import TEXT_ONLY, unread_media
from relax_core.data.tokenizer import LARGE_TEXT, PromptTokenizer, TextTooLong
from relax_core.rollout.item_cache import ItemCache

Result = TypeVar("Result")
_THREADS = ThreadPoolExecutor(1, thread_name_prefix="large text")  # a second thread would use a core of the engine


async def off_loop(large: bool, work: Callable[[], Result]) -> Result:
    """Runs ``work`` and returns its result; ``large`` work runs in a thread.

    ``work`` must not use state that the event loop changes meanwhile. Only one call of large work runs at a time.
    """
    if not large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


DEFAULT_PROMPT_ITEMS = 16
_CUT_CHARACTERS = 16  # characters per token of the limit; a longer text is cut to this length before it is tokenised
_CUT_TOKENS = 4  # a shortened prompt is tokenised if it has at most this multiple of the token limit


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Holds the token ids of a prompt; ``media`` has the positions of its media items in the ids, in order."""

    token_ids: list[int]
    media: list[Media] = field(default_factory=list)

    @property
    def items(self) -> list[MediaItem]:
        """Returns the media items, in order."""
        return [medium.item for medium in self.media]


class PromptMaker:
    """Makes prompts of at most ``max_prompt_tokens`` tokens; ``overlong`` decides how longer prompts are handled.

    A prompt may end with a message of the assistant. With ``last_assistant`` "continue" the model continues this
    message; otherwise such a prompt is refused. ``items`` encodes media items (images, videos, sounds); without
    ``items``, rows with media cannot be used. A prompt has at most ``prompt_items`` items. ``item_rows`` returns the
    largest number of rows (token positions) of an item; `tokens` uses it, because `tokens` encodes no items.
    ``media_kinds`` are the kinds of media that the run reads. A row with a placeholder of such a kind but without a
    matching item is refused.
    """

    def __init__(
        self,
        *,
        env: EnvSpec,
        env_config: Any,
        tokenizer: PromptTokenizer,
        max_prompt_tokens: int,
        overlong: Overlong = Overlong.drop,
        last_assistant: LastAssistant | None = None,
        items: ItemCache | None = None,
        prompt_items: int = DEFAULT_PROMPT_ITEMS,
        item_rows: Callable[[MediaSource], int] | None = None,
        media_kinds: Collection[MediaKind] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._env = env
        self._config = env_config
        self.max_prompt_tokens = max_prompt_tokens
        self._overlong, self._last_assistant = overlong, last_assistant
        self.items = items
        self._prompt_items = prompt_items
        self._item_rows = item_rows
        self._media_kinds = media_kinds

    def tokens(self, row: DataRow, *, where: str) -> list[int]:
        """Returns the token ids of a data row's prompt without encoding media; ``where`` is the row's file and line.

        Each media item has as many placeholder ids as its largest number of rows. Raises the `BadRow` of `text`. If the
        prompt is too long, raises ValueError if ``overlong`` is error, and `BadRow` if ``overlong`` is drop.
        """
        return self._opening(self._messages(row, where=where), (), where=where).token_ids

    async def prompt(self, row: DataRow, *, where: str, owner: str) -> Prompt:
        """Encodes the media of a data row, and returns the row's prompt; ``owner`` then holds the media.

        Raises the errors of `tokens`, and `MediaError` for a media item that cannot be used. After an error, the owner
        holds no media of this prompt.
        """
        return await self.opening(self._messages(row, where=where), where=where, owner=owner)

    async def opening(
        self, messages: Sequence[Message], *, where: str, owner: str, tools: Sequence[ToolSchema] | None = None
    ) -> Prompt:
        """Returns the prompt of an episode's opening conversation; raises the errors of `prompt`.

        ``tools`` are the schemas that the chat template shows.
        """
        sources = media_sources(messages)
        large = text_size(messages) > LARGE_TEXT
        if not sources:
            return await off_loop(large, lambda: self._opening(messages, (), where=where, tools=tools))
        if self.items is None:
            raise _unread(sources[0], f"{where}: ")
        self._check_kinds(sources, f"{where}: ")
        try:
            items = await self.encoded(sources, owner=owner)
            return await off_loop(large, lambda: self._opening(messages, items, where=where, tools=tools))
        except MediaError as error:
            self.release(owner)
            if str(error).startswith(where):
                raise
            raise _of_row(error, where) from error
        except ValueError:
            self.release(owner)
            raise

    def edited(
        self,
        messages: Sequence[Message],
        items: Sequence[MediaItem],
        *,
        tools: Sequence[ToolSchema] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """Returns the prompt, of any length, of a conversation that an env rewrote; ``items`` are the encoded media.

        Raises ValueError if the chat template refuses the conversation, and `TextTooLong` if the prompt certainly has
        more than ``most_tokens`` tokens.
        """
        goes_on = messages[-1]["role"] == "assistant" and self._last_assistant is LastAssistant["continue"]
        shown = self.tokenizer.encode(messages, tools=tools, goes_on=goes_on, most_tokens=most_tokens)
        ids, media = self.tokenizer.place_items(shown, items)
        return Prompt(token_ids=ids, media=media)

    async def encoded(self, sources: Sequence[MediaSource], *, owner: str) -> list[MediaItem]:
        """Returns the media items of these sources, in order; ``owner`` holds the items until `release`.

        Raises `MediaError`.
        """
        if not sources:
            return []
        first = sources[0].kind
        if self.items is None:
            raise _unread(sources[0])
        self._check_kinds(sources)
        if len(sources) > self._prompt_items:
            text = f"it has {len(sources)} items of media, and a prompt has at most {self._prompt_items}."
            raise MediaError(first, "too_many_items", text)
        return await self.items.items(sources, owner=owner)

    async def hold_again(self, row: DataRow, media: Sequence[Media], *, owner: str) -> None:
        """Makes ``owner`` hold the media of an existing prompt.

        Evicted items are encoded again. Raises ValueError if the file of an item has changed.
        """
        if media:
            again = await self.encoded(media_sources(self._messages(row, where="")), owner=owner)
            if [item.digest for item in again] != [medium.item.digest for medium in media]:
                message = ", ".join(medium.item.description for medium in media)
                raise ValueError(f"the files of {message} changed while the run read them. Start the run again.")

    def release(self, owner: str) -> None:
        """Releases the encoded media that ``owner`` holds."""
        if self.items is not None:
            self.items.release(owner)

    def _opening(
        self,
        messages: Sequence[Message],
        items: Sequence[MediaItem],
        *,
        where: str,
        tools: Sequence[ToolSchema] | None = None,
    ) -> Prompt:
        has = "has"
        try:
            prompt = self._encode(messages, items, where=where, tools=tools)
            count = len(prompt.token_ids)
            if count <= self.max_prompt_tokens:
                return prompt
        except TextTooLong as error:
            has, count = "has at least", error.tokens
        text = (
            f"{where}: its prompt {has} {count} tokens, but engine.context_length leaves room for "
            f"{self.max_prompt_tokens} in addition to rollout.max_new_tokens."
        )
        if items:
            rows = sum(item.rows for item in items)
            text += f" Its media take {rows} of them: lower modality.image_tokens, frame_tokens or audio_seconds."
        if self._overlong is Overlong.error:
            raise ValueError(
                f"{text} Raise engine.context_length, or use data.overlong=drop, which leaves such rows out."
            )
        if self._overlong is Overlong.drop:
            raise _too_long(text, items)
        cut = self._cut(messages, items, excess=count - self.max_prompt_tokens, where=where, tools=tools)
        if cut is None:
            raise _too_long(f"{text} It is too long even without its longest message.", items)
        return cut

    def text(self, row: DataRow, *, where: str) -> str:
        """Returns the text of the whole prompt, of any length, as the chat template renders it.

        Raises `BadRow` if the env or the chat template cannot make a prompt from the data row.
        """
        return self._render(self._messages(row, where=where), where=where)

    def bound(self, row: DataRow, *, where: str) -> int:
        """Returns an upper bound of the whole prompt's number of tokens; a token has at least one byte.

        Raises the errors of `text`.
        """
        messages = self._messages(row, where=where)
        return len(self._render(messages, where=where).encode()) + sum(self._rows_of(messages, where=where))

    def count(self, row: DataRow, *, where: str) -> int:
        """Returns the number of tokens of the whole prompt, of any length. Raises the errors of `text`.

        A prompt that is certainly too long is not tokenised; the result is then a lower bound.
        """
        try:
            return len(self._encode(self._messages(row, where=where), (), where=where).token_ids)
        except TextTooLong as error:
            return error.tokens

    def sources(self, row: DataRow, *, where: str) -> list[MediaSource]:
        """Returns the media sources of a data row, in order. Raises `BadRow` if the env cannot make a prompt."""
        return media_sources(self._conversation(row, where=where))

    def _messages(self, row: DataRow, *, where: str) -> Sequence[Message]:
        """Returns the conversation of a data row.

        Raises `MediaError` for a placeholder without a media item, because the prompt would be about media that the
        model does not see.
        """
        messages = self._conversation(row, where=where)
        for kind, (_, has_place) in (unread_media(row, TEXT_ONLY) if self._media_kinds else {}).items():
            if (
                not has_place
                or kind not in self._media_kinds
                or kind in {source.kind for source in media_sources(messages)}
            ):
                continue
            text = (
                f"{where}: its prompt has a placeholder <{kind}>, but no key names a column of this kind. Name it in "
                f"data.media_keys.{kind}; leave such rows out; or use modality={TEXT}."
            )
            raise MediaError(kind, "placeholder_count", text)
        return messages

    def _conversation(self, row: DataRow, *, where: str) -> Sequence[Message]:
        assert self._env.messages is not None, "an env of several turns opens its own episodes"
        try:
            return self._env.messages(row, self._config)
        except Exception as error:  # an env is a plug-in and may raise anything
            text = f"{where}: the env gives no conversation for it: {type(error).__name__}: {error}"
            raise BadRow.because("env", text) from error

    def _render(self, messages: Sequence[Mapping[str, str]], *, where: str) -> str:
        try:
            return self.tokenizer.render(messages)
        except ValueError as error:
            raise BadRow.because("template", f"{where}: {error}") from error

    def _rows_of(self, messages: Sequence[Message], *, where: str) -> list[int]:
        """Returns the largest number of rows of each media item; no item is encoded.

        Raises `MediaError` for an item that cannot be used, if the error is found without encoding the item.
        """
        sources = media_sources(messages)
        if sources and self._item_rows is None:
            raise _unread(sources[0], f"{where}: ")
        if self._item_rows is not None:
            self._check_kinds(sources, f"{where}: ")
        if sources:
            self._check_places(messages, sources, where=where)
        try:
            return [] if self._item_rows is None else [self._item_rows(source) for source in sources]
        except MediaError as error:
            raise _of_row(error, where) from error

    def _check_places(self, messages: Sequence[Message], sources: Sequence[MediaSource], *, where: str) -> None:
        """Raises `BadRow` if the chat template does not show these media; `_encode` checks encoded media likewise."""
        self._render(messages, where=where)  # raises if the template refuses the messages
        try:
            self.tokenizer.check_places(messages, [source.kind for source in sources])
        except ValueError as error:
            raise MediaError(sources[0].kind, "placeholder_count", f"{where}: {error}.") from error

    def _check_kinds(self, sources: Sequence[MediaSource], where: str = "") -> None:
        """Raises `BadRow` for a media source of a kind that the model cannot read."""
        read = self.tokenizer.media_ids
        for source in sources:
            if source.kind not in read:
                raise _unread(source, where, f"the model reads {', '.join(read) or 'text'} only")

    def _encode(
        self,
        messages: Sequence[Message],
        items: Sequence[MediaItem],
        *,
        where: str,
        tools: Sequence[ToolSchema] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """Returns the prompt; raises `TextTooLong` above ``most_tokens`` tokens. None means ``max_prompt_tokens``."""
        most = self.max_prompt_tokens if most_tokens is None else most_tokens
        try:
            goes_on = messages[-1]["role"] == "assistant"
            if goes_on and self._last_assistant is not LastAssistant["continue"]:
                raise ValueError("it ends with a message of the assistant; data.last_assistant=continue continues it")
            ids = self.tokenizer.encode(messages, tools=tools, goes_on=goes_on, most_tokens=most)
        except TextTooLong:
            raise
        except ValueError as error:
            raise BadRow.because("template", f"{where}: {error}") from error
        if not items:
            return Prompt(token_ids=ids + [0] * sum(rows - 1 for rows in self._rows_of(messages, where=where)))
        try:
            ids, media = self.tokenizer.place_items(ids, items)
        except ValueError as error:
            raise MediaError(items[0].kind, "placeholder_count", f"{where}: {error}.") from error
        return Prompt(token_ids=ids, media=media)

    def _cut(
        self,
        messages: Sequence[Message],
        items: Sequence[MediaItem],
        *,
        excess: int,
        where: str,
        tools: Sequence[ToolSchema] | None,
    ) -> Prompt | None:
        """Returns the prompt without a part of the longest text, as long as the limit allows.

        The template's own tokens stay. Returns None if the prompt is too long even without the longest text.
        """
        texts = list(_texts(messages))
        if not texts:
            return None
        message, part, text = max(texts, key=lambda candidate: len(candidate[2]))
        window = self.max_prompt_tokens * _CUT_CHARACTERS
        if len(text) > window:  # most of such a text is left out in any case, so it is not tokenised
            head = window // 2 if self._overlong is Overlong.truncate_middle else 0
            text, excess = text[:head] + text[head - window :], 0
        spans = self.tokenizer.plain_spans(text)
        kept = len(spans) - excess
        while kept > 0:
            shorter = _with_text(messages, message, part, shortened(text, spans, kept=kept, how=self._overlong))
            try:
                most = self.max_prompt_tokens * _CUT_TOKENS
                prompt = self._encode(shorter, items, where=where, tools=tools, most_tokens=most)
            except TextTooLong:  # the remaining texts alone are too long
                return None
            if len(prompt.token_ids) <= self.max_prompt_tokens:
                return prompt
            kept -= len(prompt.token_ids) - self.max_prompt_tokens
        return None


def check_prompt_tokens(request: PromptRequest, responses: Iterable[Generated]) -> None:
    """Raises EngineError if an engine sampled from a prompt with another length than the trained prompt.

    An engine may expand an image to another number of tokens than the token tree. For a prompt without media, an engine
    that does not report the length of its prompt is trusted.
    """
    for response in responses:
        seen, sent = response.prompt_tokens, len(request.input_ids)
        if seen != sent and (seen or request.media):
            raise EngineError(
                f"{response.engine or 'the engine'}, request {request.rid}: it got a prompt of {seen} tokens, and "
                f"{sent} were sent with {len(request.media)} media. Its answer is refused, because it was "
                "sampled from another prompt than the trained prompt."
            )


def shown_prompt(prompt: Any, items: Sequence[MediaItem] = ()) -> str:
    """Returns a data row's prompt for a table or a log; a media item is shown as "[image 333×201]"."""
    if isinstance(prompt, str):
        return prompt
    rest = iter(items)
    shown: list[tuple[str, str]] = []
    for message in prompt:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        shown.append((message["role"], "".join(_shown_part(part, rest) for part in parts)))
    if all(isinstance(message["content"], str) for message in prompt):
        return str(prompt)
    return shown[0][1] if len(shown) == 1 else "\n".join(f"{role}: {text}" for role, text in shown)


def _shown_part(part: Mapping[str, Any], items: Iterator[MediaItem]) -> str:
    if part["type"] == "text":
        return str(part["text"])
    item = next(items, None)
    return f"[{part['type']}]" if item is None else item.description


def _unread(source: MediaSource, where: str = "", why: str = "only text is read here") -> BadRow:
    fix = f"Use a model that {MODELS_THAT[source.kind]}, with modality=auto; or leave such rows out of the data."
    return BadRow.because("prompt", f"{where}it has media of kind {source.kind}, but {why}. {fix}")


def _of_row(error: MediaError, where: str) -> MediaError:
    return MediaError(error.kind, error.word, f"{where}: {error}")


def _too_long(text: str, items: Sequence[MediaItem]) -> BadRow:
    return MediaError(items[0].kind, "too_many_tokens", text) if items else BadRow(TOO_LONG, text)


def text_size(messages: Sequence[Message]) -> int:
    """Returns the number of characters of the texts of a conversation."""
    return sum(len(text) for *_, text in _texts(messages))


def _texts(messages: Sequence[Message]) -> Iterator[tuple[int, int | None, str]]:
    """Yields, for each text of a conversation: message number, part number (None for plain content), and text."""
    for number, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            yield number, None, content
        else:
            yield from ((number, at, part["text"]) for at, part in enumerate(content) if part["type"] == "text")


def _with_text(messages: Sequence[Message], number: int, part: int | None, text: str) -> list[Message]:
    content: Any = text
    if part is not None:
        content = list(messages[number]["content"])
        content[part] = {"type": "text", "text": text}
    return [*messages[:number], {**messages[number], "content": content}, *messages[number + 1 :]]


def shortened(text: str, spans: Sequence[tuple[int, int]], *, kept: int, how: Overlong) -> str:
    """Returns ``text`` shortened to ``kept`` tokens; ``spans`` has the start and end of each token in the text.

    With truncate_left, the last tokens are kept. With truncate_middle, half of the kept tokens are from the start and
    half from the end.
    """
    head = (kept + 1) // 2 if how is Overlong.truncate_middle else 0
    tail = kept - head
    start = text[: spans[head - 1][1]] if head else ""
    return start + (text[spans[-tail][0] :] if tail else "")


@dataclass(frozen=True, kw_only=True)
class AdmittedPrompt:
    """Holds an admitted prompt that is ready for the engine.

    ``number`` is the number of the data row, and ``where`` the row's file and line. ``modality`` is the prompt's
    modality. For an env of several turns, ``request`` has no tokens, because the env makes the prompts; the rids of
    these prompts' requests begin with ``request.rid``. ``evaluation`` is empty for training. In an evaluation it names
    the set, and ``index`` is the number of the row in the set; therefore seeds and uids differ from training.
    """

    index: int
    row: DataRow
    where: str
    request: PromptRequest
    attempt: int = 0
    number: int = 0
    modality: str = ""
    teacher: str | None = None
    evaluation: str = ""

    @property
    def uid(self) -> str:
        """Returns the uid of the group. The uid is also the owner that holds the prompt's media."""
        return f"{self.evaluation}/{self.index}" if self.evaluation else group_uid(self.index)

    def seed(self, of_run: int, purpose: str) -> int:
        """Returns the seed of the group for a purpose such as "env"."""
        return sampling_seed(of_run, index=self.index, purpose=f"{self.evaluation}/{purpose}".removeprefix("/"))


def sampling_seed(run_seed: int, *, index: int, purpose: str = "train") -> int:
    """Returns a 63-bit seed for the prompt with this ``index``; the engine adds the numbers of sample and position."""
    digest = hashlib.blake2b(f"{purpose}:{run_seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
