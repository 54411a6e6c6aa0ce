"""Builds the prompts of later turns from token ids, so sampled tokens are never tokenised again.

The next prompt consists of the previous prompt, the sampled tokens, and the text that the chat template writes after an
answer. This text has the end of the answer, the next messages, and the beginning of the next answer. To find this text,
the module renders the first messages, a mark as the answer, and the next messages, and uses the text after the mark. So
the template trims, quotes and joins the messages. If the template only appends text, the tokens are the same as for a
rendering of the whole conversation.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relax_core.contracts.media import Media, MediaItem
from relax_core.data.tokenizer import PromptTokenizer

# The mark has no white space at its ends, because templates trim white space. It is random, so only this module writes
# it.
_MARK = f"Relax{secrets.token_hex(16)}TextGoesHere{{}}Mark"
_ANSWER = _MARK.format("Answer")
_TOOL = "tool"  # the name for a tool result without a name

Messages = Sequence[Mapping[str, Any]]


class TurnTokens:
    """Builds the prompts of later turns for conversations that begin with the messages ``opening``.

    ``tools`` are the schemas of the tools.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, opening: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        # An answer follows the opening. If the model continued the opening's last message, the answer replaces it.
        asked = opening[:-1] if opening and opening[-1]["role"] == "assistant" else opening
        self._opening = [tokenizer.hidden(message) for message in asked]
        self._tools = None if tools is None else [tokenizer.hidden(tool) for tool in tools]
        self._shown: set[tuple[Any, ...]] = set()  # roles and kinds of parts with texts that the template shows
        # The form of tool calls that the template accepts (`_calling`); the key is whether there are several tool
        # results.
        self._form: dict[bool, tuple[bool, bool]] = {}
        self._ends, self._before_end = self._closing()

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        sampled: Sequence[int],
        messages: Messages,
        items: Sequence[MediaItem] = (),
        *,
        most_tokens: int | None = None,
    ) -> tuple[list[int], list[Media]]:
        """Returns the token ids of the next prompt, and the new ``items`` with their positions in it.

        ``sampled`` is the answer to ``prompt_ids``, including its stop token, if any. ``messages`` follow the answer;
        their texts are encoded without special tokens. ``items`` are the media of ``messages``, in order. Raises
        ValueError for messages that the chat template refuses, or renders without their text or their items. Raises
        `TextTooLong` for messages that certainly have more than ``most_tokens`` tokens.
        """
        self._check_shown(messages)
        behind = self._text_after_answer([self._tokenizer.hidden(message) for message in messages])
        stopped = sampled[-1] in self._tokenizer.stop_token_ids
        if stopped:
            behind = behind.removeprefix(self._before_end)
        following = self._tokenizer.encode_shown(self._tokenizer.short_enough(behind, most_tokens))
        # In a family without an end token, an answer stops at the mark of the next role (GLM). This mark must not
        # appear twice; but if the model sampled the mark of another role, the two marks stay. For earlier answers, a
        # template may write another end token than the sampled token (gpt-oss).
        if stopped and (following[0] == sampled[-1] or (self._ends and self._tokenizer.is_special(following[0]))):
            following = following[1:]
        before = [*prompt_ids, *sampled]
        new, media = self._tokenizer.place_items(following, items)
        moved = [msgspec.structs.replace(m, start=m.start + len(before), end=m.end + len(before)) for m in media]
        return before + new, moved

    def _closing(self) -> tuple[bool, str]:
        """Returns whether the template ends an answer with a stop token, and the text between answer and stop token.

        Cohere's models sample this text before the stop token, so the answer already contains it.
        """
        last = [*self._opening, {"role": "assistant", "content": _ANSWER}]
        closing = self._tokenizer.render(last, tools=self._tools, opens_answer=False).partition(_ANSWER)[2]
        at = self._first_stop(closing)
        return at is not None, closing[:at] if at is not None else ""

    def stop_before(self, role: str) -> str:
        """Returns the name of the stop token between an answer and a message with this role, "user" or "tool".

        Families without an end token need it: an answer ends with the mark of the next role (GLM). Raises ValueError if
        the template writes no stop token there.
        """
        behind = self._text_after_answer([{"role": role, "content": _TOOL}])
        at = self._first_stop(behind)
        if at is None:
            raise ValueError("the chat template writes no end token after an answer")
        stops = map(self._tokenizer.token_text, self._tokenizer.stop_token_ids)
        return max((stop for stop in stops if behind.startswith(stop, at)), key=len)

    def _first_stop(self, text: str) -> int | None:
        """Returns the position of the first stop token in a rendered text, or None."""
        stops = [self._tokenizer.token_text(token) for token in self._tokenizer.stop_token_ids]
        return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)

    def _check_shown(self, messages: Messages) -> None:
        """Raises ValueError if the template does not show the text of each message exactly once."""
        shape = tuple((message["role"], _kinds(message)) for message in messages)
        if shape in self._shown:
            return
        roles: list[str] = []

        def mark(role: str) -> str:
            roles.append(role)
            return _MARK.format(len(roles) - 1)

        behind = self._text_after_answer([_with_marks(message, mark) for message in messages])
        for number, role in enumerate(roles):
            if behind.count(_MARK.format(number)) != 1:
                raise _not_shown(role)
        self._shown.add(shape)

    def _text_after_answer(self, messages: Messages) -> str:
        """Returns the text that the template writes after an answer for these messages, from the end token on.

        If the messages are tool results, the answer before them calls the tools. Templates omit the text of such an
        answer (Llama 3.1), so the mark is the answer's last argument. The returned text does not contain the end of the
        call, because the model has already written it.
        """
        results = sum(message["role"] == "tool" for message in messages)
        if not results:
            return self._text_after_mark([{"role": "assistant", "content": _ANSWER}, *messages])
        named = _with_call_ids(messages)
        several = results > 1
        known = self._form.get(several)
        forms = [(text, each) for text in (False, True) for each in (True, False)] if known is None else [known]
        problem: ValueError | None = None
        for as_text, each in forms:
            try:
                behind = self._text_after_mark([_calling(named, as_text=as_text, each=each), *named])
            except ValueError as error:
                problem = problem or error
                continue
            self._form[several] = as_text, each
            end = self._first_stop(behind)
            if end is None:
                raise _not_shown("assistant")
            return behind[end:]
        assert problem is not None
        raise problem

    def _text_after_mark(self, messages: Messages) -> str:
        rendered = self._tokenizer.render([*self._opening, *messages], tools=self._tools)
        _, found, behind = rendered.partition(_ANSWER)
        if not found or _ANSWER in behind or not behind:
            raise _not_shown("assistant")
        return behind


