"""Makes the builtin text models: a character-level tokenizer, and a few supervised steps before GRPO.

The tokenizer has one token per character, in lower case, and one token per chat mark and role name. Vision models have
four more tokens for images and videos, and the characters of time stamps such as "<0.2 seconds>". Models with audio
have three more tokens for sounds. The model that calls tools has tokens for the marks and frequent pieces of a call,
and its chat template shows tools.

After the warm start, GRPO gets rewards but can still improve. For an environment, the demonstrations are games of a
scripted player. The player makes mistakes that GRPO should remove. The environment writes the first messages and the
observations, and `TurnTokens` joins them with the answers. So the model sees the same tokens as in a run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.choices import CALCULATOR, NUMBER_GUESS
from relax_core.config.schema import FOUR_MODALITIES, TONE_OF_PICTURE
from relax_core.contracts.env import EnvSpec, EpisodeStart, InteractionConfig
from relax_core.data.generated import ARITHMETIC, REVERSE_DIGITS, SEE, Example, example
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.tool_parsers import read_action, tool_parser
from relax_core.data.turn_tokens import TurnTokens
from relax_core.families.tiny_configs import (
    AUDIO_END,
    AUDIO_PAD,
    AUDIO_START,
    AUDIO_TOKENS,
    EXPERTS,
    HYBRID,
    HYBRID_EXPERTS,
    IMAGE_PAD,
    OMNI,
    ROLES,
    SPECIAL_TOKENS,
    STUDENT,
    TEACHER,
    TOOL_TOKENS,
    TOOLS,
    VIDEO_PAD,
    VISION,
    VISION_END,
    VISION_EXPERTS,
    VISION_START,
    VISION_TOKENS,
    tiny_config,
    token_ids,
)
from relax_core.registry import find_env

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows less of a tool than Qwen3's template, because each character is a token.
_TOOLS_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}("
    "{{ tool.function.parameters.properties | join(', ') }}): {{ tool.function.description }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<|im_start|>user\n"
    "<tool_response>{{ message['content'] }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# tokenizer attributes that transformers' Qwen3-Omni processor reads
_NAMED_TOKENS = {
    "image_token": IMAGE_PAD,
    "video_token": VIDEO_PAD,
    "audio_token": AUDIO_PAD,
    "vision_bos_token": VISION_START,
    "vision_eos_token": VISION_END,
    "audio_bos_token": AUDIO_START,
    "audio_eos_token": AUDIO_END,
}
_TEXT_PART = "{% else %}{{ part['text'] }}{% endif %}"
_AUDIO_PART = (
    "{% elif part['type'] in ['audio', 'input_audio', 'audio_url'] %}<|audio_start|><|audio_pad|><|audio_end|>"
)
_VISION_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] in ['video', 'video_url'] %}<|vision_start|><|video_pad|><|vision_end|>"
    f"{_TEXT_PART}"
    "{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_prompt_tokenizer(
    *,
    template_arguments: Mapping[str, Any] | None = None,
    vision: bool = False,
    audio: bool = False,
    tools: bool = False,
) -> PromptTokenizer:
    """Returns the tokenizer of the builtin models. Makes no model and does not import transformers."""
    with tempfile.TemporaryDirectory() as folder:
        write_prompt_tokenizer(Path(folder), vision=vision, audio=audio, tools=tools)
        return PromptTokenizer(Path(folder), template_arguments=template_arguments)


def write_prompt_tokenizer(folder: Path, *, vision: bool = False, audio: bool = False, tools: bool = False) -> None:
    """Writes the tokenizer files that `PromptTokenizer` reads."""
    _tokenizer_core(vision=vision, audio=audio, tools=tools).save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": chat_template(vision=vision, audio=audio, tools=tools)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_tiny_tokenizer(folder: Path, *, vision: bool = False) -> None:
    """Writes the tokenizer files in transformers' form, without a model."""
    build_tokenizer(vision=vision).save_pretrained(folder)


def chat_template(*, vision: bool, audio: bool = False, tools: bool = False) -> str:
    """Returns the chat template.

    With ``vision``, the template accepts content parts with images and videos. ``audio`` adds sounds. ``tools`` shows
    tools.
    """
    if tools:
        return _TOOLS_CHAT_TEMPLATE
    if audio:
        return _VISION_CHAT_TEMPLATE.replace(_TEXT_PART, _AUDIO_PART + _TEXT_PART)
    return _VISION_CHAT_TEMPLATE if vision else _CHAT_TEMPLATE


