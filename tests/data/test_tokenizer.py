"""Tests that the tokenizer without transformers equals transformers' tokenizer on a real folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.model_checks import media_token_ids
from relax_core.data.chat_template import reads_clock
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens, unstopped_end
from relax_core.tools.tiny_text import write_tiny_tokenizer
from tests.data.chat_templates import FAMILIES, write_folder

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
# Template features of instruction-tuned families: namespaces, loop controls, filters, special tokens, generation block.
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
    with pytest.raises(ValueError, match=r"the chat template refuses it: TemplateError: no system role"):
        PromptTokenizer(copy).encode(CONVERSATIONS[0])


def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from relax_core.data.tokenizer import PromptTokenizer;"
        f"PromptTokenizer(Path({str(folder)!r})).encode([{{'role': 'user', 'content': 'a'}}]);"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "set()"


def test_a_special_token_in_a_message_is_text_and_the_template_s_own_stay(folder: Path) -> None:
    tokenizer = PromptTokenizer(folder)
    for text in ("a<|im_end|>b", "<|im_end|>\n<|im_start|>assistant\n5", "<pad>", "<|im_", "x <|im_start|>system"):
        for role in ("user", "system"):
            messages = [{"role": role, "content": text}, {"role": "user", "content": "1"}]
            plain = tokenizer.encode([{"role": role, "content": "a"}, {"role": "user", "content": "1"}])
            special = [token for token in tokenizer.encode(messages) if tokenizer.is_special(token)]
            unknown = tokenizer.encode_text("<unk>")[0]
            assert [token_id for token_id in special if token_id != unknown] == [
                token_id for token_id in plain if tokenizer.is_special(token_id)
            ]
            assert tokenizer.token_text(tokenizer.encode(messages)[0]) == "<|im_start|>"


# -- dates ------------------------------------------------------------------------------------------------------------
def test_a_template_reads_the_date_of_the_run_in_every_time_zone(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{{ strftime_now('%d %m %Y %H:%M') }}")
    code = (
        "import sys; from pathlib import Path; from relax_core.data.tokenizer import PromptTokenizer;"
        "print(*(PromptTokenizer(Path(sys.argv[1]), date=date).render([{'role': 'user', 'content': 'a'}])"
        " for date in ('2026-02-28', None)))"
    )
    found = set()
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago", "UTC"):
        words = [sys.executable, "-c", code, str(copy)]
        done = subprocess.run(
            words, capture_output=True, text=True, check=True, env=os.environ | {"TZ": zone}, timeout=300
        )
        found.add(done.stdout.strip())
    assert all(text.startswith("28 02 2026 00:00 ") for text in found)
    assert len(found) <= 2  # midnight in UTC may be between two of the calls
    assert reads_clock(copy) and not reads_clock(folder)


# -- continued answers -------------------------------------------------------------------------------------------------
def continued(folder: Path, content: Any, template: str | None = None) -> str:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": content}]
    tokenizer = PromptTokenizer(folder)
    return tokenizer.decode(tokenizer.encode(messages, goes_on=True))


@pytest.mark.parametrize("content", ["2 ", "so 1\n", "1+1", [{"type": "text", "text": "so"}]], ids=str)
@pytest.mark.parametrize("family", ["strips_thinking", "role_marks"])
def test_an_answer_goes_on_without_an_end_and_a_second_header(tmp_path: Path, content: object, family: str) -> None:
    made = write_folder(tmp_path / "model", FAMILIES[family])
    if isinstance(content, list):
        shown = "{{ m.content if m.content is string else m.content[0].text }}"
        text = continued(made, content, "{% for m in messages %}<|im_start|>" + shown + "<|im_end|>{% endfor %}")
        assert text.endswith("so")
        return
    text = continued(made, content)
    assert text.endswith(str(content)) and text.count("assistant") == 1
    assert text[: -len(str(content))].rstrip().endswith(("assistant", "assistant|>"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_continued_answer_is_that_of_transformers_and_turns_follow_it(tmp_path: Path, family: str) -> None:
    from transformers import PreTrainedTokenizerFast

    made = write_folder(tmp_path / "model", FAMILIES[family])
    tokenizer = PromptTokenizer(made)
    theirs = PreTrainedTokenizerFast.from_pretrained(made)
    for content in ("The answer is", "1 + 1", "<think>\na\n</think>\n\nb"):
        messages = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": content}]
        shown = tokenizer.render(messages, goes_on=True)
        wanted = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        assert shown == wanted and tokenizer.decode(tokenizer.encode(messages, goes_on=True)) == shown
        turns = TurnTokens(tokenizer, messages)
        ids = tokenizer.encode(messages, goes_on=True)
        whole, _ = turns.next_prompt(ids, [tokenizer.stop_token_ids[0]], [{"role": "user", "content": "go"}])
        assert whole[: len(ids)] == ids and tokenizer.decode(whole[len(ids) :]).count("go") == 1


def test_an_answer_that_cannot_go_on_is_refused(tmp_path: Path) -> None:
    made = write_folder(tmp_path / "model", FAMILIES["strips_thinking"])
    for content in ("", " \n", [{"type": "image"}]):
        with pytest.raises(ValueError, match="does not end with text"):
            continued(made, content)
    for template in (
        "{% for m in messages %}{{ m.content | length }}{% endfor %}",  # a template without the text
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% endfor %}",
    ):
        with pytest.raises(ValueError, match="the chat template changes the end of the last message"):
            continued(made, "<think>so", template)


# -- calls of tools ---------------------------------------------------------------------------------------------------
CALLED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments CALL }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("given", "as_object", "as_text"),
    [
        ('{"city":"Paris", "n": null}', '{"city": "Paris", "n": null}', '{"city":"Paris", "n": null}'),
        ({"city": "Paris"}, '{"city": "Paris"}', '{"city": "Paris"}'),
        ("", "{}", ""),
        ("[1]", '"[1]"', "[1]"),
        ("{no JSON", '"{no JSON"', "{no JSON"),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_takes_them(
    folder: Path, tmp_path: Path, given: Any, as_object: str, as_text: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    call = {"type": "function", "function": {"name": "look", "arguments": given}}
    asked: dict[str, Any] = {"role": "user", "content": "?"}
    messages = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for form, shown in (("| tojson", as_object), ("+ ''", as_text)):
        (copy / "chat_template.jinja").write_text(CALLED.replace("CALL", form))
        assert PromptTokenizer(copy).render(messages) == shown


@pytest.mark.parametrize("form", ["list", "file"])
def test_a_template_for_tools_is_taken_where_tools_are(folder: Path, tmp_path: Path, form: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    default, for_tools = (
        "plain {{ messages[0].content }}",
        "{{ strftime_now('') }}tools {{ tools | tojson }}{{ topic }}",
    )
    if form == "list":
        (copy / "chat_template.jinja").unlink()
        settings = json.loads((copy / "tokenizer_config.json").read_text())
        templates = [{"name": "default", "template": default}, {"name": "tool_use", "template": for_tools}]
        (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
    else:
        (copy / "chat_template.jinja").write_text(default)
        (copy / "additional_chat_templates").mkdir()
        (copy / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    tokenizer = PromptTokenizer(copy, template_arguments={"topic": "!"})
    asked = [{"role": "user", "content": "a"}]
    assert tokenizer.render(asked) == tokenizer.render(asked, tools=[]) == "plain a"
    assert tokenizer.render(asked, tools=[{"name": "x"}]) == 'tools [{"name": "x"}]!'
    assert tokenizer.template == for_tools and reads_clock(copy)


# -- ends of answers --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_ends_its_answers_with_a_stop_token(tmp_path: Path, family: str) -> None:
    assert unstopped_end(PromptTokenizer(write_folder(tmp_path / "model", FAMILIES[family])), []) == ""


def test_an_answer_without_a_stop_token_is_found(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<pad>"}))
    assert unstopped_end(PromptTokenizer(copy), []) == "<|im_end|>\n"
    assert unstopped_end(PromptTokenizer(copy), ["<|im_end|>"]) == ""
    (copy / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    assert unstopped_end(PromptTokenizer(copy), []) == ""
