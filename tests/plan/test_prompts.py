"""What the prompts need is known before the start, and the context follows from it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.config.compose import compose as composed
from relax_core.config.compose import load_config, settled, typed_config
from relax_core.config.schema import RelaxConfig
from relax_core.data.generated import LONGEST_PROMPT, example, task_names
from relax_core.data.prompt_lengths import prompt_lengths
from relax_core.data.sources import file_rows
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.plan.prompts import settle_context
from relax_core.preflight import CHECKS
from relax_core.tools.make_tiny import tiny_model_folder, tiny_prompt_tokenizer
from tests.config.conftest import SHAPE, write_folder

AROUND = 8  # tokens that the tiny chat template puts around one message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", SHAPE | {"model_type": "qwen3"})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [f"{number} + 1" for number in range(290)] + ["x" * 300] * 10)


def write_rows(file: Path, prompts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"question": one, "answer": "1"}) + "\n" for one in prompts))
    return file


def own(model: Path, rows: Path, *overrides: str) -> tuple[RelaxConfig, list[str]]:
    """As README's own-data line has it."""
    line = ("data=file", f"data.path={rows}", "data.prompt_key=question", "data.answer_key=answer", "reward=math")
    words = (*line, "model=qwen3", f"model.path={model}", "optimizer.lr=1e-6", "rollout.max_new_tokens=512")
    return settled(typed_config(composed([*words, *overrides])), checks=CHECKS, settle=settle_context)


def test_readmes_own_data_line_can_start(model: Path, rows: Path) -> None:
    config, problems = own(model, rows)
    assert problems == []
    assert config.engine.context_length == 832  # 300 + 8 tokens, 512 for the response: 820, rounded up


def test_the_tiny_models_context_follows_too(rows: Path) -> None:
    assert load_config(settle=settle_context).engine.context_length == 64
    words = ("data=file", f"data.path={rows}", "data.prompt_key=question", "reward=math", "model.task=arithmetic")
    config = load_config(words, checks=CHECKS, settle=settle_context)
    assert config.engine.context_length == 320  # 308 + 8
    assert load_config(["engine.context_length=99"], settle=settle_context).engine.context_length == 99
    assert load_config(["launcher=ray_job"], settle=settle_context).engine.context_length is None  # its files are there


def test_held_out_prompts_count(model: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", ["1 + 1"] * 300)
    held_out = write_rows(tmp_path / "eval.jsonl", ["y" * 400, *["1 + 1"] * 255, "z" * 4000])
    config, problems = own(model, train, f"data.eval_path={held_out}")
    assert (config.engine.context_length, problems) == (960, [])  # the last row is not among eval.rows


def test_a_prompt_that_the_context_does_not_hold_is_named_with_the_fix(model: Path, rows: Path) -> None:
    _, (problem,) = own(model, rows, "engine.context_length=700")
    told = "10 of 300 prompts are longer than the 188 tokens that are left beside rollout.max_new_tokens=512: "
    assert problem.startswith(f"{told}{rows}, line 291 has 308, {rows}, line 292 has 308,")
    assert problem.endswith("Use engine.context_length=820, or null, which derives it; or leave the rows out.")
    config, (problem,) = own(model, rows, "rollout.max_new_tokens=4000")
    assert config.engine.context_length == 4096
    assert "10 of 300 prompts are longer than the 96 tokens" in problem
    assert problem.endswith("Lower rollout.max_new_tokens, or leave the rows out. The model has 4096 positions.")


TEMPLATES: list[tuple[str | None, str]] = [
    (None, "has no chat template: put one into chat_template.jinja."),
    ("{% for message in messages %}", "its chat template does not parse: line 1: "),
    (
        "{{ raise_exception('no user role') }}",
        "line 1: the chat template does not take it: TemplateError: no user role",
    ),
    ("{{ messages[0]['content'] + 1 }}", "line 1: the chat template does not take it: TypeError: "),
]


@pytest.mark.parametrize(("template", "text"), TEMPLATES)
def test_a_template_that_cannot_be_used_is_told(model: Path, rows: Path, template: str | None, text: str) -> None:
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template is not None else {})
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    _, (problem,) = own(model, rows)
    assert text in problem
    assert (str(model) if "take it" not in text else f"300 of 300 rows give no prompt; the first: {rows}") in problem


def test_a_template_that_refuses_some_rows_names_the_first(model: Path, tmp_path: Path) -> None:
    refuses = "{% if 'b' in messages[0].content %}{{ raise_exception('no b') }}{% endif %}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(refuses)
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b"] * 150)
    _, (problem,) = own(model, rows)
    assert problem.startswith(f"150 of 300 rows give no prompt; the first: {rows}, line 2: ") and "no b" in problem


