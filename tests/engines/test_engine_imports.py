"""Tests that an engine process does not import Ray, transformers or Megatron, because they would slow its start."""

from __future__ import annotations

import subprocess
import sys

from relax_core.engines.embedded.embedded_spec import ROOT


def test_the_engine_process_loads_no_heavy_library() -> None:
    code = (
        "import sys, relax_core.engines.embedded.assembly; "
        "print([name for name in ('ray', 'transformers', 'megatron', 'hydra', 'aiohttp') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.strip() == "[]"


def test_the_client_loads_neither_torch_nor_aiohttp() -> None:
    code = (
        "import sys, relax_core.engines.protocol.engine_client, relax_core.engines.engine_process; "
        "print([name for name in ('torch', 'aiohttp', 'ray') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert found.stdout.strip() == "[]"
