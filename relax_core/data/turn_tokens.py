"""Builds the prompts of later turns from token ids, so that sampled tokens are never tokenised again.

The next prompt is the previous prompt, the sampled tokens, and the text that the chat template writes after an answer:
its end, the next messages, and the opening of the next answer. To find this text, the module renders the opening, a
mark as the answer, and the next messages, and takes the text after the mark. So the template itself trims, quotes and
joins the messages, and the tokens equal those of the whole conversation if the template only appends.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relax_core.contracts.media import Media, MediaItem
from relax_core.data.tokenizer import PromptTokenizer

# The mark has no white space at its ends, because templates trim it. It is random, so no other text contains it.
_MARK = f"Relax{secrets.token_hex(16)}TextGoesHere{{}}Mark"
_ANSWER = _MARK.format("Answer")
_TOOL = "tool"  # the name for a tool result without a name

Messages = Sequence[Mapping[str, Any]]


class TurnTokens:
    """Builds the prompts of later turns for conversations that share an ``opening``; ``tools`` are schemas."""

    def __init__(
        self, tokenizer: PromptTokenizer, opening: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        # An answer follows the opening, and replaces its last message if the model continued that.
        asked = opening[:-1] if opening and opening[-1]["role"] == "assistant" else opening
        self._opening = [tokenizer.hidden(message) for message in asked]
        self._tools = None if tools is None else [tokenizer.hidden(tool) for tool in tools]
        self._shown: set[tuple[Any, ...]] = set()  # roles and kinds of parts whose texts the template shows
        # The form of calls that the template accepts (`_calling`), for one tool result and for several.
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
        """Returns the token ids of the next prompt, and the positions of the new ``items`` in them.

        ``sampled`` is the answer to ``prompt_ids``, with its stop token if it has one. ``messages`` follow it; their
        texts are encoded without special tokens, and ``items`` are their media in order. Raises ValueError for messages
        that the chat template does not accept, or renders without their text or their items, and `TextTooLong` for
        messages that are certain to have more than ``most_tokens`` tokens.
        """
        self._check_shown(messages)
        behind = self._text_after_answer([self._tokenizer.hidden(message) for message in messages])
        stopped = sampled[-1] in self._tokenizer.stop_token_ids
        if stopped:
            behind = behind.removeprefix(self._before_end)
        following = self._tokenizer.encode_shown(self._tokenizer.short_enough(behind, most_tokens))
        # A family without an end token stops at the mark of the next role (GLM), which must not appear twice; if the
        # model sampled the mark of another role, both marks stay. In a history, a template may end an answer with
        # another token than the sampled one (gpt-oss).
        if stopped and (following[0] == sampled[-1] or (self._ends and self._tokenizer.is_special(following[0]))):
            following = following[1:]
        before = [*prompt_ids, *sampled]
        new, media = self._tokenizer.place_items(following, items)
        moved = [msgspec.structs.replace(m, start=m.start + len(before), end=m.end + len(before)) for m in media]
        return before + new, moved

    def _closing(self) -> tuple[bool, str]:
        """Returns whether the template ends an answer with a token that stops a response, and the text before it.

        Cohere's models sample a mark before that token, so the answer already has it.
        """
        last = [*self._opening, {"role": "assistant", "content": _ANSWER}]
        closing = self._tokenizer.render(last, tools=self._tools, opens_answer=False).partition(_ANSWER)[2]
        at = self._first_stop(closing)
        return at is not None, closing[:at] if at is not None else ""

    def _first_stop(self, text: str) -> int | None:
        """Returns the position of the first token that stops a response in a rendered text, or None."""
        stops = [self._tokenizer.token_text(token) for token in self._tokenizer.stop_token_ids]
        return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)

    def _check_shown(self, messages: Messages) -> None:
        """Raises ValueError unless the template shows the text of each message exactly once."""
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
        """Returns the template's text after an answer that these messages follow, from its end token on.

        Tool results follow an answer that calls the tools. Templates drop the text of such an answer (Llama 3.1), so
        the mark is its last argument. The end of the call is left out, because the model has already written it.
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
    """Returns the template's text after an answer.

    It is empty if it contains a stop token or a string of ``stop``, and for a template that does not accept such a
    conversation.
    """
    asked, answer = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": _ANSWER}
    ends = [*map(tokenizer.token_text, tokenizer.stop_token_ids), *stop]
    found = ""
    for messages, opens_answer in (([asked, answer, asked], True), ([asked, answer], False)):
        try:
            behind = tokenizer.render(messages, opens_answer=opens_answer).partition(_ANSWER)[2]
        except ValueError:  # such a template is refused where it is used
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
    """Returns an answer with the calls of these tool results; the argument of the last call is the mark.

    With ``as_text``, arguments are JSON text (DeepSeek) instead of an object. Without ``each``, there is only one call,
    for templates that refuse several (Llama 3.1).
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
    """Returns the messages with a name and an id for each tool result; Mistral's ids have nine letters or digits."""
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
