"""Tests run.epochs: it converts passes over the training rows to train steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.plan.build_plan import make_plan
from relax_core.preflight import CHECKS, settle


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [("1", 1250), ("2", 2500), ("0.5", 625), ("0.0001", 1), ("1.0004", 1251)],
)
def test_steps_follow_from_the_rows(epochs: str, steps: int) -> None:
    config = load_config([f"run.epochs={epochs}"], checks=CHECKS, settle=settle)
    assert config.run.steps == steps
    assert f"run.epochs={float(epochs):g} over 10000 rows, 8 a step, is run.steps={steps}." in make_plan(config).batch


def test_a_length_in_steps_and_in_passes_is_refused() -> None:
    for words in (["run.epochs=3", "run.steps=10"], ["run.steps=10", "+run.epochs=0.5"]):
        with pytest.raises(ConfigError, match=r"run.steps=10 with run.epochs=.* add run.epochs=null"):
            load_config(words)
    assert load_config(["run.epochs=null", "run.steps=10"]).run.steps == 10


def test_files_count_together_without_their_held_out_rows(tmp_path: Path) -> None:
    for name, count in (("a", 100), ("b", 30)):
        rows = "".join(f'{{"prompt": "rev {n}", "answer": "1"}}\n' for n in range(10000, 10000 + count))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    on = ["data=file", f"data.paths=[{tmp_path}/*.jsonl]", "data.eval_size=26", "eval.rows=26"]
    on += ["model.task=reverse_digits", "reward=reverse_digits", "run.epochs=2"]
    assert load_config(on, checks=CHECKS, settle=settle).run.steps == 26  # 104 rows, two passes, steps of eight


def test_without_epochs_steps_are_what_they_are() -> None:
    assert load_config(["run.steps=7"], settle=settle).run.steps == 7


@pytest.mark.parametrize("epochs", ["0", "-1", "nan"])
def test_epochs_that_make_no_sense(epochs: str) -> None:
    with pytest.raises(ConfigError, match=r"run.epochs=.*: must be more than 0. null does not change run.steps"):
        load_config([f"run.epochs={epochs}"], checks=CHECKS, settle=settle)


def test_a_warm_up_longer_than_the_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer.warmup_steps=2000 is more than run.steps=1250"):
        load_config(["run.epochs=1", "optimizer.warmup_steps=2000"], checks=CHECKS, settle=settle)
