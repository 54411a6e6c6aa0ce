"""Makes the character-level tokenizers of the builtin models: one token for each character, in lower case.

The chat marks and the role names are one token each. Models that see have four more tokens for images and videos, and
the characters of a time stamp such as "<0.2 seconds>"; those that hear have three more for sounds. The model that calls
tools has the marks and the frequent pieces of a call, and a template that shows tools.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.tiny_configs import (
    AUDIO_END,
    AUDIO_PAD,
    AUDIO_START,
    AUDIO_TOKENS,
    IMAGE_PAD,
    ROLES,
    SPECIAL_TOKENS,
    TOOL_TOKENS,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    VISION_TOKENS,
    token_ids,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# It shows less of a tool than Qwen3's template does, because each character is a token.
_TOOLS_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}): {{ tool.function.description }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<|im_start|>user\n"
    "<tool_response>{{ message['content'] }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The names by which transformers' processor of Qwen3-Omni asks the tokenizer for these tokens.
_NAMED_TOKENS = {
    "image_token": IMAGE_PAD,
    "video_token": VIDEO_PAD,
    "audio_token": AUDIO_PAD,
    "vision_bos_token": VISION_START,
    "vision_eos_token": VISION_END,
    "audio_bos_token": AUDIO_START,
    "audio_eos_token": AUDIO_END,
}
_TEXT_PART = "{% else %}{{ part['text'] }}{% endif %}"
_AUDIO_PART = (
    "{% elif part['type'] in ['audio', 'input_audio', 'audio_url'] %}<|audio_start|><|audio_pad|><|audio_end|>"
)
_VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ['video', 'video_url'] %}<|vision_start|><|video_pad|><|vision_end|>"
    f"{_TEXT_PART}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_prompt_tokenizer(
    *,
    template_arguments: Mapping[str, Any] | None = None,
    vision: bool = False,
    audio: bool = False,
    tools: bool = False,
) -> PromptTokenizer:
    """Returns the tokenizer of the builtin models without making a model. Imports no transformers."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompt_tokenizer(Path(folder), vision=vision, audio=audio, tools=tools)
        return PromptTokenizer(Path(folder), template_arguments=template_arguments)


def write_prompt_tokenizer(folder: Path, *, vision: bool = False, audio: bool = False, tools: bool = False) -> None:
    """Writes the tokenizer's files that `PromptTokenizer` reads."""
    _tokenizer_core(vision=vision, audio=audio, tools=tools).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": chat_template(vision=vision, audio=audio, tools=tools)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_tiny_tokenizer(folder: Path, *, vision: bool = False) -> None:
    """Writes the tokenizer's files alone, as transformers does."""
    build_tokenizer(vision=vision).save_pretrained(folder)


def chat_template(*, vision: bool, audio: bool = False, tools: bool = False) -> str:
    """Returns the chat template.

    With ``vision`` it takes content in parts, with ``audio`` sounds among them; with ``tools`` it shows tools.
    """
    if tools:
        return _TOOLS_CHAT_TEMPLATE
    if audio:
        return _VISION_CHAT_TEMPLATE.replace(_TEXT_PART, _AUDIO_PART + _TEXT_PART)
    return _VISION_CHAT_TEMPLATE if vision else _CHAT_TEMPLATE


def build_tokenizer(*, vision: bool = False, audio: bool = False, tools: bool = False) -> PreTrainedTokenizerFast:
    """Returns the tokenizer as transformers' class."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_core(vision=vision, audio=audio, tools=tools),
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        **({"model_specific_special_tokens": _NAMED_TOKENS} if audio else {}),
    )
    tokenizer.chat_template = chat_template(vision=vision, audio=audio, tools=tools)
    return tokenizer


def _tokenizer_core(*, vision: bool, audio: bool = False, tools: bool = False) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    core = Tokenizer(models.WordLevel(token_ids(vision=vision, audio=audio, tools=tools), unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if vision else ()), *(AUDIO_TOKENS if audio else ()))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(role, single_word=True, normalized=False) for role in ROLES])
    if tools:
        core.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    return core
