"""Tests prompts that are too long, and chat templates that refuse a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.config.choices import Overlong
from relax_core.contracts.data import BadRow
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.registry import find_env
from relax_core.rollout.prompt_tokens import PromptMaker, shortened
from relax_core.tools.tiny_text import write_prompt_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_prompt_tokenizer(made)
    return made


def maker(folder: Path, *, room: int, overlong: Overlong) -> PromptMaker:
    env = find_env("single_turn")
    tokenizer = PromptTokenizer(folder)
    config = env.config(name="single_turn")
    return PromptMaker(env=env, env_config=config, tokenizer=tokenizer, max_prompt_tokens=room, overlong=overlong)


CONVERSATION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "0123456789" * 4}]


@pytest.mark.parametrize(
    ("overlong", "kept"),
    [(Overlong.truncate_left, "6789" + "0123456789"), (Overlong.truncate_middle, "0123456" + "3456789")],
)
def test_the_longest_message_is_cut_and_the_template_stays(folder: Path, overlong: Overlong, kept: str) -> None:
    whole = maker(folder, room=1000, overlong=overlong)
    around = len(whole.tokens({"prompt": CONVERSATION}, where="row")) - 40
    cut = maker(folder, room=around + 14, overlong=overlong)
    ids = cut.tokens({"prompt": CONVERSATION}, where="row")
    text = PromptTokenizer(folder).decode(ids)
    assert len(ids) == around + 14
    assert (
        text == f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n{kept}<|im_end|>\n<|im_start|>assistant\n"
    )


@given(text=st.text(max_size=60), kept=st.integers(1, 60))
def test_so_many_tokens_are_kept_of_both_ends(text: str, kept: int) -> None:
    spans = [(place, place + 1) for place in range(len(text))]
    if kept > len(text):
        return
    left = shortened(text, spans, kept=kept, how=Overlong.truncate_left)
    middle = shortened(text, spans, kept=kept, how=Overlong.truncate_middle)
    assert left == text[-kept:]
    head = (kept + 1) // 2
    assert middle == text[:head] + text[len(text) - (kept - head) :] and len(middle) == kept


def test_where_the_longest_message_is_not_long_enough_the_row_is_left_out(folder: Path) -> None:
    short = [{"role": "user", "content": "12345"}] * 20
    with pytest.raises(BadRow, match=r"row: its prompt has .* It is too long even without its longest message") as bad:
        maker(folder, room=30, overlong=Overlong.truncate_left).tokens({"prompt": short}, where="row")
    assert bad.value.reason == "too_long"


def test_a_row_that_the_template_refuses_is_left_out(tmp_path: Path) -> None:
    write_prompt_tokenizer(tmp_path)
    refuses = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(refuses + "{{ messages[0].content }}")
    prompts = maker(tmp_path, room=100, overlong=Overlong.drop)
    assert prompts.tokens({"prompt": CONVERSATION[1:]}, where="row")
    with pytest.raises(BadRow, match=r"row 3: the chat template refuses it: .*begin with a user") as bad:
        prompts.tokens({"prompt": CONVERSATION}, where="row 3")
    assert bad.value.reason == "bad_row:template"


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, {"enable_thinking": True}])
def test_template_arguments_reach_the_template(tmp_path: Path, arguments: dict[str, Any]) -> None:
    write_prompt_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} no{% endif %}"
    )
    plain = PromptTokenizer(tmp_path)
    told = PromptTokenizer(tmp_path, template_arguments=arguments)
    text = plain.decode(told.encode(CONVERSATION[1:]))
    assert text.endswith(" no") is (arguments["enable_thinking"] is False)
    with pytest.raises(
        ValueError,
        match=r"its chat template does not read data.chat_template_kwargs.enable_thnking; it reads enable_thinking",
    ):
        PromptTokenizer(tmp_path, template_arguments={"enable_thnking": False})
