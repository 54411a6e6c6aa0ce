"""Makes the character-level tokenizers of the builtin models: one token for each character, in lower case.

The chat marks and the role names are one token each. Models that see have four more tokens for images and videos, and
the characters of a time stamp such as "<0.2 seconds>".
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.tiny_configs import ROLES, SPECIAL_TOKENS, VISION_TOKENS, token_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ['video', 'video_url'] %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_prompt_tokenizer(
    *, template_arguments: Mapping[str, Any] | None = None, vision: bool = False
) -> PromptTokenizer:
    """Returns the tokenizer of the builtin models without making a model. Imports no transformers."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompt_tokenizer(Path(folder), vision=vision)
        return PromptTokenizer(Path(folder), template_arguments=template_arguments)


def write_prompt_tokenizer(folder: Path, *, vision: bool = False) -> None:
    """Writes the tokenizer's files that `PromptTokenizer` reads."""
    _tokenizer_core(vision=vision).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": chat_template(vision=vision)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_tiny_tokenizer(folder: Path, *, vision: bool = False) -> None:
    """Writes the tokenizer's files alone, as transformers does."""
    build_tokenizer(vision=vision).save_pretrained(folder)


def chat_template(*, vision: bool) -> str:
    """Returns the chat template, which with ``vision`` takes content in parts."""
    return _VISION_CHAT_TEMPLATE if vision else _CHAT_TEMPLATE


def build_tokenizer(*, vision: bool = False) -> PreTrainedTokenizerFast:
    """Returns the tokenizer as transformers' class."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_core(vision=vision),
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template(vision=vision)
    return tokenizer


def _tokenizer_core(*, vision: bool) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    core = Tokenizer(models.WordLevel(token_ids(vision=vision), unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if vision else ()))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(role, single_word=True, normalized=False) for role in ROLES])
    return core
