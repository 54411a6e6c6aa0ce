"""Chat templates for tests, each with one peculiarity of a model family, and a function that writes a tokenizer folder.

The templates are not published templates. The peculiarities come from Qwen3, Qwen3.5, GLM-4.5, Llama 3.1, gpt-oss,
Mistral, DeepSeek-V3 and Gemma. `test_published_templates.py` uses the published templates of families.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_CHATML_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{%- for tool in tools %}{{ tool | tojson + '\\n' }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endif %}"
)
_CHATML_RESULT = """
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"""
_HERMES_CALLS = """{%- for call in m.tool_calls or [] %}
            {{- '' if loop.first and not m.content else '\\n' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}"""

# Removes the thinking of every answer before the last user message, like Qwen3.
STRIPS_THINKING = (
    _CHATML_TOOLS
    + """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ['user', 'system'] %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content if loop.index0 > ns.last else m.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + content }}
        """
    + _HERMES_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + _CHATML_RESULT
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
)

# The prompt already contains the answer's <think>, and all texts are trimmed, like Qwen3.5.
OPENS_THINKING = (
    _CHATML_TOOLS
    + """{%- for m in messages %}
    {%- if m.role in ['user', 'system'] %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + m.content | trim }}
        {%- for call in m.tool_calls or [] %}
            {{- '' if loop.first and not m.content else '\\n' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
    + _CHATML_RESULT.replace("m.content", "m.content | trim")
    + """
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
)

# No token ends a message: the model stops when it samples the mark of the next role, like GLM-4.5.
ROLE_MARKS = """[gMASK]<sop>{%- if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content | trim }}
        {%- for call in m.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' + value | string + '</arg_value>' }}
            {%- endfor %}{{ '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"""

# A message with a call loses its text, an answer has one call, and results are quoted as JSON, like Llama 3.1.
DROPS_CONTENT = """{{- bos_token }}
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' + tools | tojson + '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# A sampled answer ends with <|return|>, an answer in the history with <|end|>. A result names its tool. Like gpt-oss.
OTHER_END = """{%- if tools %}{{ '<|start|>developer<|message|>' + tools | tojson + '<|end|>' }}{%- endif %}
{%- set ns = namespace(tool=none) %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if ns.tool is none %}{{ raise_exception('a result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|message|>' + m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- set ns.tool = m.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + ns.tool + '<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"""

# Calls and results have ids of nine letters or digits, and no mark precedes an answer, like Mistral.
NINE_LETTERS = """{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('an id has nine letters') }}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('an id has nine letters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' + (']</s>' if loop.last else ', ') }}
        {%- endfor %}
    {%- else %}{{ ' ' + m.content | trim + '</s>' }}
    {%- endif %}
{%- endfor %}"""

# The model samples a mark before the token that ends its answer, like Command R7B.
TWO_ENDS = """{%- for m in messages %}
    {{- '<start>' + m.role + '<is>' + m.content + ('<said>' if m.role == 'assistant' else '') + '<turn_end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start>assistant<is>' }}{%- endif %}"""

# Arguments of a call are JSON text, like DeepSeek-V3.
TEXT_ARGUMENTS = """{{- bos_token }}{%- if tools %}{{ tools | tojson }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<User>' + m.content }}
    {%- elif m.role == 'tool' %}{{ '<output>' + m.content + '</output>' }}
    {%- else %}{{ '<Assistant>' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<call>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```</call>' }}
        {%- endfor %}{{ '<eos>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<Assistant>' }}{%- endif %}"""

# Tools and their results are omitted silently, like Gemma and Phi.
IGNORES_TOOLS = """{%- for m in messages if m.role != 'tool' %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) }}
    {{- '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class Family:
    """A template with its special tokens. ``stops`` end a response. With ``text`` the arguments of calls are text."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    text: bool = False
    one_call: bool = False
    tools: bool = True


_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_HARMONY = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_BRACKETS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)
_ROLES = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_CHATML = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "strips_thinking": Family(STRIPS_THINKING, _CHATML, ("<|im_end|>",)),
    "opens_thinking": Family(OPENS_THINKING, _CHATML, ("<|im_end|>",)),
    "role_marks": Family(ROLE_MARKS, _ROLES, ("<|user|>", "<|observation|>")),
    "drops_content": Family(DROPS_CONTENT, _HEADERS, ("<|eot_id|>",), one_call=True),
    "other_end": Family(OTHER_END, _HARMONY, ("<|return|>", "<|call|>"), one_call=True),
    "nine_letters": Family(NINE_LETTERS, _BRACKETS, ("</s>",)),
    "text_arguments": Family(TEXT_ARGUMENTS, ("<bos>", "<eos>", "<User>", "<Assistant>"), ("<eos>",), text=True),
    "two_ends": Family(TWO_ENDS, ("<start>", "<is>", "<said>", "<turn_end>"), ("<turn_end>",), tools=False),
    "ignores_tools": Family(IGNORES_TOOLS, ("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",), tools=False),
}


def write_folder(folder: Path, family: Family) -> Path:
    """Writes a folder with the template and a byte-level tokenizer. Two adjacent line breaks are one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    line = "Ċ"  # the byte-level letter of a line break
    vocabulary = {letter: number for number, letter in enumerate([*letters, line + line])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[(line, line)]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    core.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.special[0],
        "eos_token": family.stops[0],
        "chat_template": family.template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    stops = [core.token_to_id(stop) for stop in family.stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    return folder


def write_two_words(folder: Path) -> Path:
    """Writes a minimal tokenizer with two tokens and a chat template into a folder."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
