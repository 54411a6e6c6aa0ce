"""Compares the results of a run's rewards and judges in the summary and the panel with values computed by hand."""

from __future__ import annotations

import pytest

from relax_core.contracts.bus import ModalityCounts
from relax_core.observe.summary import judge_results, modality_results, panel_lines, reward_results, unfair_shares

FIRST = {
    "reward/math/answers": 30.0,
    "reward/math/mean": 0.5,
    "reward/math/none": 0.0,
    "reward/math/ms_p50": 2.0,
    "reward/math/ms_p99": 10.0,
    "judge/main/queue": 3.0,
    "judge/main/verdicts": 10.0,
    "judge/main/none": 0.1,
    "judge/main/ms_p50": 40.0,
    "judge/main/ms_p99": 90.0,
    "judge/main/texts": 12.0,
    "judge/main/tokens": 1200.0,
    "judge/main/unreadable": 0.25,
}
SECOND = {
    "reward/math/answers": 10.0,
    "reward/math/mean": 1.0,
    "reward/math/none": 0.4,
    "reward/math/none/timeout": 0.3,
    "reward/math/none/raised": 0.1,
    "reward/math/ms_p50": 4.0,
    "reward/math/ms_p99": 1000.0,
    "judge/main/queue": 5.0,
    "judge/main/verdicts": 0.0,
}


def test_the_summary_has_each_reward_and_each_judge() -> None:
    found = reward_results([FIRST, {"samples": 4.0}, SECOND])
    math = found["math"]
    assert math.pop("none_by") == pytest.approx({"raised": 0.025, "timeout": 0.075})
    # The second batch has 6 answers with a reward, so the mean is (30 * 0.5 + 6 * 1.0) / 36.
    assert math == pytest.approx({"answers": 40, "mean": 21 / 36, "none": 0.1, "ms_p50": 2.5, "ms_p99": 257.5})
    judges = judge_results([FIRST, SECOND])
    assert judges == {
        "main": {
            "verdicts": 10,
            "none": 0.1,
            "unreadable": 0.25,
            "tokens": 1200,
            "queue_max": 5,
            "ms_p50": 40.0,
            "ms_p99": 90.0,
        }
    }
    assert reward_results([{"samples": 4.0}]) == {} and judge_results([{"samples": 4.0}]) == {}


def test_the_panel_tells_what_is_missing() -> None:
    assert dict(panel_lines(SECOND)) == {
        "rewards": "math 1.000, 30% timeout, 10% raised, p99 1,000.0 ms",
        "judges": "main 0 verdicts, 5 wait",
    }
    assert dict(panel_lines(FIRST))["judges"] == "main 10 verdicts, 3 wait, 25% unreadable, 1,200 tokens"
    alone = {key: value for key, value in FIRST.items() if key.startswith("reward/")}
    assert dict(panel_lines(alone)) == {}, "a single reward without a failure has no line of its own"
    none = {"reward/f1/answers": 1.0, "reward/f1/none": 1.0, "reward/f1/none/raised": 1.0, "reward/f1/ms_p99": 1.0}
    assert dict(panel_lines(none)) == {"rewards": "f1 none, 100% raised, p99 1.0 ms"}


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
        "Modality video is 25.0% of the issued samples and 6.7% of the trained samples (dropped: 20 over_sampled). "
        "data.mix keeps its share."
    )
    assert text.startswith("Modality text is 75.0% of the issued samples and 93.3% of the trained samples")