def unstopped_end(tokenizer: PromptTokenizer, stop: Sequence[str]) -> str:
    """Returns the text that the template writes after an answer that ended without a stop token.

    Returns an empty text if the text contains a stop token or a string of ``stop``, or if the template refuses such a
    conversation.
    """
    asked, answer = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": _ANSWER}
    ends = [*map(tokenizer.token_text, tokenizer.stop_token_ids), *stop]
    found = ""
    for messages, opens_answer in (([asked, answer, asked], True), ([asked, answer], False)):
        try:
            behind = tokenizer.render(messages, opens_answer=opens_answer).partition(_ANSWER)[2]
        except ValueError:  # such a template is refused later, when it is used
            return ""
        if any(end in behind for end in ends):
            return ""
        found = behind
    return found


def _not_shown(role: str) -> ValueError:
    return ValueError(
        f"the chat template does not show the text of a message with the role {role!r} exactly once. An env with turns "
        "needs a template that does: give its messages another role, use env.tools_as=text if it calls tools, or use "
        "another model."
    )


def _calling(messages: Messages, *, as_text: bool, each: bool) -> dict[str, Any]:
    """Returns an answer with tool calls for these tool results; the argument of the last call is the mark.

    With ``as_text``, arguments are JSON text (DeepSeek), otherwise an object. Without ``each``, the answer has only one
    call, for templates that refuse several calls (Llama 3.1).
    """
    results = [message for message in messages if message["role"] == "tool"]
    calls = []
    for message in results if each else results[-1:]:
        arguments: Any = {"value": _ANSWER if message is results[-1] else ""}
        if as_text:
            arguments = msgspec.json.encode(arguments).decode()
        function = {"name": message["name"], "arguments": arguments}
        calls.append({"id": message["tool_call_id"], "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_call_ids(messages: Messages) -> list[Mapping[str, Any]]:
    """Adds a name and an id to each tool result. Mistral requires ids of nine letters or digits."""
    return [
        {"name": _TOOL, "tool_call_id": f"call{number:05d}", **message} if message["role"] == "tool" else message
        for number, message in enumerate(messages)
    ]


def _kinds(message: Mapping[str, Any]) -> tuple[str, ...] | None:
    content = message["content"]
    return None if isinstance(content, str) else tuple(part["type"] for part in content)


def _with_marks(message: Mapping[str, Any], mark: Callable[[str], str]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": mark(message["role"])}
    parts = [{**part, "text": mark(message["role"])} if part["type"] == "text" else part for part in content]
    return {**message, "content": parts}
