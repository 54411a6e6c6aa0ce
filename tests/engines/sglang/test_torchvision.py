"""Tests that SGLang's environment imports torchvision, with or without torchvision's compiled library."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from relax_core.engines.sglang import sglang_patches
from tests.contracts.engine.harness import ROOT, SGLANG_PYTHON

pytestmark = pytest.mark.sglang
# No CUDA build of torch is available here. This library defines the operators by static initializers, like a loaded
# torchvision. A second definition of an operator calls std::terminate.
OPERATORS = """
#include <torch/library.h>
TORCH_LIBRARY_FRAGMENT(torchvision, library) {
  library.def("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor");
  library.def("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor");
}
"""
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from relax_core.engines.sglang.sglang_patches import after_import, install_on_cpu
if len(sys.argv) > 2:
    after_import("torchvision.extension", lambda module: torch.ops.load_library(sys.argv[2]))
install_on_cpu()
import torchvision
print(torch.ops.torchvision.nms.default._schema, torch.ops.torchvision.qnms.default._schema, sep="\\n")
"""
SCHEMAS = [
    f"torchvision::{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
]


def imported(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(SGLANG_PYTHON), "-c", CHILD, str(ROOT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_operators_that_the_library_lacks_are_defined() -> None:
    """The environment has a CPU build of torch. With it torchvision's compiled library does not load."""
    done = imported()
    assert (done.returncode, done.stdout.splitlines()) == (0, SCHEMAS), done.stderr


def test_operators_that_the_library_defines_are_left_to_it(tmp_path: Path) -> None:
    """The process would end with SIGABRT if both the library and Relax defined them."""
    source, library = tmp_path / "operators.cpp", tmp_path / "operators.so"
    source.write_text(OPERATORS)
    torch = SGLANG_PYTHON.parents[1] / "lib/python3.11/site-packages/torch"
    folders = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", f"-L{torch / 'lib'}"]
    command = ["g++", "-std=c++20", "-shared", "-fPIC", *folders, source, "-o", library, "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, timeout=300)
    done = imported(library)
    assert (done.returncode, done.stdout.splitlines()) == (0, SCHEMAS), done.stderr


def test_the_pinned_torchvision_fits_the_pinned_torch() -> None:
    """Torchvision 0.N is made for torch 2.(N - 15) and has the same patch number."""
    pins = {}
    for name in ("requirements.txt", "requirements-no-deps.txt"):
        for line in (Path(sglang_patches.__file__).parent / "cpu" / name).read_text().splitlines():
            package, _, version = line.partition("==")
            pins[package] = version
    major, minor, patch = map(int, pins["torch"].split("."))
    assert (major, pins["torchvision"]) == (2, f"0.{minor + 15}.{patch}")
