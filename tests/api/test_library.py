"""Tests the names that `import relax_core` offers, without a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import relax_core
from relax_core.api.function_reward import FUNCTION_FILE
from relax_core.control.host.run_paths import run_lock
from relax_core.observe.event_log import EventWriter, metric_record, text_record


def test_the_import_is_fast_and_whole() -> None:
    code = (
        "import sys, relax_core; heavy = {'torch', 'ray', 'hydra', 'numpy'} & {*sys.modules}; "
        "[getattr(relax_core, name) for name in relax_core.__all__]; print(heavy, {'torch', 'ray'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "set() set()\n"
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        relax_core.runn  # noqa: B018


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        ("run.steps=1", "give a list"),
        (["-m", "seed=1,2"], "-m: relax_core.run takes key=value"),
        (["demo"], "demo: relax_core.run takes key=value"),
        (["reward=math"], "reward=math with reward=function"),
    ],
)
def test_what_is_no_list_of_overrides_is_refused_at_once(overrides: list[str], reported: str) -> None:
    with pytest.raises(relax_core.ConfigError, match=reported):
        relax_core.run(overrides, reward=lambda given: 1.0)


def test_mistakes_are_typed_and_leave_no_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run's process reports values out of range, a plan, and a reward that returns text."""
    folder = f"run.dir={tmp_path / 'run'}"
    with pytest.raises(relax_core.ConfigError) as error:
        relax_core.run(["optimizer.lr=-1", "seed=-1", folder])
    assert len(error.value.problems) == 2 and any("optimizer.lr=-1" in problem for problem in error.value.problems)
    with pytest.raises(relax_core.ConfigError, match="starts a run"):
        relax_core.run(["plan=true", folder])
    with pytest.raises(relax_core.ConfigError, match=r"<lambda> returned 'yes' of type str"):
        relax_core.run([folder], reward=lambda given: "yes")  # type: ignore[arg-type,return-value]
    assert not (tmp_path / "run").exists()


def test_a_run_at_work_keeps_its_own_function(tmp_path: Path) -> None:
    function = tmp_path / "run" / FUNCTION_FILE
    function.parent.mkdir()
    function.write_text("its own")
    with run_lock(function.parent), pytest.raises(relax_core.ConfigError, match="another run uses it"):
        relax_core.run([f"run.dir={function.parent}", "resume=auto"], reward=lambda given: 1.0)
    assert function.read_text() == "its own"


def test_a_loaded_run_has_its_curves_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="it is not the folder of a run"):
        relax_core.load_run(tmp_path)
    (tmp_path / "config.yaml").touch()
    writer = EventWriter(tmp_path, "actor-0")
    writer.put(
        *[
            metric_record("actor", 0, {"reward": 0.25}),
            metric_record("rollout", 0, {"samples": 8.0}),
            metric_record("actor", 1, {"reward": 0.5}),
            metric_record("run", 1, {"resumed": 1.0}),  # this line undoes the earlier record of step 1
            metric_record("actor", 1, {"reward": 0.75}),
            text_record("eval", 1, [{"prompt": "p", "answer": "a", "response": "r", "exact": False}]),
        ]
    )
    writer.close()
    run = relax_core.load_run(tmp_path)
    assert run.curves() == [
        {"step": 0, "actor/reward": 0.25, "rollout/samples": 8.0},
        {"step": 1, "actor/reward": 0.75},
    ]
    assert run.answers() == [{"step": 1, "prompt": "p", "answer": "a", "response": "r", "exact": False}]
    assert run.summary is None
    (tmp_path / "summary.json").write_text('{"outcome": "finished", "steps": 2}')
    assert run.summary is not None and run.summary.outcome == "finished", "the run has ended since"
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        run.frame("curves")
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=tuple))
    assert run.frame("curves") == tuple(run.curves())
