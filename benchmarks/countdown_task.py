"""The task of `benchmarks.long_tail`, with prompts that set the answer's length, and a model that solves the task.

The prompt "red 137" requests the countdown from 137 in red: "137r 136r … 1r". Each number of each colour is one token,
so this answer has 138 tokens including the end token. The untrained model counts correctly and picks the right colour
in 6 of 10 cases. Training improves the colour (benchmarks/countdown_reward.py). So answers have known, long-tailed
lengths during the complete training. For episodes of several turns, a row has the prompts of all turns, and earlier
answers stay in the context (benchmarks/countdown_env.py).

The model is a Qwen3 of 6.0 million parameters. The output layer's row of a number is made from the embedding of the
next higher number, so the initial model counts down. A short supervised training then teaches the colours.

    python -m benchmarks.countdown_task --into FOLDER       # makes the model, in about two minutes on a core

The model is made on first use in a separate process and cached in the user's cache folder, like the builtin models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.contracts.private_folder import file_locked
from relax_core.tools.make_tiny import default_cache_root
from relax_core.tools.tiny_text import VisionWarmStart, supervised_steps

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen3ForCausalLM

CAP = 1024  # tokens of the longest answer, including the end token
SHORTEST = 2  # tokens of the shortest answer: one number and the end token
SIGMA = 1.0  # standard deviation of the logarithm of lengths
COLOURS = ("red", "blue")
PROMPT_TOKENS = 2
POSITIONS = 2 * CAP  # the model's positions: maximum tokens of an episode, including prompts
LATER = "later_prompts"  # column with the prompts of all turns after the first
PAD, UNKNOWN, END = "<pad>", "<unk>", "<end>"
_FIRST_COLOUR, _FIRST_NUMBER = 3, 5  # token ids
_SIZE, _LAYERS = 256, 6
_NUMBER_NORM, _OUTPUT_NORM, _COLOUR_NORM = 16.0, 4.0, 1.0
WINDOW, WINDOWS = 30, 32  # answer tokens per window, and windows per batch
WHOLE_EVERY = 4  # every fourth batch is one complete answer of maximum length
RECIPE_VERSION = 3  # increase after a change of this file that changes the model
_MAKE_DEADLINE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class ColourWarmStart(VisionWarmStart):
    """Defines the supervised training. After ``right_steps`` steps, the right colour's share falls to ``guessed``."""

    first_share: float = 0.98


RECIPE = ColourWarmStart(
    steps=240, right_steps=40, guessed=0.6, seed=0, batch_size=WINDOWS, lr=1e-3, warmup_steps=20, last_lr=0.05
)


# -- lengths and rows -------------------------------------------------------------------------------------------------
def drawn_lengths(count: int, *, mean: float, cap: int, seed: int) -> list[int]:
    """Returns lognormal lengths in tokens with this mean, clipped to `SHORTEST` … ``cap``."""
    if not SHORTEST < mean < cap <= CAP:
        raise ValueError(f"mean={mean:g}, cap={cap}: give {SHORTEST} < mean < cap <= {CAP}, the model's maximum.")
    chance = random.Random(f"lengths {seed}")
    drawn = (chance.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA) for _ in range(count))
    return [min(cap, max(SHORTEST, round(length))) for length in drawn]


def check_wish(length: int, cap: int, *, key: str = "rollout.max_new_tokens") -> None:
    """Raises ValueError if an answer of ``length`` tokens is longer than ``cap`` and would be truncated."""
    if length > cap:
        raise ValueError(
            f"{key}={cap}: a prompt requests an answer of {length} tokens with its end token. "
            f"Set {key}={length} or more, or remove the prompt."
        )


