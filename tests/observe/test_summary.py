"""Compares each value of the summary with a value computed by hand from twelve steps."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_core.contracts.bus import BusProgress, LedgerCounts
from relax_core.observe.event_log import RESUMED, RUN, MetricRecord
from relax_core.observe.summary import build_summary, library_versions, write_summary

MakeRecord = Callable[..., MetricRecord]
META = {"outcome": "finished", "wall_s": 30.0, "first_step_s": 12.5, "seed": 3}


def step_values(step: int) -> dict[str, float]:
    """Returns the values of a step. Steps 0-4 are slow (1,000 ms). Steps 5-11 take 40, 50, 40, 50, 40, 80, 40 ms:
    median 40, mean 340/7. Step 10 begins with a checkpoint of 21 ms."""
    step_ms = [1000, 1000, 1000, 1000, 1000, 40, 50, 40, 50, 40, 80, 40][step]
    return {
        "reward": step / 10,
        "exact": step / 20,
        "samples": 4,
        "tokens": 20,
        "step_ms": step_ms,
        "wait_ms": step_ms - 36 - (21 if step == 10 else 0),
        "bus_ms": 3,
        "decode_ms": 1,
        "train_ms": 25,
        "sync_ms": 2,
        "checkpoint_ms": 21 if step == 10 else 0,
        "reward/std": step / 100,
        "reward/min": -step,
        "reward/max": 1.0,
        "response_tokens": 5.0,
        "response_tokens/min": 2 + step,
        "response_tokens/max": 8 + step,
        **{f"response_tokens/p{share}": share / 10 + step for share in (10, 50, 90)},
        "truncated": step / 11,
        "groups_without_signal": 0.25,
        "entropy": 2.0 - step / 10,
        "logprob_gap_max": 1e-6 * (step + 1),
        "logprob_gap_mean": 1e-7 if step < 6 else 4e-7,
        "logprob_gap_tokens": 20 if step < 6 else 10,
    }


def test_figures_of_a_run(make_record: MakeRecord, progress: BusProgress) -> None:
    records = [make_record("eval", 0, exact=0.0, reward=0.25, rows=16)]
    for step in range(12):
        records.append(make_record("actor", step, **step_values(step)))
        records.append(
            make_record("rollout", step, generate_ms=500 if step < 5 else 21 + step, samples=4, version=step)
        )
    metrics = {"exact/low": 0.28, "exact/high": 0.72, "gsm/exact": 0.5}
    records.append(make_record("eval", 12, exact=0.5, reward=0.75, rows=16, bad_rows=2, unscored=1, **metrics))
    summary = build_summary(records, progress=progress, meta=META)
    assert summary["outcome"] == "finished"
    assert summary["steps"] == summary["steps_recorded"] == 12
    assert (summary["wall_s"], summary["first_step_s"]) == (30.0, 12.5)
    assert summary["samples_per_s"] == pytest.approx(100.0)  # 4 samples in 40 ms
    assert summary["tokens_per_s"] == pytest.approx(500.0)
    # means of 0..0.9 and 0.2..1.1; deviation over steps 2..11; minimum and maximum over all steps
    assert summary["reward"] == pytest.approx({"first": 0.45, "last": 0.65, "std": 0.065, "min": -11, "max": 1})
    lengths = {"first": 5, "last": 5, "min": 2, "max": 19, "p10": 7.5, "p50": 11.5, "p90": 15.5}
    assert summary["response_tokens"] == pytest.approx(lengths)
    assert summary["truncated"] == pytest.approx({"first": 4.5 / 11, "last": 6.5 / 11})
    assert summary["groups_without_signal"] == pytest.approx({"first": 0.25, "last": 0.25})
    assert summary["entropy"] == pytest.approx({"first": 1.55, "last": 1.35})
    assert summary["findings"] == [] and summary["records_dropped"] == {}
    assert summary["exact"] == pytest.approx({"first": 0.225, "last": 0.325})
    assert summary["eval"] == [
        {"step": 0, "exact": 0.0, "reward": 0.25, "rows": 16, "bad_rows": 0, "unscored": 0, "figures": {}},
        {"step": 12, "exact": 0.5, "reward": 0.75, "rows": 16, "bad_rows": 2, "unscored": 1, "figures": metrics},
    ]
    assert summary["best"] is None
    assert summary["staleness"] == {"max": 1, "histogram": {"0": 4, "1": 44}}
    assert summary["ledger"] == {
        "issued": 56,
        "trained": 48,
        "dropped": {"stale": 3, "reward timeout": 1},
        "open": 4,
        "lost": 0,
        "trained_twice": 0,
    }
    # 6 steps of 20 tokens at 1e-7, 6 of 10 at 4e-7: (120 + 240)e-7 over 180
    assert summary["logprob_gap"] == pytest.approx({"max": 1.2e-5, "mean": 2e-7, "tokens": 180})
    # means from step 5 on: wait of 4, 14, 4, 14, 4, 23, 4; rollout of 26..32; other = 36 - 3 - 1 - 25 - 2 = 5
    parts = {"wait": 67 / 7, "bus": 3, "logprobs": 0, "decode": 1, "train": 25, "sync": 2, "checkpoint": 3, "other": 5}
    assert summary["step_ms"] == pytest.approx({"total": 340 / 7, **parts, "rollout": 29})
    assert sum(parts.values()) == pytest.approx(340 / 7)
    assert summary["run"] == {"seed": 3}
    assert summary["recoveries"] == []


def test_the_best_evaluation_is_the_first_of_the_highest(make_record: MakeRecord, progress: BusProgress) -> None:
    evaluations = [
        make_record("eval", step, exact=exact, reward=0.0, rows=16) for step, exact in ((0, 0.1), (5, 0.7), (9, 0.7))
    ]
    summary = build_summary(evaluations, progress=progress, meta={**META, "keep_best": "eval/exact"})
    assert summary["best"] == {"metric": "eval/exact", "step": 5, "value": 0.7}
    assert "keep_best" not in summary["run"]


def test_what_the_controller_knows_has_places_of_its_own(make_record: MakeRecord, progress: BusProgress) -> None:
    records = [make_record("actor", step, reward=1.0 if step < 10 else 0.0) for step in range(20)]
    own = {
        "bad_rows": [{"row": "20", "reason": "too_long", "text": "rows.jsonl, line 21: its prompt has 3005 tokens"}],
        "recoveries": [{"tier": 2, "cause": "the bus died", "at_step": 12, "from_step": 10, "seconds": None}],
        "stragglers": [{"kind": "rank", "who": "actor-1", "slower": 0.3}],
        "records_dropped": {"tensorboard": 7},
    }
    summary = build_summary(records, progress=progress, meta={**META, **own})
    assert {name: summary[name] for name in own} == own and summary["run"] == {"seed": 3}
    assert summary["findings"] == ["The reward fell from 1.000 (steps 0 to 9) to 0.000 in the last 10 steps."]


def test_what_a_record_does_not_tell_is_under_other(make_record: MakeRecord, progress: BusProgress) -> None:
    records = []
    for step in range(12):
        values = step_values(step)
        del values["bus_ms"]
        records.append(make_record("actor", step, **values))
    step_ms = build_summary(records, progress=progress, meta=META)["step_ms"]
    assert (step_ms["bus"], step_ms["other"], step_ms["rollout"]) == (0, pytest.approx(8), None)


def test_a_run_that_failed_before_its_first_step_has_nulls(tmp_path: Path) -> None:
    ledger = LedgerCounts(issued=0, trained=0, dropped={}, open=0, lost=0, trained_twice=0)
    progress = BusProgress(
        version=0, admitted=0, in_flight=0, waiting=0, leased=0, credits=0, staleness_histogram={}, ledger=ledger
    )
    meta = {"outcome": "failed: engine 0 did not start", "wall_s": 3.0, "first_step_s": None}
    summary = build_summary([], progress=progress, meta=meta)
    path = write_summary(tmp_path, summary)
    read = json.loads(path.read_text())
    assert path == tmp_path / "summary.json"
    assert read["outcome"] == "failed: engine 0 did not start"
    assert read["samples_per_s"] is None and read["first_step_s"] is None
    assert read["reward"] == dict.fromkeys(("first", "last", "std", "min", "max"))
    assert read["entropy"] == {"first": None, "last": None}
    assert read["staleness"] == {"max": None, "histogram": {}}
    assert read["logprob_gap"] == {"max": None, "mean": None, "tokens": 0}
    assert set(read["step_ms"].values()) == {None}
    assert list(tmp_path.iterdir()) == [path]


def test_steps_that_a_resume_undid_do_not_count(make_record: MakeRecord, progress: BusProgress) -> None:
    records = [make_record("actor", step, reward=0.0) for step in range(6)]
    records += [make_record(RUN, 4, **{RESUMED: 1.0}), make_record("actor", 4, reward=1.0)]
    summary = build_summary(records, progress=progress, meta=META)
    assert summary["steps_recorded"] == 5
    assert summary["reward"]["last"] == pytest.approx(0.2)


def test_nan_is_null_in_the_file(tmp_path: Path, make_record: MakeRecord, progress: BusProgress) -> None:
    summary = build_summary(
        [make_record("actor", 0, reward=float("nan"))], progress=progress, meta=META | {"limit": float("inf")}
    )
    read = json.loads(write_summary(tmp_path, summary).read_text())
    assert read["reward"]["first"] is None and read["run"] == {"seed": 3, "limit": None}


def test_versions_name_every_library() -> None:
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert "relax" in versions
    assert {"ray", "torch", "rich", "msgspec", "megatron-core"} <= set(versions)


def test_the_page_describes_every_field(make_record: MakeRecord, progress: BusProgress) -> None:
    page = (Path(__file__).parents[2] / "docs" / "summary.md").read_text()
    summary = build_summary([], progress=progress, meta=META)
    for key, value in summary.items():
        names = [key] if not isinstance(value, dict) or key in ("run", "versions") else [f"{key}.{n}" for n in value]
        for name in names:
            assert f"`{name}" in page, f"docs/summary.md does not describe {name}"


def test_episodes_of_several_turns(make_record: MakeRecord, progress: BusProgress) -> None:
    """Of four episodes in two batches, three end with a reward. The cached tokens are 50 of 100 and 270 of 300."""
    common = {"turns/p50": 2, "turns/p90": 3, "turns/p99": 3, "restarts": 0, "cut_observations": 0, "engine_s": 0.5}
    common |= {"env_s": 0.1, "tool_calls": 1.0, "failed_calls": 0.0, "agent/requests": 2.5}
    batches = [
        {"samples": 1, "turns": 2, "queue_s": 0.1, "prompt_tokens": 100, "cached_share": 0.5, "ended/env_done": 1.0},
        {"samples": 3, "turns": 4, "queue_s": 0.3, "prompt_tokens": 300, "cached_share": 0.9}
        | {"ended/max_turns": 2 / 3, "ended/env_failed": 1 / 3},
    ]
    records = [make_record("rollout", step, **common, **values) for step, values in enumerate(batches)]
    episodes = build_summary(records, progress=progress, meta=META)["episodes"]
    assert episodes["ended"] == pytest.approx({"env_done": 0.25, "env_failed": 0.25, "max_turns": 0.5})
    assert (episodes["turns"], episodes["turns_p99"]) == (3.5, 3.0)
    assert episodes["given_up"] == pytest.approx(0.25) and episodes["queue_s"] == pytest.approx(0.25)
    assert episodes["cached_share"] == pytest.approx(0.8) and episodes["engine_s"] == 0.5
    assert episodes["agent"] == {"requests": 2.5}
