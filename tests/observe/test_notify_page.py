"""Checks docs/notify.md: its runs pass the checks, its rules use existing metrics, and every event has a row."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.notify_rules import PRESETS, Rule, number_problem, read_rule
from relax_core.config.schema import EVENTS
from relax_core.preflight import receiver_problems
from tests.observe.metrics_page import rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/notify.md").read_text(encoding="utf-8")
METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
LINES = [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]


def test_the_file_of_the_page_is_taken_by_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-c", LINES[0]], check=True, timeout=60)
    runs = [line.removeprefix("python -m relax_core ") for line in LINES if line.startswith("python -m relax_core ")]
    assert len(runs) == 2
    for run in runs:
        assert list(receiver_problems(load_config(shlex.split(run)))) == []


def test_every_rule_is_one_on_a_number_that_a_run_has() -> None:
    rules: list[Rule] = [read_rule(line.split("#")[0]) for line in LINES if " for " in line and "python" not in line]
    assert len(rules) == 3
    rules += [read_rule(words) for texts in PRESETS.values() for words in texts]
    assert [rule.number for rule in rules if f"`{rule.number}`" not in METRICS] == []


def test_each_number_of_the_page_of_metrics_may_have_a_rule_and_others_are_refused() -> None:
    tags = [re.sub(r"<k>", "4", tag).replace("<role>", "critic") for tag, _, _ in rows()]
    assert [tag for tag in tags if number_problem(re.sub(r"<\w+>", "x", tag)) is not None] == []
    for wrong in ("actor/rewrad", "actr/reward", "eval/exactly", "rollout/turn", "reward/mean", "critic/loss"):
        assert number_problem(wrong) is not None


def test_every_event_and_every_named_rule_has_its_row() -> None:
    rows = " ".join(re.findall(r"^\| (.*?) \|", PAGE, flags=re.MULTILINE))
    assert [name for name in (*EVENTS, *PRESETS) if f"`{name}`" not in rows] == []
