"""Reads and compiles the chat template of a model folder, and renders tools as text for templates without tool support.

jinja2 renders the template in its sandbox, with the same settings as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from relax_core.contracts.env import Message
from relax_core.contracts.tool_calls import ToolSchema
from relax_core.contracts.untrusted_files import read_regular
from relax_core.contracts.untrusted_values import clean_text
from relax_core.families.hf_config import read_object

if TYPE_CHECKING:
    import jinja2

    from relax_core.data.tokenizer import PromptTokenizer

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # variables that `render` sets
_MAX_TEMPLATE_BYTES = 1 << 20
_TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
SETTINGS = "tokenizer_config.json"
TEMPLATE_FILES = (SETTINGS, "chat_template.jinja", "chat_template.json", _TOOL_TEMPLATE)
_TOOL, _ABOUT, _VALUE = "relax_probe_tool", "RelaxProbeAbout", "RelaxProbeValue"
_RESULT, _ID = "RelaxProbeResult", "probe0000"
_PROBE: ToolSchema = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": _ABOUT,
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}
_ASKED: Message = {"role": "user", "content": "RelaxProbeQuestion"}
_HOW = (
    'To call a tool, write <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>; its result follows in '
    "<tool_response></tool_response>."
)


def reads_clock(model_folder: Path) -> bool:
    """Returns whether a chat template of the folder reads the clock.

    Raises ValueError for a folder without template.
    """
    return any(
        "strftime_now" in template for template in chat_templates(model_folder, read_json(model_folder / SETTINGS))
    )


def utc_date() -> str:
    """Returns the current day in UTC, such as 2026-11-28."""
    return datetime.now(UTC).date().isoformat()


def read_json(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file; an empty dict for a missing file, because most files are optional."""
    return read_object(path) if path.exists() else {}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a template may use. In older model folders, a token is an object."""
    tokens = {key: settings.get(key) for key in _SPECIAL_TOKEN_KEYS}
    return {
        key: clean_text(text)
        for key, token in tokens.items()
        if isinstance(text := token.get("content") if isinstance(token, dict) else token, str)
    }


def chat_templates(model_folder: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the chat template and the tool-use template, which are the same in most folders.

    Reads them from chat_template.jinja and `_TOOL_TEMPLATE`; without these files, from tokenizer_config.json or
    chat_template.json.
    """
    file, tool_file = model_folder / "chat_template.jinja", model_folder / _TOOL_TEMPLATE
    template: Any = None
    if file.exists():
        template = read_regular(file, max_bytes=_MAX_TEMPLATE_BYTES).decode()
    else:
        template = settings.get("chat_template") or read_json(model_folder / "chat_template.json").get("chat_template")
    for_tools: Any = None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template, for_tools = named.get("default"), named.get("tool_use")
    if tool_file.exists():
        for_tools = read_regular(tool_file, max_bytes=_MAX_TEMPLATE_BYTES).decode()
    if not isinstance(template, str) or len(template) > _MAX_TEMPLATE_BYTES:
        raise ValueError(
            f"model folder {model_folder} has no chat template: put one into chat_template.jinja. "
            "A base model has no template; use its instruction-tuned variant."
        )
    for_tools = template if for_tools is None else for_tools
    if not isinstance(for_tools, str) or len(for_tools) > _MAX_TEMPLATE_BYTES:
        raise ValueError(f"model folder {model_folder}: its chat template tool_use is not text. Remove it.")
    return template, for_tools


def check_template_arguments(arguments: Mapping[str, Any], template: str, model_folder: Path) -> None:
    """Raises ValueError for an argument that the template would silently ignore."""
    if not arguments:
        return
    from jinja2 import meta

    environment = _environment(datetime.min)
    known = {*OWN_VARIABLES, *_SPECIAL_TOKEN_KEYS, *environment.globals}
    read = meta.find_undeclared_variables(environment.parse(template)) - known
    for name in arguments:
        if name not in read:
            what = f"it reads {', '.join(sorted(read))}" if read else "it reads no user variable"
            problem = f"its chat template does not read data.chat_template_kwargs.{name}; {what}."
            raise ValueError(f"model folder {model_folder}: {problem}")


def compile_template(template: str, *, what: str, clock: datetime) -> jinja2.Template:
    """Compiles a template. Raises ValueError, with a text that begins with ``what``, if the template does not parse."""
    from jinja2 import TemplateSyntaxError

    try:
        return _environment(clock).from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"{what}: its chat template does not parse: line {error.lineno}: {error.message}.") from error


def _environment(clock: datetime) -> jinja2.Environment:
    """Returns a jinja2 environment with the sandbox, filters and globals that transformers provides to chat templates.

    ``clock`` is the time that a template reads.
    """
    from jinja2 import TemplateError, ext, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(ext.Extension):
        """Outputs the content of ``{% generation %}`` unchanged; the tag marks assistant text for training masks."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions: Iterable[Any] = (GenerationBlock, ext.loopcontrols)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=list(extensions))
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = clock.strftime
    return environment


# -- Tools ----------------------------------------------------------------------------------------------------------
def check_template_shows_tools(tokenizer: PromptTokenizer) -> None:
    """Raises ValueError if the chat template omits tools, tool calls or tool results.

    Many templates omit them without an error. The model would then train on prompts without the tools.
    """
    shown = tokenizer.render([_ASKED], tools=[_PROBE])
    if _TOOL not in shown or _ABOUT not in shown:
        raise _left_out("the tools of env.name")
    problem: ValueError | None = None
    for arguments in ({"value": _VALUE}, json.dumps({"value": _VALUE})):
        call = {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": _TOOL, "tool_call_id": _ID, "content": _RESULT}
        try:
            whole = tokenizer.render([_ASKED, answer, result], tools=[_PROBE])
        except ValueError as error:
            problem = problem or error
            continue
        behind = whole.partition(_ASKED["content"])[2]
        if _TOOL not in behind or _VALUE not in behind:
            raise _left_out("the call of a tool")
        if _RESULT not in behind:
            raise _left_out("the result of a tool")
        return
    raise _left_out("the call of a tool") from problem


def _left_out(what: str) -> ValueError:
    return ValueError(
        f"env.tools_as=template: the chat template of model.path leaves out {what}. Use env.tools_as=text, which shows "
        "tools and results as plain text, or another model."
    )


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """Returns the conversation with a description of the tools, and how to call them, in its system message."""
    about = "\n".join(["# Tools", *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools), _HOW])
    first, *rest = messages
    if first["role"] != "system":
        return [{"role": "system", "content": about}, *messages]
    content: Any = first["content"]
    if isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{about}"}, *rest]
    return [{**first, "content": [*content, {"type": "text", "text": f"\n\n{about}"}]}, *rest]


def with_results_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns the messages with tool results as user messages; adjacent results share a message."""
    found: list[Message] = []
    joins = False  # whether the last message contains tool results
    for message in messages:
        if message["role"] != "tool":
            found.append(dict(message))
        else:
            parts = _parts(message["content"])
            parts = [_text("<tool_response>\n"), *parts, _text("\n</tool_response>")]
            if joins:
                parts = [*_parts(found.pop()["content"]), _text("\n"), *parts]
            found.append({"role": "user", "content": _joined(parts)})
        joins = message["role"] == "tool"
    return found


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _parts(content: Any) -> list[Any]:
    return [_text(content)] if isinstance(content, str) else list(content)


def _joined(parts: Sequence[Any]) -> Any:
    """Joins the parts to plain text if all parts are text; otherwise returns the list of parts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)