def build_tokenizer(*, vision: bool = False, audio: bool = False, tools: bool = False) -> PreTrainedTokenizerFast:
    """Returns the tokenizer as an object of transformers' class."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_core(vision=vision, audio=audio, tools=tools),
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        **({"model_specific_special_tokens": _NAMED_TOKENS} if audio else {}),
    )
    tokenizer.chat_template = chat_template(vision=vision, audio=audio, tools=tools)
    return tokenizer


def _tokenizer_core(*, vision: bool, audio: bool = False, tools: bool = False) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    core = Tokenizer(models.WordLevel(token_ids(vision=vision, audio=audio, tools=tools), unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if vision else ()), *(AUDIO_TOKENS if audio else ()))
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(role, single_word=True, normalized=False) for role in ROLES])
    if tools:
        core.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    return core


CONSISTENT = 0.5  # share of guesses that agree with all earlier answers of the game
CALLED = 0.3  # share of games with a call of the calculator

# Returns the player's next answer. The texts are: first message, answer, observation, answer and so on.
Player = Callable[[random.Random, Sequence[str]], str]
TrainedIds = tuple[list[int], list[bool]]  # token ids of a game, and for each token whether the player wrote it


def guess(rng: random.Random, texts: Sequence[str]) -> str:
    """Returns, with probability `CONSISTENT`, a number that fits the answers so far, else any number from 1 to 7."""
    lowest, highest = 1, 7
    if rng.random() < CONSISTENT:
        for said, answer in zip(texts[1::2], texts[2::2], strict=True):
            if answer == "higher":
                lowest = max(lowest, int(said) + 1)
            else:
                highest = min(highest, int(said) - 1)
        if lowest > highest:  # after an earlier inconsistent guess, no number may fit
            lowest, highest = 1, 7
    return str(rng.randint(lowest, highest))


def calculate(rng: random.Random, texts: Sequence[str]) -> str:
    """Calls the calculator in a share `CALLED` of the games, and then returns its result.

    In all other games, returns the product at once.
    """
    a, b = (int(number) for number in re.findall(r"\d+", texts[0]))
    if len(texts) > 1:
        return f"it is {texts[-1]}"
    if rng.random() < CALLED:
        return f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    return f"it is {a * b}"


PLAYERS: Mapping[str, Player] = {NUMBER_GUESS: guess, CALCULATOR: calculate}


def played_games(task: str, *, tokenizer: PromptTokenizer, seeds: Sequence[int], seed: int) -> list[TrainedIds]:
    """Returns games of the env ``task``, one game per number in ``seeds``.

    The player's random choices depend on ``seed`` and this number.
    """
    env = find_env(task)
    config = env.config(name=task)
    assert isinstance(config, InteractionConfig)

    async def play() -> list[TrainedIds]:
        return [
            await _game(env, config, tokenizer, number, random.Random(f"{task}/{seed}/{number}")) for number in seeds
        ]

    return asyncio.run(play())


async def _game(
    env: EnvSpec, config: InteractionConfig, tokenizer: PromptTokenizer, number: int, rng: random.Random
) -> TrainedIds:
    assert env.open is not None
    row = {"prompt": "", "answer": "", "seed": number}
    tools: Any = list(env.tools(row, config)) if env.tools is not None else []
    parser = tool_parser(config.tool_parser, template=tokenizer.template) if tools else "none"
    game = env.open(EpisodeStart(row=row, group_seed=0, episode_seed=0), config)
    opening = list(await _awaited(game.format_observation(await _awaited(game.reset()))))
    between = TurnTokens(tokenizer, opening, tools=tools or None)
    ids = tokenizer.encode(opening, tools=tools or None)
    trained, texts = [False] * len(ids), [str(opening[-1]["content"])]
    while True:
        texts.append(PLAYERS[config.name](rng, texts))
        answer = [*tokenizer.encode_plain(texts[-1]), tokenizer.stop_token_ids[0]]
        step = await _awaited(game.step(read_action(texts[-1], stopped=True, parser=parser)))
        if step.done:
            await _awaited(game.close())
            return ids + answer, trained + [True] * len(answer)
        messages = list(await _awaited(game.format_observation(step.observation)))
        texts.append(str(messages[-1]["content"]))
        before = len(ids) + len(answer)
        ids, _ = between.next_prompt(ids, answer, messages)
        trained += [True] * len(answer) + [False] * (len(ids) - before)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM

    TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM


@dataclass(frozen=True)
class WarmStart:
    """Holds the settings of the supervised steps before GRPO.

    The steps use AdamW on the tokens of answers. They take ``steps`` × ``batch_size`` examples.

    ``seed`` also determines the initial weights. With some seeds, the model is too weak for GRPO after these steps.
    """

    steps: int
    seed: int
    batch_size: int = 64
    lr: float = 2e-3
    warmup_steps: int = 20
    beta2: float = 0.99

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step. Steps are counted from 0."""
        return self.lr * min(1.0, (step + 1) / self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class VisionWarmStart(WarmStart):
    """Holds the settings for the warm start of a vision model.

    The first ``right_steps`` steps train only right answers. The model then learns to distinguish all images and
    videos. Later steps train each example with two answers: the right answer, and the question's first possible answer
    with the weight ``guessed``. So greedy decoding gives the first possible answer, which is right only by chance. Any
    other right answer has a probability of about 1 - ``guessed``, enough for GRPO to sample it in each group. After
    ``right_steps`` the learning rate falls linearly to the share ``last_lr``. This reduces the number of steps until
    all answers have such a probability.
    """

    right_steps: int
    guessed: float
    last_lr: float = 1.0

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step. Steps are counted from 0."""
        done = max(0, step - self.right_steps) / (self.steps - self.right_steps)
        return super().lr_at(step) * (1.0 - (1.0 - self.last_lr) * done)


@dataclass(frozen=True, kw_only=True)
class FurtherWarmStart(VisionWarmStart):
    """Holds the settings of a warm start that continues after ``first``, the warm start of another task."""

    first_task: str
    first: VisionWarmStart


_EACH_KIND = VisionWarmStart(steps=120, right_steps=60, guessed=0.55, seed=0, batch_size=48)

# After these steps the student solves some of the tasks. So GRPO gets rewards and can still improve.
# The teacher solves all tasks. More steps would only sharpen its distribution.
WARM_STARTS = {
    (STUDENT, REVERSE_DIGITS): WarmStart(steps=58, seed=8),
    (STUDENT, ARITHMETIC): WarmStart(steps=240, seed=0, lr=3e-3),
    (TEACHER, REVERSE_DIGITS): WarmStart(steps=200, seed=8),
    (TEACHER, ARITHMETIC): WarmStart(steps=500, seed=0, lr=3e-3),
    (EXPERTS, REVERSE_DIGITS): WarmStart(steps=58, seed=8),
    (EXPERTS, ARITHMETIC): WarmStart(steps=240, seed=0, lr=3e-3),
    (STUDENT, NUMBER_GUESS): WarmStart(steps=150, seed=0),
    (TOOLS, CALCULATOR): WarmStart(steps=400, seed=0, lr=3e-3),
    (VISION, SEE): VisionWarmStart(steps=180, right_steps=80, guessed=0.6, seed=0, batch_size=36),
    (VISION_EXPERTS, SEE): VisionWarmStart(steps=200, right_steps=80, guessed=0.55, seed=0, batch_size=36),
    (HYBRID, SEE): VisionWarmStart(steps=180, right_steps=80, guessed=0.6, seed=0, batch_size=36),
    (HYBRID_EXPERTS, SEE): VisionWarmStart(steps=110, right_steps=80, guessed=0.55, seed=0, batch_size=36, last_lr=0.1),
    (OMNI, FOUR_MODALITIES): _EACH_KIND,
    # With a learning rate of 2e-3 the model distinguishes only two classes of colours and of tones, and answers 4 of 16
    # pairs wrong.
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
    """Makes a text model and writes it with its tokenizer. With one torch thread, the result is reproducible."""
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
    """Runs the optimizer steps of a warm start. ``loss_of_step`` returns the loss of a step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, recipe.beta2), weight_decay=0.0)
    for step in range(recipe.steps):
        loss = loss_of_step(step)
        optimizer.param_groups[0]["lr"] = recipe.lr_at(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _batch(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Returns ids and targets of some examples, padded with `padded`."""
    prompts: Any = tokenizer.apply_chat_template(
        [[{"role": "user", "content": seen_example.prompt}] for seen_example in examples],
        add_generation_prompt=True,
        return_dict=False,
    )
    answers = [[*tokenizer.encode(seen_example.answer), tokenizer.eos_token_id] for seen_example in examples]
    return padded(prompts, answers, pad=tokenizer.pad_token_id)


def _game_batch(
    tokenizer: PreTrainedTokenizerFast, recipe: WarmStart, *, task: str, numbers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns ids and targets of some games, padded with `padded`. Only the player's answers are trained."""
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
    """Returns ids ``[batch, width]``, padded on the right, and targets.

    The target of a position is the next token, or -1 if the next token is not trained.
    """
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), width), pad)
    targets = torch.full((len(prompts), width), -1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return ids, targets
