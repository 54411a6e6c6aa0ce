"""Makes the prompts of a session's answers: what was sampled with what follows it, or a conversation rendered whole."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from relax_core.contracts.env import EpisodeLimits
from relax_core.data.tokenizer import LARGE_TEXT, PromptTokenizer, TextTooLong
from relax_core.data.tool_parsers import AUTO, tool_parser
from relax_core.data.tool_templates import check_template_shows_tools
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.agents.chat_messages import template_messages
from relax_core.rollout.agents.message_forest import ForestAnswer, Walk
from relax_core.rollout.agents.turn_request import RequestRefused, TurnRequest, refused
from relax_core.rollout.episodes.shared_requests import SharedRequests
from relax_core.rollout.episodes.tool_use import ToolUse
from relax_core.rollout.prompt_tokens import PromptMaker

_MOST_SIZES = 4  # times the longest prompt, the body of a request with its escapes and its left-out text


@dataclass(frozen=True, kw_only=True)
class SessionForm:
    """Holds what all sessions of a run share.

    ``stop`` are the run's own stop strings. ``max_turn_tokens`` limits an answer; None leaves that to ``limits``.
    ``sampling`` has the values of the run for what a request may wish, by name. With ``history`` "continue", what was
    sampled stays in the prompts behind it; "template" renders every prompt whole, as a deployed server would.
    ``tools_refused`` says why requests with tools are refused, empty if they are not. ``open_requests`` is the number
    of requests that a session may have under way at one time. ``told`` are the wishes of requests that the log has.
    """

    prompts: PromptMaker
    requests: SharedRequests
    tools: ToolUse
    limits: EpisodeLimits
    stop: tuple[str, ...] = ()
    max_turn_tokens: int | None = None
    history: Literal["continue", "template"] = "continue"
    sampling: dict[str, float] = field(default_factory=dict)
    tools_refused: str = ""
    open_requests: int = 64
    told: set[str] = field(default_factory=set)


def tool_form(tokenizer: PromptTokenizer, *, parser: str, as_text: bool) -> tuple[ToolUse, str]:
    """Returns how tools are shown and read, and why requests with tools are refused; empty if they are not.

    An agent says only in its requests whether it has tools, so a template without them is no mistake of the run.
    """
    try:
        if not as_text:
            check_template_shows_tools(tokenizer)
        name = tool_parser("hermes" if as_text and parser == AUTO else parser, template=tokenizer.template)
    except ValueError as error:
        return ToolUse(parser="none", as_text=as_text), str(error)
    return ToolUse(parser=name, as_text=as_text), ""


class SessionPrompts:
    """Makes the prompts of one session."""

    def __init__(self, form: SessionForm) -> None:
        self._form = form
        self._between: dict[int, TurnTokens] = {}  # by the number of the opening

    def keep(self, asked: ForestAnswer, between: TurnTokens) -> None:
        """Keeps what continues the conversation that was rendered whole for an answer."""
        self._between[asked.opening] = between

    def prompt(self, walk: Walk, request: TurnRequest) -> tuple[list[int], TurnTokens | None]:
        """Returns the tokens of a prompt, and what continues its conversation if it was rendered whole.

        Raises `RequestRefused` for messages and tools that the chat template does not take.
        """
        tools = self._tools(request)
        try:
            if walk.known is not None and self._form.history == "continue" and (ids := self._going_on(walk, tools)):
                return ids, None
            return self._whole(request, tools)
        except TextTooLong as error:
            raise self.too_long(f"at least {error.tokens}") from error
        except ValueError as error:
            raise refused(f"messages: {error}") from error

    def too_long(self, tokens: str) -> RequestRefused:
        """Returns the refusal of a prompt that has that many tokens, in words."""
        return refused(
            f"messages: they have {tokens} tokens, and engine.context_length leaves room for "
            f"{self._form.limits.context_tokens - 1}; shorten the history",
            code="context_length_exceeded",
        )

    def check_size(self, request: TurnRequest) -> None:
        """Raises `RequestRefused` for a request that is far too long for the context, before anything is done with it.

        Thinking and other text that a chat template leaves out may make it longer than its prompt.
        """
        limit = self._form.limits.context_tokens
        if request.size <= LARGE_TEXT:
            return
        if request.size > _MOST_SIZES * self._form.prompts.tokenizer.most_characters(limit):
            raise self.too_long(f"at least {limit}")

    def _going_on(self, walk: Walk, tools: ToolUse) -> list[int]:
        """Returns the prompt before the known answer, its sampled tokens, and what follows; empty without tokens."""
        known, tokenizer = walk.known, self._form.prompts.tokenizer
        assert known is not None
        sampled = known.sampled
        if walk.rest:
            if sampled and sampled[-1] in tokenizer.stop_token_ids:
                sampled = sampled[:-1]
            rest = tokenizer.short_enough(walk.rest, self._form.limits.context_tokens)
            sampled = [*sampled, *tokenizer.encode_plain(rest)]
        if not sampled:
            return []
        between = self._between[known.opening]
        tail, limit = tools.shown(template_messages(walk.tail)), self._form.limits.context_tokens
        ids, _ = between.next_prompt(known.prompt_ids, sampled, tail, most_tokens=limit)
        return ids

    def _whole(self, request: TurnRequest, tools: ToolUse) -> tuple[list[int], TurnTokens]:
        """Returns a prompt as the chat template renders the client's messages."""
        problem: ValueError | None = None
        for as_text in (False, True):  # a few templates take the arguments of calls as JSON text
            messages = template_messages(request.messages, arguments_as_text=as_text)
            shown = tools.opening(tools.shown(messages))
            try:
                limit = self._form.limits.context_tokens
                prompt = self._form.prompts.edited(shown, [], tools=tools.schemas, most_tokens=limit)
                return prompt.token_ids, TurnTokens(self._form.prompts.tokenizer, shown, tools=tools.schemas)
            except TextTooLong:
                raise
            except ValueError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _tools(self, request: TurnRequest) -> ToolUse:
        """Returns the tools of a request in the run's form. Raises `RequestRefused` if the template leaves them out."""
        if not request.tools:
            return self._form.tools
        if self._form.tools_refused:
            raise refused(f"tools: {self._form.tools_refused}")
        return replace(self._form.tools, described=tuple(request.tools))
