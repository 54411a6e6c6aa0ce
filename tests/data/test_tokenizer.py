"""Tests that the tokenizer without transformers equals transformers' own on a real folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.config.checks.model_folder import media_token_ids
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.tools.tiny_tokenizer import write_tiny_tokenizer

CONVERSATIONS = [
    [{"role": "user", "content": "rev 12345"}],
    [{"role": "user", "content": "Upper CASE, é and ünknown; user <| im_end |> inside"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": " 1+1\n= ?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<c> & 'd'"},
    ],
]
# What instruction-tuned families use: namespaces, loop controls, filters, special tokens, a generation block.
HARD_TEMPLATE = """{%- set ns = namespace(last=none) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' %}{% continue %}{% endif -%}
    {%- set ns.last = loop.index0 -%}
{%- endfor -%}
{{- eos_token }}{{ messages | length }} {{ ns.last }}
{% for message in messages %}
    {%- if message.role == 'assistant' %}
{% generation %}{{ message.content }}{% endgeneration %}

    {%- else %}
        {{- message | tojson }}
    {%- endif %}
{% endfor %}
{%- if tools %}tools{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made)
    return made


def _transformers_ids(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=str)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "hard"])
def test_ids_equal_those_of_transformers(
    folder: Path, tmp_path: Path, place: str, messages: list[dict[str, str]]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    if place == "tokenizer_config.json":
        config = json.loads((copy / place).read_text())
        config["chat_template"] = (copy / "chat_template.jinja").read_text()
        (copy / "chat_template.jinja").unlink()
        (copy / place).write_text(json.dumps(config))
    elif place == "hard":
        (copy / "chat_template.jinja").write_text(HARD_TEMPLATE)
    assert PromptTokenizer(copy).encode(messages) == _transformers_ids(copy, messages)


def test_the_tiny_prompt_is_short_and_decodes(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    ids = tokenizer.encode(CONVERSATIONS[0])
    assert len(ids) == 17
    assert tokenizer.decode(ids) == "<|im_start|>user\nrev 12345<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids[6:12]) == " 12345"


def test_a_special_token_inside_an_answer_is_not_hidden(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    (pad,) = tokenizer.encode_text("<pad>")
    five = tokenizer.encode([{"role": "user", "content": "5"}])[3]
    assert tokenizer.decode([five, pad, five]) == "5<pad>5"
    assert tokenizer.decode([]) == ""


def test_stop_and_media_tokens_come_from_all_files(folder: Path, tmp_path: Path) -> None:
    assert PromptTokenizer(folder).stop_token_ids == [3]
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    (copy / "config.json").write_text(json.dumps({"eos_token_id": 3, "image_token_id": 70, "vocab_size": 56}))
    assert media_token_ids(copy) == [70]
    core = json.loads((copy / "tokenizer.json").read_text())
    names = ["<|vision_start|>", "<|image_pad|>", "<|VIDEO|>", "<|not_media|>"]
    core["added_tokens"] += [
        {"id": 56 + place, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for place, name in enumerate(names)
    ]
    (copy / "tokenizer.json").write_text(json.dumps(core))
    assert PromptTokenizer(copy).stop_token_ids == [1, 3]
    assert media_token_ids(copy) == [56, 57, 58, 70]


def test_what_a_folder_lacks_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json.*save_pretrained"):
        PromptTokenizer(tmp_path)
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no chat template"):
        PromptTokenizer(copy)
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (copy / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="names no end token"):
        PromptTokenizer(copy)


def test_a_template_cannot_reach_python(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="SecurityError"):
        PromptTokenizer(copy).encode(CONVERSATIONS[0])


def test_a_template_that_refuses_says_why(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match=r"the chat template does not take it: TemplateError: no system role"):
        PromptTokenizer(copy).encode(CONVERSATIONS[0])


def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from relax_core.data.tokenizer import PromptTokenizer;"
        f"PromptTokenizer(Path({str(folder)!r})).encode([{{'role': 'user', 'content': 'a'}}]);"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "set()"
