"""Tests the trainer's GPU branch on CPU tensors: every family and kind of parallelism computes what the CPU's does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_branch_ranks import DTYPES, FAMILIES, LAYOUTS
from safetensors.torch import load_file

from relax_core.train.device import training_device
from tests.train.rank_server import run_programme

pytestmark = pytest.mark.skipif(
    training_device().type != "cpu", reason="the ranks run Megatron as it was compiled for this process's device"
)
REACH = {"float32": 5e-6, "bfloat16": 3e-2}  # relative


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("branches")
    run_programme("gpu_branch_ranks.py", path)
    return path


def differences(folder: Path, case: str) -> Iterator[tuple[str, float]]:
    """Yields what was compared, and the GPU branch's difference relative to the CPU branch."""
    cpu, gpu = folder / "cpu" / case, folder / "gpu_branch_on_cpu" / case
    ours, theirs = (json.loads(path.with_suffix(".json").read_text()) for path in (gpu, cpu))
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in expected.items():
            yield f"{name} of step {step}", abs(mine[name] - value) / abs(value)
    weights, expected_weights = (load_file(path.with_suffix(".safetensors")) for path in (gpu, cpu))
    assert weights.keys() == expected_weights.keys()
    for name, tensor in weights.items():
        right = expected_weights[name].double()
        yield name, float((tensor.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*FAMILIES, *LAYOUTS])
def test_the_gpu_branch_computes_what_the_cpu_branch_does(folder: Path, case: str, dtype: str) -> None:
    found = dict(differences(folder, f"{case} {dtype}"))
    beyond = {name: value for name, value in found.items() if not value <= REACH[dtype]}
    assert not beyond
