"""Ctrl-C a second time ends a run at once, whatever its trainer is in the middle of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from relax_core.control.signals import AGAIN_S
from tests.integration.live_run import LiveRun

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

ENDLESS_LOSS = """
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from relax_core.registry import find_algorithm

def loss(inputs: Any, knobs: Any) -> NoReturn:
    Path(__file__).with_suffix(".busy").touch()
    while True:
        time.sleep(0.1)

SPEC = replace(find_algorithm("grpo"), name="endless", loss=loss)
"""


def test_a_busy_trainer_is_not_waited_for(tmp_path: Path) -> None:
    plugin = tmp_path / "endless.py"
    plugin.write_text(ENDLESS_LOSS)
    endless = ("algo=plugin", f"algo.name={plugin}", "eval.every=0", "run.stop_timeout_s=600")
    with LiveRun(tmp_path / "run", *endless) as live:
        live.wait_for("the endless step", plugin.with_suffix(".busy").exists)
        live.interrupt()
        live.wait_stop_heard()
        time.sleep(1.5 * AGAIN_S)  # sooner it would be the same Ctrl-C
        live.interrupt()
        run = live.finish(deadline_s=240.0)
    assert run.code == 130, run.output
    assert "ended at once, without a checkpoint" in run.output
