"""Shows the tools of an env to the model, and parses the model's calls, in the form that the configuration chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from relax_core.contracts.data import DataRow
from relax_core.contracts.env import Action, EnvSpec, InteractionConfig, Message
from relax_core.contracts.tool_calls import ToolSchema
from relax_core.data.chat_template import (
    check_template_shows_tools,
    with_results_as_text,
    with_tools_as_text,
)
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.tool_parsers import AUTO, read_action, tool_parser


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """Defines how tools are shown and how calls are parsed.

    ``parser`` is the name of the tool parser, "none" for an env without tools. With ``as_text`` the tools are text in
    the messages, and the chat template receives no tools. ``described`` are the tools of a data row.
    """

    parser: str
    as_text: bool
    described: tuple[ToolSchema, ...] = ()

    @staticmethod
    def of_env(env: EnvSpec, config: InteractionConfig, tokenizer: PromptTokenizer) -> ToolUse:
        """Returns the form of tools for a run.

        Raises ValueError if the chat template does not show the tools or the form of calls.
        """
        if env.tools is None:
            return ToolUse(parser="none", as_text=False)
        as_text = config.tools_as == "text"
        if not as_text and config.tool_parser != "none":  # with tool_parser=none the model calls no tool
            check_template_shows_tools(tokenizer)
        name = "hermes" if as_text and config.tool_parser == AUTO else config.tool_parser
        return ToolUse(parser=tool_parser(name, template=tokenizer.template), as_text=as_text)

    def of_row(self, env: EnvSpec, row: DataRow, config: InteractionConfig) -> ToolUse:
        """Returns a copy with the tools of a data row. Raises `WrongResult` if the env's ``tools`` does."""
        if env.tools is None:
            return self
        described: tuple[ToolSchema, ...] = tuple(env.tools(row, config))  # type: ignore[arg-type]  # checked: schemas
        return replace(self, described=described)

    @property
    def schemas(self) -> Sequence[ToolSchema] | None:
        """Returns the tools for the chat template, or None."""
        return self.described if self.described and not self.as_text else None

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the opening conversation of an episode; with ``as_text`` the tools are added to it as text."""
        return with_tools_as_text(messages, self.described) if self.as_text and self.described else list(messages)

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages of the env in the form that the chat template expects."""
        return with_results_as_text(messages) if self.as_text else list(messages)

    def read(self, text: str, *, stopped: bool) -> Action:
        """Parses a response to an action for the env."""
        return read_action(text, stopped=stopped, parser=self.parser, tools=self.described)


def with_call_error(messages: Sequence[Message], action: Action) -> list[Message]:
    """Returns the messages after a response, with the error text of calls that could not be made."""
    if not action.call_error or not messages:
        return list(messages)
    *earlier, last = messages
    if last["role"] == "tool":
        return [*messages, {"role": "tool", "content": action.call_error}]
    content: Any = last["content"]
    if isinstance(content, str):
        return [*earlier, {**last, "content": f"{content}\n{action.call_error}"}]
    return [*earlier, {**last, "content": [*content, {"type": "text", "text": f"\n{action.call_error}"}]}]
