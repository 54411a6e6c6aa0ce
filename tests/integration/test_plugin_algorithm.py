"""A newcomer's algorithm: one file outside of the tree, CONTRIBUTING's own example, with a setting of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import run_to_end
from tests.test_contributing import EXAMPLES

pytestmark = pytest.mark.integration


def test_a_file_on_the_command_line_trains(tmp_path: Path) -> None:
    file = tmp_path / "my_reinforce.py"
    file.write_text(EXAMPLES["algorithms/reinforce.py"])
    keys = ("algo=plugin", f"algo.name={file}", "algo.baseline=false", "algo.group_size=8", "mode=colocate")
    short = ("run.steps=8", "eval.every=0", "run.save_every=0", "run.export_hf=false")
    run = run_to_end(tmp_path / "run", *keys, *short)
    assert run.code == 0, run.output
    run.assert_books_closed()
    assert run.summary["ledger"]["trained"] == 8 * 8 * 8
    for values in run.steps():
        # Without the baseline every token's advantage is its sample's reward, and none of them is negative.
        assert values["loss"] > 0.2 and values["grad_norm"] > 0.0
    # The saved configuration has the file and its setting, so that the run can be told and resumed.
    saved = (run.folder / "config.yaml").read_text()
    assert f"name: {file}" in saved and "baseline: false" in saved
