"""Generated tasks: every example is a pure function of (task, split, seed, index), so the data cursor is one integer.

In a text task, the checksum of a prompt selects one of sixteen slots, and the prompts of one fixed slot are held out.
So with any seed, training rows and evaluation rows are different. Media tasks have separate files for the two splits,
but the same text prompts. The task `SEEDS` has separate numbers for the two splits.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from relax_core.config.choices import SEEDS
from relax_core.config.schema import FOUR_MODALITIES, MEDIA_TASKS, SEE, TONE_OF_PICTURE
from relax_core.contracts.media import MediaSource
from relax_core.data.media_tasks import (
    FILES,
    MAX_ROWS,
    MODALITY_PARTS,
    PARTS,
    TONE_VARIANTS,
    TONES,
    modality_example,
    vision_example,
)

Split = Literal["train", "eval"]

REVERSE_DIGITS, ARITHMETIC, SUMS = "reverse_digits", "arithmetic", "sums"  # the tasks, as data.task names them
REVERSED_DIGITS = 5
_EVAL_SEED = 0  # all run seeds have the same evaluation rows, so two runs can be compared
_HELD_OUT_SLOTS = 16
MAX_SEEDS = 1 << 20  # rows for each run seed; different run seeds have different rows
_FIRST_HELD_OUT_SEED = 9 * 10**15  # beyond the training rows of all run seeds


@dataclass(frozen=True, slots=True)
class Example:
    """Holds a prompt and its reference answer as plain text.

    ``sources`` are the media before the prompt. ``part`` names the part of a task with several parts. ``seed`` is the
    number of a row of the task `SEEDS`; such a row has no further content.
    """

    prompt: str
    answer: str
    sources: tuple[MediaSource, ...] = ()
    part: str = ""
    seed: int | None = None


def _reverse_digits(rng: random.Random) -> Example:
    digits = "".join(str(rng.randrange(10)) for _ in range(REVERSED_DIGITS))
    return Example(f"rev {digits}", digits[::-1])


_NAMES = ("Ann", "Ben", "Eve", "Ian", "Kim", "Leo", "Max", "Sue")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "pens")


def _arithmetic(rng: random.Random) -> Example:
    """Returns a word problem with one operation on small numbers. The answer is in 0..25."""
    name, goods = rng.choice(_NAMES), rng.choice(_THINGS)
    kind = rng.choice(("gain", "loss", "groups"))
    if kind == "gain":
        have, gained = rng.randint(1, 9), rng.randint(1, 9)
        return Example(f"{name} has {have} {goods} and gets {gained} more. How many now?", str(have + gained))
    if kind == "loss":
        have = rng.randint(1, 9)
        lost = rng.randint(1, have)
        return Example(f"{name} has {have} {goods} and loses {lost}. How many now?", str(have - lost))
    boxes, per_box = rng.randint(2, 5), rng.randint(2, 5)
    return Example(f"{name} has {boxes} boxes of {per_box} {goods}. How many {goods}?", str(boxes * per_box))


def _sums(rng: random.Random) -> Example:
    """Returns a sum of two numbers with two digits, phrased as a question to a chat model."""
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    return Example(f"What is {first} + {second}? Reply with just the number.", str(first + second))


_TASKS: dict[str, Callable[[random.Random], Example]] = {
    REVERSE_DIGITS: _reverse_digits,
    ARITHMETIC: _arithmetic,
    SUMS: _sums,
}


_ALL_FILES = {split: count + TONE_VARIANTS[split] * len(TONES) for split, count in FILES.items()}
LONGEST_PROMPT = {REVERSE_DIGITS: 9, ARITHMETIC: 47, SUMS: 44, SEEDS: 21}  # characters
LONGEST_PROMPT |= {name: 14 if name.startswith(TONE_OF_PICTURE) else 13 for name in MEDIA_TASKS}
MEDIA_ROWS = dict.fromkeys(MEDIA_TASKS, MAX_ROWS)  # maximum media rows of a prompt
# Number of files in each split; an example draws its files at random.
MEDIA_FILES = {name: FILES if name.startswith(SEE) else _ALL_FILES for name in MEDIA_TASKS}


def task_names() -> tuple[str, ...]:
    """Returns the names of the tasks."""
    return (*_TASKS, *MEDIA_TASKS, SEEDS)


def parts_of(task: str) -> tuple[str, ...]:
    """Returns the parts of a task that have separate metrics."""
    if task.startswith(SEE):
        return PARTS
    return MODALITY_PARTS if task.startswith(FOUR_MODALITIES) else ()


def check_task(task: str | None) -> None:
    """Raises ValueError for a task that does not exist."""
    if task not in task_names():
        raise ValueError(f"data.task={task!r}: no such generated task. Use one of: {', '.join(task_names())}.")


def example(task: str, *, split: Split, seed: int, index: int) -> Example:
    """Returns example ``index`` of a split.

    Every process gets the same example. The eval split does not depend on ``seed``.
    """
    check_task(task)
    if task == SEEDS:
        number = index + (seed * MAX_SEEDS if split == "train" else _FIRST_HELD_OUT_SEED)
        return Example(f"seed {number:016d}", "", seed=number)
    rng = random.Random(f"{task}/{split}/{seed if split == 'train' else _EVAL_SEED}/{index}")
    media = MEDIA_TASKS.get(task)
    if media is not None and task.startswith(SEE):
        seen = vision_example(split=split, rng=rng, index=index, exchange=bool(media.exchanged))
        return Example(seen.prompt, seen.answer, () if seen.source is None else (seen.source,), seen.part)
    if media is not None:
        shown = modality_example(task, media, split=split, rng=rng, index=index)
        return Example(shown.prompt, shown.answer, shown.sources, shown.part)
    while True:
        drawn = _TASKS[task](rng)
        if _is_held_out(drawn.prompt) == (split == "eval"):
            return drawn


def _is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % _HELD_OUT_SLOTS == 0