def _no_end(model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": settings["chat_template"]}))


def _small_vocabulary(model: Path) -> None:
    write_folder(model.with_name("small"), SHAPE | {"model_type": "qwen3", "vocab_size": 55})
    for name in ("config.json", "model.safetensors"):
        (model.with_name("small") / name).replace(model / name)


def _no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (_no_end, "names no end token. Set eos_token in tokenizer_config.json"),
        (
            _small_vocabulary,
            "its tokenizer has token ids up to 55, its weights only 55 rows (vocab_size in config.json)",
        ),
        (_no_tokenizer, "tokenizer.json cannot be read: "),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_told(
    model: Path, rows: Path, break_it: Callable[[Path], None], text: str
) -> None:
    break_it(model)
    _, (problem,) = own(model, rows)
    assert problem.startswith("model.path") and text in problem


def test_an_env_that_raises_is_told_with_the_row(model: Path, rows: Path, tmp_path: Path) -> None:
    env = tmp_path / "mine.py"
    text = (Path(__file__).parents[2] / "envs" / "single_turn.py").read_text()
    env.write_text(text.replace('row["prompt"]', 'row["nope"]'))
    _, (problem,) = own(model, rows, f"env.name={env}")
    assert f"the first: {rows}, line 1: the env gives no conversation for it: KeyError: 'nope'" in problem
    _, (problem,) = settle_context(load_config([f"env.name={env}"]))
    assert problem.startswith("data=reverse_digits with env=") and "KeyError: 'nope'" in problem


def test_nothing_is_said_twice_where_the_folder_or_the_file_is_missing(model: Path, rows: Path) -> None:
    for words in (("model.path=/nowhere",), ("data.path=/nowhere.jsonl",), ("model.path=null",)):
        config, problems = own(model, rows, *words)
        assert len(problems) == 1 and config.engine.context_length == 1024, problems  # 512 are taken for a prompt


@pytest.mark.parametrize("task", task_names())
def test_the_longest_prompt_of_a_generated_task_is_known(task: str) -> None:
    lengths = [len(example(task, split="train", seed=3, index=index).prompt) for index in range(2000)]
    assert max(lengths) == LONGEST_PROMPT[task]


def test_the_tiny_tokenizer_is_that_of_the_made_model() -> None:
    made, light = PromptTokenizer(tiny_model_folder("tiny_qwen3", task="reverse_digits")), tiny_prompt_tokenizer()
    for text in ("rev 12345", "Upper CASE, é; user <|im_end|> inside", ""):
        assert light.encode([{"role": "user", "content": text}]) == made.encode([{"role": "user", "content": text}])
    assert (light.stop_token_ids, light.vocabulary_size) == (made.stop_token_ids, made.vocabulary_size)


def test_much_text_is_bounded_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest are tokenized as far as the budget goes; the rest cannot have more tokens than bytes."""
    monkeypatch.setattr("relax_core.data.prompt_lengths.TOKENIZED_BYTES", 1000)
    rows = write_rows(tmp_path / "rows.jsonl", ["<|im_end|>" * 20, *["y" * 150] * 10, "z"])
    config = load_config(
        [
            "data=file",
            f"data.path={rows}",
            "data.prompt_key=question",
            "data.eval_size=0",
            "reward=math",
            "model.task=arithmetic",
            "eval.every=0",
        ]
    )
    file, count = file_rows(config.data)
    tokenizer = tiny_prompt_tokenizer()

    def messages(row: object) -> list[dict[str, str]]:
        assert isinstance(row, dict)
        return [{"role": "user", "content": row["prompt"]}]

    lengths = prompt_lengths([(file, range(count))], tokenizer=tokenizer, messages=messages, room=120)
    assert (lengths.longest.where, lengths.longest.tokens, lengths.rows) == (f"{rows}, line 2", 158, 12)
    assert lengths.bound == 150 + len(tokenizer.render([{"role": "user", "content": ""}]).encode())
    assert {place.tokens for place in lengths.too_long} == {158}
    write_rows(rows, ["y" * 400, "x" * 130, "z"])
    file, count = file_rows(config.data)
    lengths = prompt_lengths([(file, range(count))], tokenizer=tokenizer, messages=messages, room=120)
    assert [place.tokens for place in lengths.too_long] == [408, 138]  # though it has fewer bytes than 408
    write_rows(rows, ["y"] * 12)
    file, count = file_rows(config.data)
    monkeypatch.setattr("relax_core.data.prompt_lengths.LOOKED_AT", 4)
    few = prompt_lengths([(file, range(count))], tokenizer=tokenizer, messages=messages, room=None)
    assert (few.rows, few.bound >= few.longest.tokens) == (4, True)


def test_files_of_other_kinds_have_lengths_too(model: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("question", "answer"), *[("1 + 1", "2")] * 300])
    config, problems = own(model, table)
    assert (config.engine.context_length, problems) == (576, [])
