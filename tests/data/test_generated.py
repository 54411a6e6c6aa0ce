from __future__ import annotations

import pytest

from relax_core.data.generated import Example, example, task_names
from relax_core.data.media_tasks import WORDS


@pytest.mark.parametrize("task", task_names())
def test_examples_depend_on_seed_and_index_only(task: str) -> None:
    first = [example(task, split="train", seed=3, index=index) for index in range(50)]
    again = [example(task, split="train", seed=3, index=index) for index in reversed(range(50))]
    assert first == again[::-1]
    assert first != [example(task, split="train", seed=4, index=index) for index in range(50)]
    assert len(set(first)) > 30


# The few words of data=see are trained and also held out. They show that a model still copies without images.
WORDS_TO_COPY = {f"say {word}" for word in WORDS}


def shown(task_example: Example) -> str:
    """Returns the content of an example: its files, or its prompt if there are no files."""
    return " ".join(str(source.path) for source in task_example.sources) or task_example.prompt


@pytest.mark.parametrize("task", task_names())
def test_no_training_prompt_is_held_out(task: str) -> None:
    train = {shown(example(task, split="train", seed=seed, index=i)) for seed in range(3) for i in range(700)}
    held_out = {shown(example(task, split="eval", seed=0, index=index)) for index in range(300)}
    train -= WORDS_TO_COPY
    assert not train & held_out
    assert [example(task, split="eval", seed=9, index=1)] == [example(task, split="eval", seed=0, index=1)]


def test_reverse_digits_answers_are_reversed() -> None:
    for index in range(100):
        task_example = example("reverse_digits", split="train", seed=0, index=index)
        word, digits = task_example.prompt.split()
        assert (word, len(digits), task_example.answer) == ("rev", 5, digits[::-1])


def test_arithmetic_answers_are_right() -> None:
    kinds = set()
    for index in range(300):
        task_example = example("arithmetic", split="train", seed=0, index=index)
        first, second = (int(word.strip(".")) for word in task_example.prompt.split() if word.strip(".").isdigit())
        kind = next(word for word in ("more", "loses", "boxes") if word in task_example.prompt)
        kinds.add(kind)
        assert (
            int(task_example.answer) == {"more": first + second, "loses": first - second, "boxes": first * second}[kind]
        )
    assert kinds == {"more", "loses", "boxes"}


def test_seeds_are_the_numbers_of_rows() -> None:
    """Adjacent rows have adjacent numbers. Rows of another seed and held-out rows have different numbers."""
    rows = [example("seeds", split="train", seed=2, index=index).seed for index in range(3)]
    assert rows == [2 * 2**20, 2 * 2**20 + 1, 2 * 2**20 + 2]
    last = example("seeds", split="train", seed=2**31 - 1, index=2**20 - 1).seed
    held_out = example("seeds", split="eval", seed=2, index=0).seed
    assert last is not None and held_out is not None and last < held_out


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match=r"data.task='poetry'.*reverse_digits, arithmetic"):
        example("poetry", split="train", seed=0, index=0)
