"""Tests the device loader without CUDA: the patched source, its cache, and several processes at once."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.train.megatron_without_cuda import NAMESPACE, CodeCache, compile_without_cuda, namespace

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the loader does nothing")

SCRIPT = """
import sys, relax_core.train, torch
from megatron.core import parallel_state, utils
from megatron.core.optimizer import get_megatron_optimizer
import megatron.core.transformer.mlp
print(type(megatron.core.__loader__).__name__, torch.cuda.is_available(), "transformers" in sys.modules)
"""


def start(cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> None:
    output, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    assert output.strip() == "DeviceLoader False False"
    assert "not installed" not in error


def test_processes_share_a_cache(tmp_path: Path) -> None:
    for process in [start(tmp_path) for _ in range(2)]:
        finish(process)
    (folder,) = (tmp_path / "relax").iterdir()
    assert folder.name.startswith("megatron-")
    files = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(files) > 50
    assert all(path.suffix == ".marshal" for path in files)
    for path in list(files)[:5]:
        marshal.loads(path.read_bytes())
    finish(start(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == files


def test_the_cache_is_keyed_by_content(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path)
    path, other_path = cache.path(b"a = 1", "a.py"), cache.path(b"a = 2", "a.py")
    assert path != other_path
    assert path != cache.path(b"a = 1", "b.py")
    assert cache.read(path) is None
    cache.write(path, compile_without_cuda(b"a = 1", "a.py", target="cpu"))
    code = cache.read(path)
    assert code is not None
    scope: dict[str, int] = {}
    exec(code, scope)
    assert scope["a"] == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".marshal"]


def test_an_unwritable_cache_only_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = CodeCache(blocked / "cache")
    cache.write(blocked / "cache" / "x.marshal", compile_without_cuda(b"a = 1", "a.py", target="cpu"))
    assert "compiled Megatron code is not cached" in caplog.text


def test_patching_cuda_calls() -> None:
    source = b"""
import torch
device = torch.cuda.current_device()
x = torch.empty(2, device="cuda", pin_memory=True).cuda(non_blocking=True)
kind = x.is_cuda
message = "cuda stays in longer texts"
"""
    scope = {NAMESPACE: namespace()}
    exec(compile_without_cuda(source, "x.py", target="cpu"), scope)
    assert scope["device"] == torch.device("cpu")
    assert scope["x"].device.type == "cpu"
    assert scope["kind"] is True
    assert scope["message"] == "cuda stays in longer texts"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_rounded_once(dtype: torch.dtype) -> None:
    x, w = torch.randn(7, 300).to(dtype), torch.randn(5, 300).to(dtype)
    scope: dict[str, Any] = {NAMESPACE: namespace(), "x": x, "w": w}
    source = b"import torch  # not cuda\na, b = torch.matmul(x, w.t()), x.matmul(w.t())"
    exec(compile_without_cuda(source, "x.py", target="cpu"), scope)
    exact = (x.double() @ w.double().t()).to(dtype)
    for product in (scope["a"], scope["b"]):
        assert product.dtype == dtype
        torch.testing.assert_close(product, exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
