"""Tests that preparing and writing steps in batches gives the same results as single steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relax_core.engines.embedded.decoder import STEPS_AHEAD, Prefix, SlotTable
from relax_core.engines.embedded.token_sampler import SamplingSettings, sample_keys, uniforms

VOCAB = 50
STOP = 3


def prefix(seed: int, *, new: int, done: int = 0) -> Prefix:
    settings = SamplingSettings(
        max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(STOP,), banned_token_ids=()
    )
    tokens = list(range(10, 10 + done))
    return Prefix(
        token_ids=[5, 6, *tokens],
        settings=settings,
        keys=sample_keys([seed], 1)[0],
        done=tokens,
        done_logprobs=[-0.5] * done,
    )


def table(*prefixes: Prefix) -> SlotTable:
    """Returns a table of these samples. Each sample has the first token 20."""
    found = SlotTable(4, vocab_size=VOCAB)
    found.add(prefixes)
    count = len(prefixes)
    assert not len(found.record_first(0, np.full(count, 20), np.full(count, -1.0, dtype=np.float32)))
    return found


def step(slots: SlotTable, *tokens: int) -> list[int]:
    """Records one step like the decoder. Returns the slots that finish in this step."""
    if not slots.ahead:
        slots.look_ahead()
    slots.draw()
    logprobs = np.array([-token / 100 for token in tokens], dtype=np.float32)
    return slots.record(torch.tensor(tokens), logprobs).tolist()


def test_numbers_are_those_of_each_samples_own_positions() -> None:
    slots = table(prefix(1, new=40), prefix(2, new=60, done=7))
    keys = np.concatenate([sample_keys([seed], 1)[0] for seed in (1, 2)])
    for index in range(2 * STEPS_AHEAD + 3):
        if not slots.ahead:
            slots.look_ahead()
        assert slots.draw().tolist() == uniforms(keys, np.array([1 + index, 8 + index])).tolist()
        slots.record(torch.tensor([20, 20]), np.zeros(2, dtype=np.float32))


@pytest.mark.parametrize("steps", [1, STEPS_AHEAD - 1, STEPS_AHEAD, STEPS_AHEAD + 1, 5 * STEPS_AHEAD])
def test_output_and_length_are_whole_at_any_step(steps: int) -> None:
    slots = table(prefix(1, new=100), prefix(2, new=100, done=3))
    for number in range(steps):
        assert step(slots, 21 + number % 9, 31 + number % 9) == []
        assert (slots.length(0), slots.length(1)) == (2 + number, 5 + number)
        assert slots.newest().tolist() == [1 + number, 4 + number]
    ids, logprobs = slots.output(1)
    assert ids == [10, 11, 12, 20, *(31 + number % 9 for number in range(steps))]
    assert logprobs == pytest.approx([-0.5] * 3 + [-1.0] + [-(31 + number % 9) / 100 for number in range(steps)])
    assert slots.output(0, steps)[0] == [21 + (steps - 1) % 9]
    assert step(slots, 22, 33) == []  # reading has no effect
    assert slots.output(1, steps + 4)[0] == [33]


def test_a_stop_token_and_a_limit_end_a_row_in_their_own_step() -> None:
    slots = table(prefix(1, new=30), prefix(2, new=6), prefix(3, new=30))
    assert step(slots, 21, 22, 23) == []
    assert step(slots, 21, 22, STOP) == [2]
    assert slots.output(2)[0] == [20, 23, STOP]
    assert slots.remove([2]) == []
    assert step(slots, 24, 25) == []
    assert step(slots, 24, 25) == []
    assert step(slots, 24, 25) == [1]
    assert slots.output(1)[0] == [20, 22, 22, 25, 25, 25]


def test_rows_that_come_and_go_between_prepared_steps() -> None:
    slots = table(prefix(1, new=30), prefix(2, new=30))
    step(slots, 21, 31)
    slots.add([prefix(3, new=30)])
    assert slots.record_first(2, np.array([40]), np.array([-2.0], dtype=np.float32)).tolist() == []
    step(slots, 22, 32, 41)
    assert slots.remove([0]) == [(2, 0)]
    step(slots, 42, 33)
    assert slots.output(0) == ([40, 41, 42], pytest.approx([-2.0, -0.41, -0.42]))
    assert slots.output(1)[0] == [20, 31, 32, 33]
    assert slots.position[:2].tolist() == [1 + 3, 1 + 4]
