"""Makes the builtin tiny models: a character-level tokenizer and a 2-layer Qwen3 with a short supervised warm start.

With them a laptop can run the whole system: each has about a hundred thousand parameters, and GRPO teaches it a
generated task in half a minute. `tiny_model_folder` makes a model once and stores it in the user's cache. The teacher,
for distillation, is the same model after more of the same supervised steps. The mixture of experts is a Qwen3-MoE with
twice the parameters, of which a token uses a third.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.data.generated import ARITHMETIC, REVERSE_DIGITS, Example, check_task, example, task_names
from relax_core.data.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM

STUDENT, TEACHER, EXPERTS = "tiny_qwen3", "tiny_qwen3_teacher", "tiny_qwen3_moe"
MODEL_NAMES = (STUDENT, TEACHER, EXPERTS)
MAX_POSITIONS = 4096  # prompt and response tokens of one sample at most
RECIPE_VERSION = 1  # to be raised when a change below gives other models
_LIBRARIES = ("torch", "transformers", "tokenizers")
_MAKE_DEADLINE_S = 600.0

_SPECIAL_TOKENS = ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")
_ROLES = ("user", "assistant", "system")
_CHARACTERS = " \n0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,:'$"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class WarmStart:
    """Holds the supervised steps before GRPO: AdamW on the answers' tokens, ``steps`` × ``batch_size`` examples.

    ``seed`` also determines the initial weights. With some seeds, the same steps leave GRPO too little to start from.
    """

    steps: int
    seed: int
    batch_size: int = 64
    lr: float = 2e-3
    warmup_steps: int = 20
    beta2: float = 0.99


# After these steps the student solves some of the tasks, so that GRPO gets rewards and can still improve.
# The teacher solves all of them; more steps would only sharpen its distribution.
_WARM_STARTS = {
    (STUDENT, REVERSE_DIGITS): WarmStart(steps=58, seed=8),
    (STUDENT, ARITHMETIC): WarmStart(steps=240, seed=0, lr=3e-3),
    (TEACHER, REVERSE_DIGITS): WarmStart(steps=200, seed=8),
    (TEACHER, ARITHMETIC): WarmStart(steps=500, seed=0, lr=3e-3),
    (EXPERTS, REVERSE_DIGITS): WarmStart(steps=58, seed=8),
    (EXPERTS, ARITHMETIC): WarmStart(steps=240, seed=0, lr=3e-3),
}


def make_tiny_qwen3(folder: Path, *, task: str, name: str = STUDENT) -> None:
    """Writes model and tokenizer as a Hugging Face folder. With one torch thread, the result is always the same."""
    check_task(task)
    recipe = _WARM_STARTS[name, task]
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tokenizer = _build_tokenizer()
    model = _build_model(tokenizer, name)
    _train_warm_start(model, tokenizer, recipe, task=task)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _tokenizer_core() -> Tokenizer:
    """Returns a tokenizer with one token for each character, in lower case.

    The chat marks and the role names are one token each.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *_ROLES, *_CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS])
    core.add_tokens([AddedToken(role, single_word=True, normalized=False) for role in _ROLES])
    return core


def tiny_prompt_tokenizer(*, template_arguments: Mapping[str, Any] | None = None) -> PromptTokenizer:
    """Returns the tokenizer of every builtin model without making a model. Imports no transformers."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompt_tokenizer(Path(folder))
        return PromptTokenizer(Path(folder), template_arguments=template_arguments)


def write_prompt_tokenizer(folder: Path) -> None:
    """Writes the tokenizer's files that `PromptTokenizer` reads."""
    _tokenizer_core().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _build_tokenizer() -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_core(),
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def write_tiny_tokenizer(folder: Path) -> None:
    """Writes the tokenizer's files alone."""
    _build_tokenizer().save_pretrained(folder)


def tiny_config(name: str = STUDENT) -> dict[str, Any]:
    """Returns the sizes in a builtin model's config.json without making the model."""
    dense = {
        "model_type": "qwen3",
        "vocab_size": len(_SPECIAL_TOKENS) + len(_ROLES) + len(_CHARACTERS),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
    }
    if name != EXPERTS:
        return dense
    return dense | {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }


def _build_model(tokenizer: PreTrainedTokenizerFast, name: str) -> TinyModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    values = tiny_config(name) | {
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "float32",
    }
    if name == EXPERTS:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**values))
    return Qwen3ForCausalLM(Qwen3Config(**values))


def _train_warm_start(model: TinyModel, tokenizer: PreTrainedTokenizerFast, recipe: WarmStart, *, task: str) -> None:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, recipe.beta2), weight_decay=0.0)
    for step in range(recipe.steps):
        first = step * recipe.batch_size
        examples = [
            example(task, split="train", seed=recipe.seed, index=index)
            for index in range(first, first + recipe.batch_size)
        ]
        ids, targets = _batch(tokenizer, examples)
        hidden = model.model(input_ids=ids).last_hidden_state
        rows = targets >= 0
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[rows]), targets[rows])
        optimizer.param_groups[0]["lr"] = recipe.lr * min(1.0, (step + 1) / recipe.warmup_steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _batch(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Returns ids ``[batch, width]``, padded on the right, and each position's next token, -1 if it is not trained."""
    import torch

    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": one.prompt}] for one in examples], add_generation_prompt=True, return_dict=False
    )
    answers = [[*tokenizer.encode(one.answer), tokenizer.eos_token_id] for one in examples]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    targets = torch.full((len(examples), width), -1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return ids, targets


def default_cache_root() -> Path:
    """Returns ``$XDG_CACHE_HOME/relax/models``, by default below ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax" / "models"


def tiny_model_folder(name: str, *, task: str, cache_root: Path | None = None) -> Path:
    """Returns the folder of a builtin model, which is made on first use in a process of its own (about ten seconds).

    Other processes that call it at the same time wait for the first. Raises ValueError for an unknown name or task.
    """
    if name not in MODEL_NAMES:
        raise ValueError(f"model.builtin={name!r}: no such builtin model. Use one of: {', '.join(MODEL_NAMES)}.")
    check_task(task)
    root = cache_root or default_cache_root()
    folder = root / f"{name}-{task}-{_cache_key(name, task)}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f".{folder.name}.lock", deadline_s=_MAKE_DEADLINE_S):
        if not folder.is_dir():
            _make_in_subprocess(folder, name=name, task=task)
    return folder


def _cache_key(name: str, task: str) -> str:
    parts = [str(RECIPE_VERSION), str(asdict(_WARM_STARTS[name, task]))]
    parts += [f"{library}={importlib.metadata.version(library)}" for library in _LIBRARIES]
    return hashlib.blake2b("/".join(parts).encode(), digest_size=6).hexdigest()


@contextmanager
def _locked(path: Path, *, deadline_s: float) -> Iterator[None]:
    """Holds a lock file against other processes. The kernel releases it when the process dies."""
    give_up = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"waited {deadline_s:.0f} s for another process that makes the tiny model (lock {path})"
                    ) from None
                time.sleep(0.1)
        yield


def _make_in_subprocess(folder: Path, *, name: str, task: str) -> None:
    """Makes the model in a temporary folder and renames it, so that no process sees a half-made folder."""
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "relax_core.tools.make_tiny",
                f"--name={name}",
                f"--task={task}",
                f"--into={partial}",
            ],
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "PASSIVE",
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
            },
            capture_output=True,
            text=True,
            timeout=_MAKE_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"making the tiny model failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the builtin tiny model and print its folder.")
    parser.add_argument("--name", default=STUDENT, choices=MODEL_NAMES, help="which of them")
    parser.add_argument("--task", required=True, choices=task_names(), help="generated task of the warm start")
    parser.add_argument("--cache-root", type=Path, default=None, help="default: the user's cache folder")
    parser.add_argument("--into", type=Path, default=None, help="write into this folder, past the cache")
    arguments = parser.parse_args()
    if arguments.into is not None:
        make_tiny_qwen3(arguments.into, task=arguments.task, name=arguments.name)
        print(arguments.into)
    else:
        print(tiny_model_folder(arguments.name, task=arguments.task, cache_root=arguments.cache_root))


if __name__ == "__main__":
    main()