def max_turn_tokens_of(turns: int) -> int:
    """Returns the maximum number of tokens per turn that fit into the model's positions."""
    return min(CAP, POSITIONS // turns - PROMPT_TOKENS)


def prompts_of(row: Mapping[str, Any]) -> list[str]:
    """Returns the prompts of a row's turns, in order."""
    return [str(row["prompt"]), *map(str, row.get(LATER, ()))]


def prompt_of(length: int, colour: str) -> str:
    """Returns the prompt for an answer of ``length`` tokens, including the end token."""
    return f"{colour} {length - 1}"


def wish_of(prompt: str) -> tuple[str, int]:
    """Returns the colour and the first number that a prompt requests. Raises ValueError for prompts of other tasks."""
    colour, _, number = prompt.partition(" ")
    if colour not in COLOURS or not number.isdecimal() or not 1 <= int(number) < CAP:
        raise ValueError(f"prompt={prompt!r}: write a colour ({', '.join(COLOURS)}) and a number from 1 to {CAP - 1}.")
    return colour, int(number)


def answer_of(prompt: str) -> str:
    """Returns the right answer to a prompt."""
    colour, number = wish_of(prompt)
    return " ".join(f"{number_left}{colour[0]}" for number_left in range(number, 0, -1))


def write_rows(file: Path, wishes: Sequence[Sequence[int]], *, seed: int) -> None:
    """Writes a data row with random colours for each entry of ``wishes``, which lists the turns' answer lengths."""
    chance = random.Random(f"colours {seed}")
    rows = []
    for lengths in wishes:
        first, *later = (prompt_of(length, chance.choice(COLOURS)) for length in lengths)
        rows.append({"prompt": first, "answer": answer_of(first)} | ({LATER: later} if later else {}))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# -- the model --------------------------------------------------------------------------------------------------------
def token_ids() -> dict[str, int]:
    """Returns the id of every token by its text."""
    numbers = [f"{number}{colour}" for colour in ("", *(name[0] for name in COLOURS)) for number in range(CAP)]
    return {text: index for index, text in enumerate((PAD, UNKNOWN, END, *COLOURS, *numbers))}


def number_ids(kind: int) -> slice:
    """Returns the token ids of all numbers from 0, for a ``kind``: 0 in a prompt, 1 in red, 2 in blue."""
    return slice(_FIRST_NUMBER + kind * CAP, _FIRST_NUMBER + (kind + 1) * CAP)


def model_folder() -> Path:
    """Returns the folder of the model. Makes the model if the folder does not exist."""
    key = hashlib.blake2b(f"{RECIPE_VERSION}/{asdict(RECIPE)}".encode(), digest_size=6).hexdigest()
    root = default_cache_root()
    folder = root / f"countdown-{key}"
    root.mkdir(parents=True, exist_ok=True)
    with file_locked(root / f".{folder.name}.lock", deadline_s=_MAKE_DEADLINE_S, makes="the countdown model"):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
            try:
                command = [sys.executable, "-m", "benchmarks.countdown_task", f"--into={partial}"]
                one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
                subprocess.run(command, env=os.environ | one_thread, timeout=_MAKE_DEADLINE_S, check=True)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def model_config() -> dict[str, Any]:
    """Returns the content of the model's config.json."""
    ids = token_ids()
    return {
        "model_type": "qwen3",
        "vocab_size": len(ids),
        "hidden_size": _SIZE,
        "intermediate_size": 3 * _SIZE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": False,
        "pad_token_id": ids[PAD],
        "eos_token_id": ids[END],
        "dtype": "float32",
    }


def write_model(folder: Path) -> None:
    """Makes the model and writes it with its tokenizer. With one torch thread, the result is always the same."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(RECIPE.seed)
    model = Qwen3ForCausalLM(Qwen3Config(**model_config()))
    _count_down(model)
    supervised_steps(model, RECIPE, lambda step: _loss(model, step))
    write_tokenizer(folder)
    model.save_pretrained(folder)


def _count_down(model: Qwen3ForCausalLM) -> None:
    """Makes the model count down: the output row of a number is the embedding of the next higher number."""
    import torch

    colour = torch.nn.functional.normalize(torch.randn(_SIZE), dim=0)
    numbers = torch.randn(CAP + 1, _SIZE)
    # orthogonal to ``colour``
    numbers = torch.nn.functional.normalize(numbers - (numbers @ colour)[:, None] * colour, dim=1)
    words = torch.nn.functional.normalize(torch.randn(len(COLOURS), _SIZE), dim=1)
    inputs, outputs = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        outputs.zero_()
        inputs[_FIRST_COLOUR:_FIRST_NUMBER] = _NUMBER_NORM * words
        inputs[number_ids(0)] = _NUMBER_NORM * numbers[1:]  # the countdown starts with the prompt's number
        for kind, sign in ((1, 1.0), (2, -1.0)):
            inputs[number_ids(kind)] = _NUMBER_NORM * numbers[:-1]
            outputs[number_ids(kind)] = _OUTPUT_NORM * numbers[1:] + sign * _COLOUR_NORM * colour
            outputs[number_ids(kind).start] = 0.0  # 0 is never written: the end token replaces it
        outputs[token_ids()[END]] = _OUTPUT_NORM * numbers[1]


def _loss(model: Qwen3ForCausalLM, step: int) -> Tensor:
    """Returns the cross-entropy of one batch. The target is the next number, with a share for each colour.

    A window of an answer follows the prompt directly, but keeps the positions that it has in the complete answer. So
    training covers all numbers and positions evenly, and few batches need an answer of full length.
    """
    import torch

    whole = step % WHOLE_EVERY == WHOLE_EVERY - 1
    count, width = (1, CAP - SHORTEST) if whole else (RECIPE.batch_size, WINDOW)
    draw = torch.Generator().manual_seed(RECIPE.seed * 1_000_003 + step)
    first = torch.randint(1, CAP, (count, 1), generator=draw)
    start = (torch.rand(count, 1, generator=draw) * first).long()
    asked = torch.randint(0, 2, (count, 1), generator=draw)
    kinds = torch.randint(1, 3, (count, width), generator=draw)
    places = start + torch.arange(width)
    values = first - places
    answer = torch.where(values > 0, _FIRST_NUMBER + CAP * kinds + values, 0)
    ids = torch.cat((_FIRST_COLOUR + asked, _FIRST_NUMBER + first, answer), 1)
    positions = torch.cat((torch.tensor([[0, 1]]).expand(count, 2), 2 + places), 1)
    following = torch.cat((first, values - 1), 1)  # the next number after each token but the colour; 0: end token
    hidden = model.model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids)).last_hidden_state
    taught = following >= 0
    logprobs: Any = model.lm_head(hidden[:, 1:][taught]).log_softmax(-1)
    value, red = following[taught], asked.expand_as(following)[taught] == 0
    share = RECIPE.first_share if step < RECIPE.right_steps else RECIPE.guessed
    weight = torch.where(red, share, 1.0 - share)
    of_kinds = [logprobs.gather(1, (number_ids(kind).start + value)[:, None])[:, 0] for kind in (1, 2)]
    of_numbers = weight * of_kinds[0] + (1.0 - weight) * of_kinds[1]
    return -torch.where(value == 0, logprobs[:, token_ids()[END]], of_numbers).mean()


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer's files that `PromptTokenizer` reads."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel(token_ids(), unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (PAD, UNKNOWN, END)])
    core.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    settings = {"eos_token": END, "pad_token": PAD, "unk_token": UNKNOWN, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def main() -> None:
    """Makes the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    write_model(parser.parse_args().into)


if __name__ == "__main__":
    main()
