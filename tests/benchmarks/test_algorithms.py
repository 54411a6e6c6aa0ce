"""Tests `benchmarks.algorithms`: the values of its table, and the continuation of a stopped benchmark."""

from __future__ import annotations

from pathlib import Path

from benchmarks.algorithms import (
    Metrics,
    Run,
    planned,
    read_results,
    run_metrics,
    steps_to,
    table,
    write_result,
)
from benchmarks.harness import FinishedRun
from relax_core.observe.event_log import MetricRecord


def run_of(row: str, seed: int = 0, mode: str = "async") -> Run:
    return Run(row=row, mode=mode, seed=seed, steps=30, overrides=("optimizer.lr=1e-3",))


def some_figures() -> Metrics:
    actor = [
        {"reward": 0.5 if step < 15 else 1.0, "exact": 1.0, "algorithm/clip_low": 0.1, "algorithm/clip_high": 0.2}
        for step in range(30)
    ]
    summary = {"eval": [{"exact": 0.25}, {"exact": 0.75}], "ledger": {"issued": 30, "trained": 20}}
    records = [MetricRecord(source="actor", step=step, time_s=0.0, values=values) for step, values in enumerate(actor)]
    return run_metrics(FinishedRun(summary=summary, records=records))


def test_steps_to_is_the_first_window_that_is_good_enough() -> None:
    values = [0.0] * 10 + [1.0] * 10
    assert steps_to(0.9, values) == 19  # the last ten values are nine 1 and one 0
    assert steps_to(0.9, [1.0] * 10) == 10
    assert steps_to(0.9, [1.0] * 9) is None
    assert steps_to(0.9, [0.89] * 50) is None


def test_figures_and_table() -> None:
    metrics = some_figures()
    unsolved = {name: value for name, value in metrics.items() if name != "steps"}
    assert abs(metrics["cut"] - 0.3) < 1e-9
    done = {
        run_of("grpo", 1): unsolved,
        run_of("grpo", 0): metrics,
        run_of("grpo", mode="colocate"): {**metrics, "exact_after": 0.9},
        run_of("distill"): {**metrics, "teacher": 0.97},
        run_of("gspo", mode="colocate"): metrics,  # all other runs of this row failed
    }
    text = table(done, seeds=2)
    assert "| grpo | 0.50 → 1.00 | 0.25 → 0.75 | 10, — | 0.90 | — | 30.0 % | 1.50 |" in text
    assert "| distill | 0.50 → 1.00 | 0.25 → 0.75 | 10 | — | 0.97 | 30.0 % | 1.50 |" in text
    assert "gspo" not in text
    assert text.startswith("30 train steps of the demo, 2 seeds. With optimizer.lr=1e-3.")


def test_a_stopped_benchmark_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    assert read_results(file) == {}
    runs = list(planned(["grpo", "ppo"], seeds=2, steps=30, overrides=("optimizer.lr=1e-3",)))
    assert [(run.row, run.mode, run.seed) for run in runs] == [
        ("grpo", "async", 0),
        ("ppo", "async", 0),
        ("grpo", "async", 1),
        ("ppo", "async", 1),
        ("grpo", "colocate", 0),
        ("ppo", "colocate", 0),
    ]
    write_result(file, runs[1], some_figures())
    with file.open("a") as out:
        out.write('{"run": {"row": "gr')  # the benchmark was killed in the middle of a line
    assert read_results(file) == {runs[1]: some_figures()}
    write_result(file, runs[0], some_figures())
    assert [run for run in runs if run not in read_results(file)] == runs[2:]
