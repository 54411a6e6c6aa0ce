"""Tests `plan=true` like a user: fast, on one machine, without heavy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relax_core.__main__ import main

REPOSITORY = Path(__file__).resolve().parents[2]
SCREEN_LINES = 24


def relax(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relax_core", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )


def test_the_demo_plans() -> None:
    done = relax("plan=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny_qwen3-reverse_digits: can start.")
    for word in ("Services", "Placement", "Batch", "Credits", "Memory", "Sync", "Unread"):
        assert f"\n{word}" in done.stdout


def test_json_is_for_programs() -> None:
    done = relax("plan=json", "experiment=qwen3_4b_async_8gpu")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert values["can_work"] and not values["can_start"]
    assert values["model"]["parameters"] == 4_022_468_096
    assert values["work"]["group_rows"] == 1024 + 8 * 1023


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["rollout.temprature=1"], 2, ("rollout.temprature", "Nearest: rollout.temperature")),
        (["run.steps=many"], 2, ("run.steps=many", "a whole number")),
        (
            ["modality=omni"],
            2,
            ("modality=omni does not exist", "modality=auto"),
        ),
        (["plan=ture"], 2, ("plan=ture", "expected true, json, rehearse, rehearse_json or false")),
        (["rollout.prompts_per_step=10", "parallel.dp=4"], 1, ("rollout.prompts_per_step=10", "multiple of 4")),
        (["algo.group_size=0"], 1, ("algo.group_size=0", "at least one")),
        (["mode=colocate", "mode.max_staleness=2"], 1, ("mode.max_staleness=2", "choose mode=async")),
        (["model=qwen3", "model.path=/nowhere"], 1, ("model.path=/nowhere", "no such folder")),
        (["model=qwen3", "model.shape=Qwen3-4b"], 1, ("model.shape=Qwen3-4b", "Nearest: Qwen3-4B")),
        (["model=qwen3"], 1, ("model.path is not set", "model.shape=<one of")),
        (["data=file", "data.path=/nowhere/rows.jsonl"], 1, ("/nowhere/rows.jsonl", "no such file")),
        (["engine.max_running_samples=1000000000"], 1, ("too little memory", "engine.max_running_samples")),
        (["experiment=qwen3_4b_async_8gpu", "parallel.tp=3"], 1, ("parallel.tp=3", "Use parallel.tp=1, 2 or 4")),
        (
            ["experiment=qwen3_4b_async_8gpu", "placement.gpu_memory_gib=30"],
            1,
            ("placement.gpu_memory_gib=30", "Set parallel.recompute=full."),
        ),
        (
            ["optimizer.states=host"],
            1,
            ("optimizer.states=host with placement.gpus_per_node=0", "Use optimizer.states=device"),
        ),
    ],
)
def test_a_wrong_line_is_told_on_one_screen(
    arguments: list[str], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    returned = main(["plan=true", *arguments])
    output = capsys.readouterr()
    assert returned == code, output
    told = output.err or output.out.split("\nModel ")[0]
    for word in words:
        assert word in told, told
    assert "Traceback" not in output.err
    assert len(told.splitlines()) <= SCREEN_LINES, told


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys; from relax_core.__main__ import main; "
        "code = main(['plan=json', 'experiment=qwen3_4b_async_8gpu']); "
        "heavy = [name for name in ('torch', 'ray', 'transformers', 'megatron') if name in sys.modules]; "
        "print(heavy, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


def test_the_gpu_branch_on_a_cpu_may_have_its_states_on_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELAX_TRAIN_DEVICE", "gpu_branch_on_cpu")
    assert main(["plan=true", "optimizer.states=host"]) == 0
    assert "can start" in capsys.readouterr().out
