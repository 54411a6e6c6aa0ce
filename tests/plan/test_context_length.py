"""Tests that Relax derives the context length from the prompts before a run starts."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.config.compose import compose as composed
from relax_core.config.compose import load_config, settled, typed_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import MEDIA_TASKS, RelaxConfig
from relax_core.data.generated import LONGEST_PROMPT, SEEDS, example, task_names
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.plan.build_plan import make_plan
from relax_core.plan.context_length import settle_context
from relax_core.plan.data_check import DataSummary, summarize_data
from relax_core.preflight import CHECKS, settle, settle_evaluation
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.tools.tiny_text import tiny_prompt_tokenizer
from tests.config.conftest import SHAPE, write_folder

AROUND = 8  # tokens that the tiny chat template adds around one message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", SHAPE | {"model_type": "qwen3"})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [f"{number} + 1" for number in range(290)] + ["x" * 300] * 10)


def write_rows(file: Path, prompts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"question": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return file


def own(model: Path, rows: Path, *overrides: str) -> tuple[RelaxConfig, list[str]]:
    """Settles the README's command line for a user's data."""
    line = ("data=file", f"data.path={rows}", "data.prompt_key=question", "data.answer_key=answer", "reward=math")
    words = (*line, "model=qwen3", f"model.path={model}", "optimizer.lr=1e-6", "rollout.max_new_tokens=512")
    return settled(typed_config(composed([*words, *overrides])), checks=CHECKS, settle=settle)


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
    job = load_config(
        ["launcher=ray_job", "data=file", "data.path=/there/x.jsonl", "reward=math"], settle=settle_context
    )
    assert job.engine.context_length is None  # the job's files are on the cluster
    assert make_plan(job).context[0].startswith("engine.context_length=576 tokens a sample: 568 for the prompt")


def test_held_out_prompts_count(model: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", ["1 + 1"] * 300)
    held_out = write_rows(tmp_path / "eval.jsonl", ["y" * 400, *["1 + 1"] * 255, "z" * 4000])
    config, problems = own(model, train, f"data.eval_path={held_out}")
    assert (config.engine.context_length, problems) == (960, [])  # the last row is beyond eval.rows


def test_a_prompt_that_the_context_does_not_hold_is_left_out_or_named_with_the_fix(model: Path, rows: Path) -> None:
    config, problems = own(model, rows, "engine.context_length=700", "data.eval_size=0", "eval.every=0")
    assert problems == []
    look = summarize_data(config)
    assert (look.bad, look.longest) == ({"too_long": 10}, 308)
    assert look.named[0].startswith(f"row 290: {rows}, line 291: its prompt has 308 tokens")
    error = ("data.overlong=error", "data.eval_size=0", "eval.every=0")
    _, (problem,) = own(model, rows, "engine.context_length=700", *error)
    message = "10 of the 300 checked prompts are longer than the 188 tokens that remain after "
    assert problem.startswith(
        f"{message}rollout.max_new_tokens=512: {rows}, line 291 has 308, {rows}, line 292 has 308,"
    )
    remedy = "Use engine.context_length=820, or null, which derives it; or data.overlong=truncate_middle."
    assert problem.endswith(remedy)
    config, (problem,) = own(model, rows, "rollout.max_new_tokens=4000", *error)
    assert config.engine.context_length == 4096
    assert "10 of the 300 checked prompts are longer than the 96 tokens" in problem
    assert problem.endswith("or use data.overlong=truncate_middle. The model has 4096 positions.")
    _, (problem,) = own(model, rows, "engine.context_length=700", "data.max_bad_rows=0.01", *error[1:])
    assert problem.startswith("10 of the 300 checked rows cannot be used, more than data.max_bad_rows=0.01")
    assert problem.endswith(remedy)


TEMPLATES: list[tuple[str | None, str]] = [
    (None, "has no chat template: put one into chat_template.jinja."),
    ("{% for message in messages %}", "its chat template does not parse: line 1: "),
    (
        "{{ raise_exception('no user role') }}",
        "line 1: the chat template refuses it: TemplateError: no user role",
    ),
    ("{{ messages[0]['content'] + 1 }}", "line 1: the chat template refuses it: TypeError: "),
]


@pytest.mark.parametrize(("template", "text"), TEMPLATES)
def test_a_template_that_cannot_be_used_is_told(model: Path, rows: Path, template: str | None, text: str) -> None:
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template is not None else {})
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    _, (problem,) = own(model, rows)
    assert text in problem
    if "refuses it" in text:
        first = f"row 0: {rows}, line 1: the chat template refuses it"
        message = "44 of the 44 checked rows cannot be used, more than data.max_bad_rows=0.05. The first: "
        assert problem.startswith(message + first)
    else:
        assert problem.startswith(f"model.path: model folder {model}")


def test_a_template_that_refuses_some_rows_names_the_first(model: Path, tmp_path: Path) -> None:
    refuses = "{% if 'b' in messages[0].content %}{{ raise_exception('no b') }}{% endif %}{{ messages[0].content }}"
    (model / "chat_template.jinja").write_text(refuses)
    rows = write_rows(tmp_path / "rows.jsonl", ["a", "b"] * 150)
    _, (problem,) = own(model, rows)
    assert problem.startswith("22 of the 44 checked rows cannot be used, more than data.max_bad_rows=0.05.")
    assert f"The first: row 1: {rows}, line 2: " in problem and "no b" in problem


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
    assert f"The first: row 0: {rows}, line 1: the env gives no conversation for it: KeyError: 'nope'" in problem
    with pytest.raises(ConfigError, match=r"data.task=reverse_digits, example 0: the env .* KeyError: 'nope'"):
        load_config([f"env.name={env}"], checks=CHECKS, settle=settle)


def test_nothing_is_said_twice_where_the_folder_or_the_file_is_missing(model: Path, rows: Path) -> None:
    for words in (("model.path=/nowhere",), ("data.path=/nowhere.jsonl",), ("model.path=null",)):
        config, problems = own(model, rows, *words)
        assert len(problems) == 1 and config.engine.context_length == 1024, problems  # 512 for the prompt


@pytest.mark.parametrize("task", task_names())
def test_the_longest_prompt_of_a_generated_task_is_known(task: str) -> None:
    lengths = [len(example(task, split="train", seed=3, index=index).prompt) for index in range(2000)]
    assert max(lengths) == LONGEST_PROMPT[task]


def test_the_tiny_tokenizer_is_that_of_the_made_model() -> None:
    made, light = PromptTokenizer(tiny_model_folder("tiny_qwen3", task="reverse_digits")), tiny_prompt_tokenizer()
    for text in ("rev 12345", "Upper CASE, é; user <|im_end|> inside", ""):
        assert light.encode([{"role": "user", "content": text}]) == made.encode([{"role": "user", "content": text}])
    assert (light.stop_token_ids, light.vocabulary_size) == (made.stop_token_ids, made.vocabulary_size)


def test_much_text_is_bounded_by_its_bytes(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check tokenizes the longest prompts within its budget. Other prompts have at most as many tokens as bytes."""
    around = len(tiny_prompt_tokenizer().render([{"role": "user", "content": ""}]).encode())

    def looked(*overrides: str) -> DataSummary:
        line = ("data=file", f"data.path={rows}", "data.prompt_key=question", "data.eval_size=0", "eval.every=0")
        more = ("reward=math", "model.task=arithmetic", "data.max_bad_rows=0.95")
        return summarize_data(load_config([*line, *more, *overrides]))

    with monkeypatch.context() as short:
        short.setattr("relax_core.plan.data_check.TOKENIZED_BYTES", 1000)
        write_rows(rows, ["€" * 67, *["y" * 150] * 10, "z"])
        look = looked("engine.context_length=128")
        assert (look.longest, look.looked, look.bound) == (158, 12, 150 + around)
        assert look.named[0].startswith(f"row 1: {rows}, line 2: its prompt has 158 tokens")
    write_rows(rows, ["y" * 400, "x" * 130, "z"])
    look = looked("engine.context_length=128")
    assert (look.longest, look.bound, look.bad) == (
        408,
        408,
        {"too_long": 2},
    )  # the prompt of 138 tokens is also too long
    write_rows(rows, ["y"] * 12)
    monkeypatch.setattr("relax_core.plan.data_check.MAX_LISTED_ROWS", 4)
    look = looked()
    assert (look.looked, look.rows) == (4, 12)
    assert look.describe(what="mine") == [
        "12 rows of mine are trained on, 4 of them checked, spread evenly; no prompt has more than 9 tokens."
    ]


