"""Tests routed experts: the table of slots, SGLang's encoding, and the join of a response from several requests."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from relax_core.contracts.engine import Generated
from relax_core.engines.embedded.decoder import RouteTable
from relax_core.engines.engine_pool import joined
from relax_core.engines.protocol.server_sent_events import read_routed_experts
from tests.responses import response as make_response


def experts(rows: int, *, start: int = 0, layers: int = 2, per_token: int = 2) -> np.ndarray:
    """Returns experts with distinct numbers."""
    size = rows * layers * per_token
    return np.arange(start, start + size, dtype=np.uint16).reshape(rows, layers, per_token)


def test_a_table_keeps_rows_through_growth_and_moves() -> None:
    table = RouteTable(4, layers=2, per_token=2, experts=300)
    assert table.first(3, 0).shape == (0, 2, 2)
    table.put(1, experts(2))
    table.record(np.array([0, 2, 40]), experts(3, start=100))
    assert table.first(1, 3).tolist() == [*experts(2).tolist(), experts(3, start=100)[1].tolist()]
    assert table.first(2, 41)[40].tolist() == experts(3, start=100)[2].tolist()
    table.move([(2, 0), (1, 2)])
    assert table.first(0, 41)[40].tolist() == experts(3, start=100)[2].tolist()
    assert table.first(2, 2).tolist() == experts(2).tolist()
    assert table.dtype == np.uint16


@pytest.mark.parametrize(("last", "dtype"), [(255, np.uint8), (256, np.uint16)])
def test_the_smallest_type_that_holds_them(last: int, dtype: type) -> None:
    numbers = np.array([0, 1, last, 0], dtype="<i4")
    text = base64.b64encode(numbers.tobytes()).decode()
    for found, own in zip(
        read_routed_experts(text, prompt_tokens=1, response_tokens=2), (numbers[:2], numbers[2:]), strict=True
    ):
        assert found.dtype == dtype and not found.flags.writeable and np.array_equal(found, [[own]])


def test_sglangs_text_is_cut_behind_the_prompt() -> None:
    rows = experts(7)
    text = base64.b64encode(rows.astype("<i4").tobytes()).decode()
    prompt, response = read_routed_experts(text, prompt_tokens=5, response_tokens=3)
    assert np.array_equal(prompt.reshape(5, 2, 2), rows[:5])
    assert np.array_equal(response.reshape(2, 2, 2), rows[5:])
    for bad, why in (
        (text[:-1], "base64"),
        (base64.b64encode(b"12345").decode(), "base64"),
        (base64.b64encode(experts(6, layers=1)[:, :, :1].astype("<i4").tobytes()).decode(), "6 numbers"),
        (base64.b64encode((rows.astype("<i4") - 1).tobytes()).decode(), "no experts of 7 tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            read_routed_experts(bad, prompt_tokens=5, response_tokens=3)


def answer(ids: list[int], prompt: np.ndarray | None, response: np.ndarray | None) -> Generated:
    return make_response(ids, versions=1, prompt_experts=prompt, response_experts=response)


def test_a_response_that_went_on_elsewhere_keeps_the_experts_of_its_first_part() -> None:
    first = experts(5)  # prompt of 3, tokens 1 and 2 of 3
    again = experts(6, start=100)  # the same 6 tokens again, prefilled with other weights
    more = experts(1, start=200)  # token 1 of the 2 new tokens
    before, after = answer([1, 2, 3], first[:3], first[3:]), answer([4, 5], again, more)
    whole = joined(before, after)
    assert whole.output_ids.tolist() == [1, 2, 3, 4, 5]
    assert whole.prompt_experts is not None and whole.response_experts is not None
    assert np.array_equal(whole.prompt_experts, first[:3])
    assert np.array_equal(whole.response_experts, np.concatenate([first[3:], again[5:], more]))


def test_a_part_that_never_ran_adds_no_experts() -> None:
    ran, idle = answer([1, 2], experts(3), experts(1, start=50)), answer([], None, None)
    for before, after in ((ran, idle), (idle, ran)):
        whole = joined(before, after)
        assert np.array_equal(whole.prompt_experts, ran.prompt_experts)
        assert np.array_equal(whole.response_experts, ran.response_experts)


def test_tokens_whose_engine_told_no_experts_get_those_of_the_next_prefill() -> None:
    """If SGLang aborts a sample with a cached prompt, the response has tokens but no experts."""
    again, more = experts(6, start=100), experts(1, start=200)  # prompt of 3, tokens 1 to 3; token 4
    last = answer([4, 5], again, more)
    whole = joined(answer([1, 2, 3], None, None), last)
    assert whole.prompt_experts is not None and whole.response_experts is not None
    assert np.array_equal(whole.prompt_experts, again[:3])
    assert np.array_equal(whole.response_experts, np.concatenate([again[3:], more]))

    first = experts(4)  # prompt of 3, token 1 of 2; the engine of token 3 returned no experts
    whole = joined(joined(answer([1, 2], first[:3], first[3:]), answer([3], None, None)), last)
    assert whole.prompt_experts is not None and whole.response_experts is not None
    assert np.array_equal(whole.prompt_experts, first[:3])
    assert np.array_equal(whole.response_experts, np.concatenate([first[3:], again[4:], more]))
