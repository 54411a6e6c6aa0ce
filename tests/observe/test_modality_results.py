"""Tests the figures by modality in the summary, and the warning of unequal shares."""

from __future__ import annotations

from relax_core.contracts.bus import ModalityCounts
from relax_core.observe.run_results import modality_results, unfair_shares


def counts(issued: int, trained: int, **dropped: int) -> ModalityCounts:
    return ModalityCounts(issued=issued, trained=trained, dropped=dropped, staleness={0: trained})


def test_a_run_that_issued_text_alone_has_no_figures() -> None:
    assert modality_results({"text": counts(10, 10)}, [], []) == {} == modality_results({}, [], [])


def test_shares_are_of_samples_that_have_an_end_and_means_are_weighted() -> None:
    found = modality_results(
        {"text": counts(80, 60, over_sampled=20), "video": counts(24, 18, over_sampled=2)},
        [
            {"modality/video/reward": 1.0, "modality/video/samples": 3.0},
            {"modality/video/reward": 0.0, "modality/video/samples": 1.0},
        ],
        [{"modality/video/encode_ms": 6.0, "modality/video/encode_prompts": 2.0}, {"encoded": 4.0}],
    )
    assert found["video"]["open"] == 4 and found["video"]["issued_share"] == 0.2
    assert found["video"]["trained_share"] == 18 / 78 and found["video"]["reward"] == 0.75
    assert found["video"]["encode_ms"] == 6.0 and found["video"]["prefill_ms"] is None
    assert found["text"]["reward"] is None and found["text"]["staleness"] == {"0": 60}


def test_more_than_two_points_are_told_with_both_numbers() -> None:
    fair = modality_results({"text": counts(75, 50, x=25), "video": counts(25, 16, over_sampled=9)}, [], [])
    assert list(unfair_shares(fair)) == []
    unfair = modality_results({"text": counts(75, 70, x=5), "video": counts(25, 5, over_sampled=20)}, [], [])
    text, video = unfair_shares(unfair)
    assert video == (
        "Modality video is 25.0% of the issued samples and 6.7% of the trained ones (dropped: 20 over_sampled). "
        "data.mix keeps its share."
    )
    assert text.startswith("Modality text is 75.0% of the issued samples and 93.3% of the trained ones")
