"""The GPU check: its report, its end without a GPU, and the parts that need no run, on CPU tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import CHECKS, Given, Line, PartFailed, missing_package, report, run_checks
from relax_core.config.choices import GpuName
from relax_core.plan.gpu_models import find_gpu_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", GpuName.h100),
        ("NVIDIA H200", GpuName.h200),
        ("NVIDIA A100-SXM4-80GB", GpuName.a100),
        ("NVIDIA L40S", GpuName.l40s),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090", GpuName.rtx_4090),
        ("NVIDIA RTX A6000", GpuName.a6000),
        ("NVIDIA GB200", GpuName.gb200),
    ],
)
def test_the_name_of_a_device_is_its_model(device: str, name: GpuName | None) -> None:
    assert find_gpu_model(device) is name


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_ends_with_a_fix(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--report", str(tmp_path / "report")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "--device=gpu_branch_on_cpu" in done.stderr
    assert not (tmp_path / "report").exists()


def test_a_part_that_fails_costs_only_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(given: Given):
        yield Line(check="run", what="first", found="1", wanted="2", ok=True)
        raise PartFailed("it hung")

    def holds(given: Given):
        yield Line(check="gap", what="a number", found="3")

    monkeypatch.setattr(gpu_check, "CHECKS", {"run": fails, "gap": holds})
    monkeypatch.setattr(Given, "part", lambda self, name, device=None: {})
    lines = run_checks(Given(device="gpu_branch_on_cpu", folder=tmp_path, until=0.0), ["run", "gap"])
    assert [(line.check, line.ok) for line in lines] == [("run", True), ("run", False), ("gap", None)]
    found = report(lines, {"gpu": "none", "torch": "x"}, device="gpu_branch_on_cpu", seconds=1.0)
    assert "no GPU" in found["summary"] and "1 of 2" in found["summary"]
    assert all(len(row) == len(found["columns"]) for row in found["rows"])


def test_a_check_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert missing_package("colocate", "cuda") == "ray"
    assert missing_package("parity", "cuda") is None
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: object() if name == "ray" else None)
    assert missing_package("colocate", "cuda") == "sglang"
    assert missing_package("colocate", "gpu_branch_on_cpu") is None
    assert set(gpu_check.NEEDS) <= set(CHECKS)


@pytest.mark.soak
def test_all_parts_hold_on_cpu_tensors(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "gpu_branch_on_cpu", "--report", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "gpu_check.json").read_text())["lines"]
    assert {line["check"] for line in lines} == set(CHECKS)
