"""Tests that the builtin model loads, starts with the intended accuracy, and is reproducible."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.data.generated import example
from relax_core.data.tokenizer import PromptTokenizer, token_difference
from relax_core.families.tiny_configs import MODEL_NAMES, tiny_config
from relax_core.tools.make_tiny import make_tiny_model, tiny_model_folder
from rewards.reverse_digits import SPEC

EVAL_ROWS = 256
MAX_NEW_TOKENS = 8


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lets three threads request models at the same time, and returns the folder of models."""
    folder = tmp_path_factory.mktemp("models")
    with ThreadPoolExecutor(3) as threads:
        made = threads.map(
            lambda _: tiny_model_folder("tiny_qwen3", task="reverse_digits", cache_root=folder), range(3)
        )
        assert len(set(made)) == 1
    return folder


def _sampled(folder: Path, *, task: str) -> list[RewardOutput]:
    """Returns the rewards of one sampled response to each held-out prompt, at temperature 1."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), PromptTokenizer(folder)
    outputs = []
    by_length: dict[int, list[tuple[list[int], str]]] = {}
    for index in range(EVAL_ROWS):
        task_example = example(task, split="eval", seed=0, index=index)
        ids = tokenizer.encode([{"role": "user", "content": task_example.prompt}])
        by_length.setdefault(len(ids), []).append((ids, task_example.answer))
    for rows in by_length.values():
        prompts = torch.tensor([ids for ids, _ in rows])
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        for (ids, answer), sequence in zip(rows, made.tolist(), strict=True):
            response, stop = sequence[len(ids) :], tokenizer.stop_token_ids[0]
            stopped = stop in response
            text = tokenizer.decode(response[: response.index(stop)] if stopped else response)
            outputs.append(
                SPEC.score(RewardInput(response=text, stopped=stopped, answer=answer, row={}), SPEC.config())
            )
    return outputs


@pytest.mark.parametrize(
    ("task", "reward", "exact"),
    [
        ("reverse_digits", (0.28, 0.42), (0.0, 0.05)),
        pytest.param("arithmetic", (0.4, 0.75), (0.1, 0.55), marks=pytest.mark.soak),  # takes 50 s
    ],
)
def test_the_model_starts_where_grpo_has_something_to_climb(
    cache: Path, task: str, reward: tuple[float, float], exact: tuple[float, float]
) -> None:
    outputs = _sampled(tiny_model_folder("tiny_qwen3", task=task, cache_root=cache), task=task)
    mean = sum(output.reward or 0.0 for output in outputs) / EVAL_ROWS
    share = sum(output.exact for output in outputs) / EVAL_ROWS
    assert reward[0] < mean < reward[1], mean
    assert exact[0] <= share < exact[1], share


def test_the_teacher_knows_the_task_and_has_the_students_tokens() -> None:
    student, teacher = (tiny_model_folder(name, task="reverse_digits") for name in MODEL_NAMES[:2])
    outputs = _sampled(teacher, task="reverse_digits")
    assert sum(output.exact for output in outputs) / EVAL_ROWS > 0.9
    assert token_difference(student, teacher) is None


def test_the_mixture_of_experts_starts_as_low_and_has_the_same_tokens() -> None:
    folder = tiny_model_folder("tiny_qwen3_moe", task="reverse_digits")
    outputs = _sampled(folder, task="reverse_digits")
    assert 0.28 < sum(output.reward or 0.0 for output in outputs) / EVAL_ROWS < 0.42
    assert token_difference(tiny_model_folder("tiny_qwen3", task="reverse_digits"), folder) is None
    config = json.loads((folder / "config.json").read_text())
    wanted = tiny_config("tiny_qwen3_moe")
    assert config["num_local_experts"] == wanted.pop("num_experts") == 8  # transformers uses another name for this key
    assert wanted.items() <= config.items()


def test_the_folder_is_a_tied_qwen3_of_about_100k_parameters(cache: Path) -> None:
    from safetensors import safe_open

    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits", cache_root=cache)
    config = json.loads((folder / "config.json").read_text())
    wanted = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}
    assert {key: config[key] for key in wanted} == wanted
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        sizes = {name: tensors.get_tensor(name).size for name in tensors.keys()}  # noqa: SIM118
    assert "lm_head.weight" not in sizes
    assert 90_000 < sum(sizes.values()) < 120_000


def test_the_same_seed_gives_the_same_bits(cache: Path, tmp_path: Path) -> None:
    folder = tiny_model_folder("tiny_qwen3", task="reverse_digits", cache_root=cache)
    make_tiny_model(tmp_path, task="reverse_digits")
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / file).read_bytes() == (folder / file).read_bytes(), file


def test_it_is_made_once_whoever_asks(cache: Path) -> None:
    (folder,) = cache.glob("tiny_qwen3-reverse_digits-*")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model_folder("tiny_qwen3", task="reverse_digits", cache_root=cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_the_command_prints_the_folder(cache: Path) -> None:
    command = [sys.executable, "-m", "relax_core.tools.make_tiny", "--task", "reverse_digits", "--cache-root"]
    done = subprocess.run([*command, str(cache)], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == str(tiny_model_folder("tiny_qwen3", task="reverse_digits", cache_root=cache))


def test_unknown_names_and_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.builtin='tiny_gpt'.*tiny_qwen3"):
        tiny_model_folder("tiny_gpt", task="reverse_digits", cache_root=tmp_path)
    with pytest.raises(ValueError, match=r"model.task=poetry.*reverse_digits, arithmetic"):
        tiny_model_folder("tiny_qwen3", task="poetry", cache_root=tmp_path)