def test_files_of_other_kinds_have_lengths_too(model: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("question", "answer"), *[("1 + 1", "2")] * 300])
    config, problems = own(model, table)
    assert (config.engine.context_length, problems) == (576, [])


@pytest.mark.parametrize("task", [task for task in task_names() if task not in (*MEDIA_TASKS, SEEDS)])
def test_the_context_holds_every_prompt_of_a_generated_task(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.plan.data_check.GENERATED_ROWS", 1)  # this row is seldom the longest row
    reward = {"arithmetic": "math", "sums": "exact_match"}.get(task, "reverse_digits")
    words = (f"data={task}", f"model.task={task}", f"reward={reward}", "eval.every=0", "seed=5")
    assert summarize_data(load_config(words)).bound == LONGEST_PROMPT[task] + AROUND


def test_an_evaluation_alone_has_the_context_of_its_sets(model: Path, tmp_path: Path) -> None:
    asked = write_rows(tmp_path / "asked.jsonl", ["1 + 1"] * 9 + ["y" * 300])
    keys = ("data.prompt_key=question", "reward=math", "rollout.max_new_tokens=512", f"eval.sets.mine={asked}")
    config = load_config(["model=qwen3", f"model.path={model}", *keys], settle=settle_evaluation)
    assert config.engine.context_length == 832  # 300 + 8 tokens, 512 for the response: 820, rounded up


def test_the_context_of_an_env_with_turns_holds_its_longest_observations() -> None:
    words = ("env=number_guess", "reward=env", "data=seeds", "eval.every=0", "rollout.max_new_tokens=16")
    turns = ("env.max_turns=3", "env.max_observation_tokens=100")
    config = load_config((*words, *turns), checks=CHECKS, settle=settle)
    assert config.engine.context_length == 768  # 512 for the prompt, 200 observed in two turns, 16 sampled: 728
    config = load_config((*words, "engine.context_length=192"), checks=CHECKS, settle=settle)
    assert config.engine.context_length == 192


def test_an_agent_needs_a_context_that_is_given() -> None:
    words = ("env=agent", "agent.command=true", "eval.every=0")
    with pytest.raises(ConfigError, match=r"engine\.context_length=null with env\.name=agent: the length"):
        load_config(words, checks=CHECKS, settle=settle)
