"""Trains the builtin text models for a few supervised steps, so that GRPO finds rewards and can still improve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.choices import CALCULATOR, NUMBER_GUESS
from relax_core.config.media_schema import FOUR_MODALITIES, TONE_OF_PICTURE
from relax_core.data.generated import ARITHMETIC, REVERSE_DIGITS, SEE, Example, example
from relax_core.families.tiny_configs import (
    EXPERTS,
    HYBRID,
    HYBRID_EXPERTS,
    OMNI,
    STUDENT,
    TEACHER,
    TOOLS,
    VISION,
    VISION_EXPERTS,
    tiny_config,
)
from relax_core.tools.tiny_games import PLAYERS, played_games
from relax_core.tools.tiny_tokenizer import build_tokenizer, tiny_prompt_tokenizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM


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

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step, from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class SeeWarmStart(WarmStart):
    """Is the warm start of a model that sees.

    The first ``right_steps`` learn right answers only, so that the model tells all images and videos apart. After them
    an example about an image or video is learnt with two answers: the right one, and with the weight ``guessed`` the
    first answer to the question. So greedy answers are that first one, which is right by chance, and any other right
    answer has a probability of about 1 - ``guessed``, so that GRPO meets it in each group. After ``right_steps`` the
    learning rate falls, evenly to the share ``last_lr``: then fewer steps give all answers such a probability.
    """

    right_steps: int
    guessed: float
    last_lr: float = 1.0

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step, from 0."""
        done = max(0, step - self.right_steps) / (self.steps - self.right_steps)
        return super().lr_at(step) * (1.0 - (1.0 - self.last_lr) * done)


@dataclass(frozen=True, kw_only=True)
class FurtherWarmStart(SeeWarmStart):
    """Is a warm start that goes on from that of another task, whose steps are ``first``."""

    first_task: str
    first: SeeWarmStart


_EACH_KIND = SeeWarmStart(steps=120, right_steps=60, guessed=0.55, seed=0, batch_size=48)

# After these steps the student solves some of the tasks, so that GRPO gets rewards and can still improve.
# The teacher solves all of them; more steps would only sharpen its distribution.
WARM_STARTS = {
    (STUDENT, REVERSE_DIGITS): WarmStart(steps=58, seed=8),
    (STUDENT, ARITHMETIC): WarmStart(steps=240, seed=0, lr=3e-3),
    (TEACHER, REVERSE_DIGITS): WarmStart(steps=200, seed=8),
    (TEACHER, ARITHMETIC): WarmStart(steps=500, seed=0, lr=3e-3),
    (EXPERTS, REVERSE_DIGITS): WarmStart(steps=58, seed=8),
    (EXPERTS, ARITHMETIC): WarmStart(steps=240, seed=0, lr=3e-3),
    (STUDENT, NUMBER_GUESS): WarmStart(steps=150, seed=0),
    (TOOLS, CALCULATOR): WarmStart(steps=400, seed=0, lr=3e-3),
    (VISION, SEE): SeeWarmStart(steps=180, right_steps=80, guessed=0.6, seed=0, batch_size=36),
    (VISION_EXPERTS, SEE): SeeWarmStart(steps=200, right_steps=80, guessed=0.55, seed=0, batch_size=36),
    (HYBRID, SEE): SeeWarmStart(steps=180, right_steps=80, guessed=0.6, seed=0, batch_size=36),
    (HYBRID_EXPERTS, SEE): SeeWarmStart(steps=110, right_steps=80, guessed=0.55, seed=0, batch_size=36, last_lr=0.1),
    (OMNI, FOUR_MODALITIES): _EACH_KIND,
    # With a learning rate of 2e-3 it stops at two classes of colours and two of tones, and answers 4 pairs of 16 wrong.
    (OMNI, TONE_OF_PICTURE): FurtherWarmStart(
        steps=300,
        right_steps=240,
        guessed=0.55,
        seed=0,
        batch_size=48,
        lr=5e-4,
        last_lr=0.1,
        first=_EACH_KIND,
        first_task=FOUR_MODALITIES,
    ),
}


def write_text_model(folder: Path, *, name: str, task: str) -> None:
    """Makes a text model and writes it with its tokenizer. With one torch thread, the result is always the same."""
    import torch

    recipe = WARM_STARTS[name, task]
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer(tools=name == TOOLS)
    model = _build_model(tokenizer, name)
    train_warm_start(model, tokenizer, recipe, task=task)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


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


def train_warm_start(model: TinyModel, tokenizer: PreTrainedTokenizerFast, recipe: WarmStart, *, task: str) -> None:
    """Trains a text model on the answers of a generated task, or of the games of an environment."""
    import torch

    def loss_of_step(step: int) -> Tensor:
        numbers = range(step * recipe.batch_size, (step + 1) * recipe.batch_size)
        if task in PLAYERS:
            ids, targets = _game_batch(tokenizer, recipe, task=task, numbers=numbers)
        else:
            examples = [example(task, split="train", seed=recipe.seed, index=index) for index in numbers]
            ids, targets = _batch(tokenizer, examples)
        hidden = model.model(input_ids=ids).last_hidden_state
        rows = targets >= 0
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[rows]), targets[rows])

    supervised_steps(model, recipe, loss_of_step)


def supervised_steps(model: torch.nn.Module, recipe: WarmStart, loss_of_step: Callable[[int], Tensor]) -> None:
    """Takes the steps of a warm start on the loss of each step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, recipe.beta2), weight_decay=0.0)
    for step in range(recipe.steps):
        loss = loss_of_step(step)
        optimizer.param_groups[0]["lr"] = recipe.lr_at(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _batch(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Returns `padded` ids and targets of some examples."""
    prompts: Any = tokenizer.apply_chat_template(
        [[{"role": "user", "content": one.prompt}] for one in examples], add_generation_prompt=True, return_dict=False
    )
    answers = [[*tokenizer.encode(one.answer), tokenizer.eos_token_id] for one in examples]
    return padded(prompts, answers, pad=tokenizer.pad_token_id)


def _game_batch(
    tokenizer: PreTrainedTokenizerFast, recipe: WarmStart, *, task: str, numbers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns ids and targets of some games as `padded` does; the player's answers are trained."""
    import torch

    prompts = tiny_prompt_tokenizer(tools="<tool_call>" in tokenizer.get_vocab())
    games = played_games(task, tokenizer=prompts, seeds=numbers, seed=recipe.seed)
    width = max(len(ids) for ids, _ in games)
    ids = torch.full((len(games), width), tokenizer.pad_token_id)
    targets = torch.full((len(games), width), -1)
    for row, (tokens, trained) in enumerate(games):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        of = torch.where(torch.tensor(trained), torch.tensor(tokens), torch.tensor(-1))
        targets[row, : len(tokens) - 1] = of[1:]
    return ids, targets


def padded(prompts: list[list[int]], answers: list[list[int]], *, pad: int) -> tuple[Tensor, Tensor]:
    """Returns ids ``[batch, width]``, padded on the right, and each position's next token, -1 if it is not trained."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), width), pad)
    targets = torch.full((len(prompts), width), -1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return ids, targets
