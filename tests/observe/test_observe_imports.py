"""Tests that a process that records metrics imports only the libraries that it uses."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import pkgutil, sys
import relax_core.observe.trackers.tracker_process
assert "numpy" not in sys.modules, "the process of a tracker needs no numpy"
for module in pkgutil.walk_packages(relax_core.observe.__path__, "relax_core.observe."):
    __import__(module.name)
print(sorted({"torch", "ray", "matplotlib", "tensorboard", "transformers", "omegaconf"} & set(sys.modules)))
"""


def test_no_module_imports_a_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
