"""Tests the names of modalities and the order in which `MixOrder` assigns rows to them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.config.modality import MODALITIES, MixOrder, kinds_of, modality_of, modality_of_row
from relax_core.contracts.data import BadRow
from relax_core.contracts.media import MediaError, MediaSource


@st.composite
def mixes(draw: st.DrawFn) -> dict[str, float]:
    """Draws shares in hundredths for one to four modalities. They sum to 1."""
    names = draw(st.lists(st.sampled_from(MODALITIES), min_size=1, max_size=4, unique=True))
    cuts = draw(st.lists(st.integers(1, 99), min_size=len(names) - 1, max_size=len(names) - 1, unique=True))
    ends = [0, *sorted(cuts), 100]
    return {name: (end - start) / 100 for name, start, end in zip(names, ends, ends[1:], strict=False)}


@given(mix=mixes(), places=st.integers(0, 250))
def test_any_number_of_places_has_the_shares(mix: dict[str, float], places: int) -> None:
    order = MixOrder(mix)
    dealt = Counter(order.at(index)[0] for index in range(places))
    for name, share in mix.items():
        assert dealt[name] == order.count(name, places)
        assert abs(dealt[name] - share * places) < len(mix)
    if places >= 100:
        assert {name: order.count(name, 100) for name in mix} == {name: round(100 * mix[name]) for name in mix}


@given(mix=mixes())
def test_a_place_and_its_number_in_its_modality_belong_together(mix: dict[str, float]) -> None:
    order, seen = MixOrder(mix), Counter[str]()
    for index in range(230):
        modality, number = order.at(index)
        assert number == seen[modality] and order.index(modality, number) == index
        seen[modality] += 1


def test_equal_shares_in_any_order_of_the_keys_are_one_order() -> None:
    first, second = MixOrder({"video": 0.25, "text": 0.75}), MixOrder({"text": 0.75, "video": 0.25})
    assert [first.at(index) for index in range(8)] == [second.at(index) for index in range(8)]
    assert [first.at(index)[0] for index in range(4)].count("video") == 1


def test_a_modality_is_named_by_the_kinds_of_its_media() -> None:
    assert modality_of([]) == "text" and modality_of(["audio", "image", "audio"]) == "image_audio"
    assert [modality_of(kinds_of(name)) for name in MODALITIES] == list(MODALITIES)
    part = {"type": "video", "video": MediaSource(kind="video", path="a.mp4")}
    row = {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}], "answer": ""}
    assert modality_of_row(row) == "video" and modality_of_row({"prompt": "?", "answer": ""}) == "text"
    assert modality_of_row(MediaError("audio", "placeholder_count", "")) == "audio"
    assert modality_of_row(BadRow.because("prompt", "")) == "text"


@pytest.mark.parametrize("share", [1 / 3, 0.001])
def test_shares_that_no_short_block_holds_are_exact_to_a_thousandth(share: float) -> None:
    order = MixOrder({"video": share, "text": 1 - share})
    assert abs(order.count("video", 100_000) / 100_000 - share) <= 0.001
