"""Tests the choice of an engine for a prompt: even spread, load, cached prefixes."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from relax_core.contracts.engine import Generated, PromptRequest
from relax_core.contracts.media import Media, MediaItem
from relax_core.engines.engine_pool import LONG_PREFIX, OpenPrompt, Router


def prompt(index: int, *, tokens: int = 8, first: int = 0, cost: float = 100.0) -> OpenPrompt:
    """Returns a prompt. Its tokens from ``first`` on differ from other prompts."""
    ids = [1] * first + [10 + index] * (tokens - first)
    request = PromptRequest(rid="g", input_ids=ids, sampling_seed=0)
    return OpenPrompt(index=index, tie=index, request=request, n=1, cost=cost)


@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 100), st.booleans())
def test_like_prompts_are_spread_evenly_from_the_first_place_on(count: int, n: int, first: int, by_load: bool) -> None:
    chosen = Router(count, by_load=by_load).choose([prompt(first + i) for i in range(n)], usable=range(count))
    assert chosen == [(first + i) % count for i in range(n)]


@given(st.lists(st.floats(1.0, 1000.0), max_size=20), st.integers(2, 4))
def test_no_engine_is_ahead_of_the_lightest_by_more_than_a_prompt(costs: list[float], count: int) -> None:
    prompts = [prompt(index, cost=cost) for index, cost in enumerate(costs)]
    chosen = Router(count, by_load=False).choose(prompts, usable=range(count))
    loads = Counter(dict.fromkeys(range(count), 0.0))
    for engine, routed in zip(chosen, prompts, strict=True):
        loads[engine] += routed.cost
    assert max(loads.values()) - min(loads.values()) <= max(costs, default=0.0) + 1e-6


def test_a_busy_engine_gets_less_and_an_engine_that_is_down_nothing() -> None:
    router = Router(3, by_load=True)
    router.add_load(0, 300.0)
    counts = Counter(router.choose([prompt(i) for i in range(6)], usable=[0, 1, 2]))
    assert counts[0] == 0 and counts[1] == counts[2] == 3
    router.subtract_load(0, 300.0)
    assert Counter(router.choose([prompt(i) for i in range(6)], usable=[0, 1, 2])) == {0: 2, 1: 2, 2: 2}
    router.others(1, 1000.0)
    assert Counter(router.choose([prompt(i) for i in range(6)], usable=[0, 1, 2])) == {0: 3, 2: 3}
    assert Counter(router.choose([prompt(i) for i in range(6)], usable=[1])) == {1: 6}


def test_without_load_only_the_prompt_batch_itself_counts() -> None:
    router = Router(2, by_load=False)
    router.add_load(0, 1e9)
    router.others(0, 1e9)
    assert router.choose([prompt(0), prompt(1)], usable=[0, 1]) == [0, 1]


def test_without_load_what_engines_saw_under_older_weights_does_not_count() -> None:
    """After a resume the router does not know these prefixes, and the engines have dropped them."""

    def batch(version: int) -> list[OpenPrompt]:
        made = [prompt(i, tokens=2 * LONG_PREFIX, first=2 * LONG_PREFIX - 1) for i in range(6)]
        for open_prompt in made:
            open_prompt.request = msgspec.structs.replace(open_prompt.request, min_version=version)
        return made

    resumed = Router(2, by_load=False).choose(batch(2), usable=[0, 1])
    for by_load in (False, True):
        straight = Router(2, by_load=by_load)
        assert straight.choose([batch(1)[1]], usable=[0, 1]) == [1]
        assert (straight.choose(batch(2), usable=[0, 1]) == resumed) == (not by_load)


def test_a_long_common_prefix_stays_where_it_is_known() -> None:
    router = Router(2, by_load=True)
    long = LONG_PREFIX + 40
    (first,) = router.choose([prompt(0, tokens=long, first=LONG_PREFIX)], usable=[0, 1])
    assert first == 0
    # By the tie-breaker 1 engine 1 would be chosen, but engine 0 has the prefix in its cache.
    assert router.choose([prompt(1, tokens=long, first=LONG_PREFIX)], usable=[0, 1]) == [0]
    assert router.choose([prompt(1, tokens=long)], usable=[0, 1]) == [1], "another prefix is routed independently"
    router.add_load(0, 250.0)  # engine 0 is more than one prompt ahead, so engine 1 prefills the prefix again
    assert router.choose([prompt(3, tokens=long, first=LONG_PREFIX)], usable=[0, 1]) == [1]
    spread = Counter(router.choose([prompt(i, tokens=long, first=LONG_PREFIX) for i in range(8)], usable=[0, 1]))
    assert abs(spread[0] - spread[1]) <= 4, "cached at all engines by now, so the load decides"


def test_a_short_prefix_says_nothing() -> None:
    router = Router(2, by_load=True)
    chosen = router.choose([prompt(i, tokens=LONG_PREFIX, first=LONG_PREFIX - 1) for i in range(4)], usable=[0, 1])
    assert chosen == [0, 1, 0, 1]


def finish(router: Router, engine: int, open_prompt: OpenPrompt, answer: list[int]) -> None:
    """Finishes the only response of a prompt at an engine."""
    open_prompt.asked.add(0)
    arrays = [np.array(values) for values in (answer, [0.0] * len(answer), [0] * len(answer))]
    ids, logprobs, versions = arrays
    open_prompt.take(
        Generated(
            rid="g", prompt=0, sample=0, output_ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop"
        )
    )
    router.remember_prefix(engine, open_prompt)


def test_an_episodes_next_turn_goes_where_its_turns_before_were_answered() -> None:
    router = Router(2, by_load=True)
    first = prompt(0, tokens=20)
    assert router.choose([first], usable=[0, 1]) == [0]
    answer = [7] * 130  # the engine has sampled most of the next prompt
    finish(router, 0, first, answer)
    following = PromptRequest(rid="g", input_ids=first.request.input_ids + answer + [5] * 30, sampling_seed=0)
    turn = OpenPrompt(index=1, tie=1, request=following, n=1, cost=100.0)  # the tie-breaker 1 would choose engine 1
    assert router.choose([turn], usable=[0, 1]) == [0]
    router.add_load(0, 100.0)  # the engine's load is higher by this turn
    assert router.choose([turn], usable=[0, 1]) == [0]
    router.add_load(0, 1.0)  # the engine's load is higher by more than this turn
    assert router.choose([turn], usable=[0, 1]) == [1]


def item(digest: str, rows: int) -> MediaItem:
    """Returns an image. All of its rows have the token id 9."""
    ids = np.full(rows, 9, dtype="<i4").tobytes()
    offsets = np.zeros((3, rows), dtype="<i4").tobytes()
    return MediaItem(
        kind="image",
        digest=digest,
        token_ids=ids,
        offsets=offsets,
        advance=1,
        placeholder=[9],
        grid=[1, 2, 2 * rows],
        width=1,
        height=1,
    )


def test_pictures_are_part_of_a_prefix() -> None:
    """Two images with the same question have equal token ids, but different cache entries."""
    router = Router(2, by_load=True)

    def picture(index: int, digest: str) -> OpenPrompt:
        ids = [1] * 8 + [9] * LONG_PREFIX + [2] * 40
        media = [Media(item(digest, LONG_PREFIX), 8, 8 + LONG_PREFIX)]
        request = PromptRequest(rid="g", input_ids=ids, sampling_seed=0, media=media)
        return OpenPrompt(index=index, tie=index, request=request, n=1, cost=100.0)

    assert router.choose([picture(0, "a")], usable=[0, 1]) == [0]
    assert router.choose([picture(1, "a")], usable=[0, 1]) == [0], "its prefix is cached there, though its tie is 1"
    assert router.choose([picture(1, "b")], usable=[0, 1]) == [1]
