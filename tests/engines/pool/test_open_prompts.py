"""Tests a prompt's missing samples: the next request for these samples, and the join of a response from parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.engine import FinishReason, Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.engines.engine_pool import OpenPrompt, cut, joined, prompt_cost
from tests.media_items import image_item
from tests.responses import check_arrays, response

REQUEST = PromptRequest(rid="g", input_ids=[7, 8], sampling_seed=3)


def generated(sample: int, ids: list[int], *, reason: FinishReason, versions: int | list[int] = 0) -> Generated:
    return response(
        ids,
        versions=versions,
        logprobs=[-0.5 * token_id for token_id in ids],
        sample=sample,
        finish_reason=reason,
        kept=KeptTokens.of_lists([[token_id, 99] for token_id in ids], vocab_size=10_000) if ids else None,
    )


def open_prompt(n: int) -> OpenPrompt:
    return OpenPrompt(index=4, tie=4, request=REQUEST, n=n, cost=1.0)


def test_at_first_the_request_goes_out_as_it_is() -> None:
    prompt = open_prompt(3)
    assert prompt.ask(0) == [REQUEST]
    assert prompt.asked == {0, 1, 2}


def test_what_a_lost_engine_owed_is_asked_for_and_nothing_else() -> None:
    prompt = open_prompt(4)
    prompt.ask(0)
    prompt.take(generated(2, [5], reason="stop"))
    assert prompt.lose() == 3
    (again,) = prompt.ask(1)
    assert again.samples == [0, 1, 3] and again.input_ids == [7, 8] and again.generated == 0


def test_aborted_samples_go_on_from_their_own_prefixes() -> None:
    prompt = open_prompt(4)
    prompt.ask(0)
    prompt.take(generated(0, [5, 6], reason="abort"))
    prompt.take(generated(1, [], reason="abort"))  # the sample had not begun
    prompt.take(generated(2, [9], reason="stop"))
    prompt.take(generated(3, [], reason="abort"))
    together, alone = prompt.ask(0)
    assert (together.samples, together.generated, together.input_ids) == ([1, 3], 0, [7, 8])
    assert (alone.samples, alone.generated, alone.input_ids) == ([0], 2, [7, 8, 5, 6])
    prompt.take(generated(0, [7], reason="length", versions=1))
    assert prompt.lose() == 2  # the engine fails; the prefixes are kept, and samples 1 and 3 had no prefix
    prompt.ask(1)
    prompt.take(generated(1, [4], reason="stop"))
    prompt.take(generated(3, [3], reason="stop"))
    assert prompt.missing == 0
    whole = prompt.responses()
    assert [request.sample for request in whole] == [0, 1, 2, 3]
    check_arrays(whole[0], ids=[5, 6, 7], versions=[0, 0, 1])
    assert whole[0].logprobs.tolist() == [-2.5, -3.0, -3.5]
    assert whole[0].finish_reason == "length"


def test_a_prefix_outlives_the_engine_that_was_to_go_on_from_it() -> None:
    prompt = open_prompt(1)
    prompt.ask(0)
    prompt.take(generated(0, [5, 6], reason="abort"))
    prompt.ask(0)
    prompt.lose()
    (again,) = prompt.ask(1)
    assert again.generated == 2 and again.input_ids == [7, 8, 5, 6]


def test_whoever_was_asked_before_the_last_ask_owes_nothing() -> None:
    prompt = open_prompt(1)
    prompt.ask(0)
    first = prompt.ticket
    assert prompt.owed_by(first)
    prompt.take(generated(0, [5], reason="abort"))
    assert not prompt.owed_by(first)
    prompt.ask(0)
    assert prompt.owed_by(prompt.ticket) and not prompt.owed_by(first)


def test_only_aborts_without_a_token_that_nobody_wanted_are_fruitless() -> None:
    prompt = open_prompt(2)

    def abort(ids: list[int], *, excused: bool = False) -> dict[int, int]:
        prompt.ask(0)
        prompt.excused = excused
        prompt.take(generated(0, ids, reason="abort"))
        prompt.lose()
        return dict(prompt.fruitless)

    assert [abort([]), abort([]), abort([], excused=True), abort([])] == [{0: 1}, {0: 2}, {0: 2}, {0: 3}]
    assert abort([5]) == {}
    assert abort([]) == {0: 1}, "a prefix from an earlier request is no progress"


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3), min_size=1, max_size=5))
def test_every_token_keeps_its_version_its_logprob_and_its_set(pieces: list[list[tuple[int, int]]]) -> None:
    """``pieces`` holds for each request the generated (tokens, version) pairs in order."""
    whole: Generated | None = None
    expected: list[int] = []
    for piece in pieces:
        versions = [version for count, version in piece for _ in range(count)]
        part = generated(0, [len(expected) + i for i in range(len(versions))], reason="abort", versions=versions)
        expected += versions
        whole = part if whole is None else joined(whole, part)
    assert whole is not None
    check_arrays(whole, ids=range(len(expected)), versions=expected)
    assert whole.logprobs.tolist() == [-0.5 * position for position in range(len(expected))]
    assert ([] if whole.kept is None else whole.kept.lists()) == [
        sorted({token_id, 99}) for token_id in range(len(expected))
    ]


def test_a_response_that_is_cut_keeps_what_belongs_to_its_first_tokens() -> None:
    short = cut(generated(1, [10, 11, 12, 13, 14], reason="length", versions=[4, 4, 6, 6, 6]), 3)
    check_arrays(short, ids=[10, 11, 12], versions=[4, 4, 6])
    assert short.logprobs.tolist() == [-5.0, -5.5, -6.0]
    assert short.kept is not None and short.kept.lists() == [[10, 99], [11, 99], [12, 99]]


def test_a_prompt_with_a_picture_costs_the_towers_work_too_and_keeps_it_when_it_is_asked_again() -> None:
    item = image_item(2, 3)
    ids = [5, *item.ids.tolist(), 6]
    request = PromptRequest(rid="g", input_ids=ids, sampling_seed=1, media=[Media(item, 1, 7)])
    assert prompt_cost(request, lambda media_item: media_item.patches / 2) == 8 + 12
    prompt = OpenPrompt(index=0, tie=0, request=request, n=1, cost=100.0)
    prompt.ask(0)
    prompt.take(generated(0, [7, 8], reason="abort"))
    (again,) = prompt.ask(1)
    assert (again.input_ids, again.generated, again.media) == ([*ids, 7, 8], 2, request.media)
