"""Tests the benchmark harness: rounds, ratios and tables, compared with values computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.harness import Comparison, Metrics, run_records, take_turns, write_report


def test_ratios_are_taken_within_a_round_and_every_other_round_is_reversed(tmp_path: Path) -> None:
    """In the second round the machine is twice as slow. The ratio does not change."""
    calls: list[tuple[str, int]] = []

    def way(name: str, rate: float, number: int) -> Metrics:
        calls.append((name, number))
        return {"samples/s": rate / (1 + max(0, number))}

    ways = {"plain": lambda n: way("plain", 1000.0, n), "ours": lambda n: way("ours", 3000.0, n)}
    found = take_turns("speed", ways, rounds=2)
    assert calls == [("plain", -1), ("ours", -1), ("plain", 0), ("ours", 0), ("ours", 1), ("plain", 1)]
    assert found.ratios("ours", "samples/s", base="plain") == [3.0, 3.0]
    assert found.median("ours", "samples/s") == 2250.0
    assert [line.split("|")[1].strip() for line in found.table().splitlines()[4:]] == ["plain", "ours"]
    write_report(tmp_path / "report.json", found)
    assert json.loads((tmp_path / "report.json").read_text())["speed"]["plain"] == [
        {"samples/s": 1000.0},
        {"samples/s": 500.0},
    ]


def test_a_figure_that_only_some_ways_have_leaves_a_cell_empty() -> None:
    found = Comparison("step", {"run": [{"step": 40.0, "sync": 2.0}], "plain": [{"step": 80.0}]})
    lines = found.table(base="plain", ratio_of=["step"]).splitlines()
    assert lines[4].split("|")[1:-1] == [" run ", " 40 ", " 2 ", " 0.500 (0.500 to 0.500) "]
    assert lines[5].split("|")[1:-1] == [" plain ", " 80 ", "  ", " 1.000 "]
    assert found.ratio("run", "step", base="plain") == pytest.approx(0.5)


def test_the_metrics_of_a_checkout_from_before_the_event_log_are_read(tmp_path: Path) -> None:
    """Current lines of metrics.jsonl have a type; older lines have no type."""
    line = '{%s"source":"actor","step":3,"time_s":1.0,"values":{"samples":8.0,"loss":null}}\n'
    for kind in ("", '"type":"numbers",'):
        (tmp_path / "metrics.jsonl").write_text(line % kind)
        (record,) = run_records(tmp_path)
        assert (record.source, record.step, record.values["samples"]) == ("actor", 3, 8.0)
        assert math.isnan(record.values["loss"])
