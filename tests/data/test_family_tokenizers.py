"""Compares tokenizers, chat templates and end tokens of folders like Llama 3's and Mistral's with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.embedded.model_config import read_model_config

TEXT = ["the quick brown fox counts 1 2 3 and 12345", "Été, naïve, 你好", "rev 54321 = ?"]
CONVERSATIONS = [
    [{"role": "user", "content": "rev 12345"}],
    [{"role": "user", "content": "  Été 你好 🙂\n"}],
    [{"role": "system", "content": "be brief "}, {"role": "user", "content": "1+1?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c < s> [ INST] <| eot_id|>"},
    ],
]
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
LLAMA_TEMPLATE = """{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nDate: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}{{- "tools" }}{% endif %}
{%- for message in rest %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL_SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
MISTRAL_TEMPLATE = """{{- bos_token }}
{%- for message in messages if message.role != 'system' %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""


def llama_3(folder: Path) -> None:
    """Returns a byte-level BPE with a post-processor that adds the first token. The template adds this token, too."""
    core = Tokenizer(models.BPE(ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    add_special(core, LLAMA_SPECIAL)
    first = LLAMA_SPECIAL[0]
    core.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, core.token_to_id(first))]
    )
    save(
        folder,
        core,
        LLAMA_TEMPLATE,
        model_type="llama",
        bos=first,
        eos="<|eot_id|>",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    )


def mistral(folder: Path) -> None:
    """Returns a BPE tokenizer that encodes spaces as a special character, and unknown characters as bytes."""
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    core.train_from_iterator(
        TEXT[:1] + TEXT[2:],
        trainers.BpeTrainer(vocab_size=400, special_tokens=[*MISTRAL_SPECIAL[:3], *fallback], show_progress=False),
    )
    add_special(core, MISTRAL_SPECIAL)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    save(folder, core, MISTRAL_TEMPLATE, model_type="mistral", bos="<s>", eos="</s>", ends=("</s>",))


def add_special(core: Tokenizer, tokens: Sequence[str]) -> None:
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])


def save(
    folder: Path, core: Tokenizer, template: str, *, model_type: str, bos: str, eos: str, ends: Sequence[str]
) -> None:
    """Saves a folder in published form: the tokenizer's settings have the template, and both configs all end tokens."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    ids = [core.token_to_id(token) for token in ends]
    named = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    (folder / "generation_config.json").write_text(json.dumps(named))
    sizes = {"vocab_size": core.get_vocab_size(), "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "max_position_embeddings": 512, "sliding_window": None, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(sizes | more | named))


@pytest.fixture(scope="module", params=[llama_3, mistral], ids=["llama", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    request.param(path)
    return path


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=str)
def test_prompts_are_those_of_transformers(folder: Path, messages: list[dict[str, str]]) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokenizer = PromptTokenizer(folder)
    found = tokenizer.encode(messages)
    assert found == expected
    assert found[0] == reference.bos_token_id != found[1]  # only once, although template and post-processor both add it
    response = reference.encode("Été 12 🙂 x", add_special_tokens=False)
    assert tokenizer.decode(response) == reference.decode(response) == "Été 12 🙂 x"


def test_every_end_token_stops(folder: Path) -> None:
    """Llama 3.1 has three end tokens: for a text, a message to a tool, and a turn. The tokenizer names only one."""
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "</s>")
    ends = sorted(token for name in names if (token := core.token_to_id(name)) is not None)
    assert PromptTokenizer(folder).stop_token_ids == ends
    assert list(read_model_config(folder).eos_token_ids) == ends
