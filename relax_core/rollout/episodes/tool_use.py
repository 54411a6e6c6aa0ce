"""Shows the tools of an env to the model and parses its calls, in the form that the run chose before its start."""

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
    """Defines how tools are shown and calls are parsed. ``described`` are the tools of a data row.

    ``parser`` is "none" for an env without tools. ``as_text``: the tools are text in the messages, and the chat
    template does not get them.
    """

    parser: str
    as_text: bool
    described: tuple[ToolSchema, ...] = ()

    @staticmethod
    def of_env(env: EnvSpec, config: InteractionConfig, tokenizer: PromptTokenizer) -> ToolUse:
        """Returns the form for a run.

        Raises ValueError if the chat template leaves out tools or does not show the form of calls.
        """
        if env.tools is None:
            return ToolUse(parser="none", as_text=False)
        as_text = config.tools_as == "text"
        if not as_text and config.tool_parser != "none":  # without a call format the model calls no tool
            check_template_shows_tools(tokenizer)
        name = "hermes" if as_text and config.tool_parser == AUTO else config.tool_parser
        return ToolUse(parser=tool_parser(name, template=tokenizer.template), as_text=as_text)

    def of_row(self, env: EnvSpec, row: DataRow, config: InteractionConfig) -> ToolUse:
        """Returns a copy with the tools of a data row. Raises `WrongResult` as the env's ``tools`` does."""
        if env.tools is None:
            return self
        described: tuple[ToolSchema, ...] = tuple(env.tools(row, config))  # type: ignore[arg-type]  # checked: schemas
        return replace(self, described=described)

    @property
    def schemas(self) -> Sequence[ToolSchema] | None:
        """Returns the tools for the chat template, None if it gets none."""
        return self.described if self.described and not self.as_text else None

    def opening(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation that opens an episode, with the tools in it if they are plain text."""
        return with_tools_as_text(messages, self.described) if self.as_text and self.described else list(messages)

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages of the env in the form for the chat template."""
        return with_results_as_text(messages) if self.as_text else list(messages)

    def read(self, text: str, *, stopped: bool) -> Action:
        """Returns a response as the env's action."""
        return read_action(text, stopped=stopped, parser=self.parser, tools=self.described)


def with_call_error(messages: Sequence[Message], action: Action) -> list[Message]:
    """Returns the messages that follow a response, with the error of its calls that could not be made."""
    if not action.call_error or not messages:
        return list(messages)
    *earlier, last = messages
    if last["role"] == "tool":
        return [*messages, {"role": "tool", "content": action.call_error}]
    content: Any = last["content"]
    if isinstance(content, str):
        return [*earlier, {**last, "content": f"{content}\n{action.call_error}"}]
    return [*earlier, {**last, "content": [*content, {"type": "text", "text": f"\n{action.call_error}"}]}]
