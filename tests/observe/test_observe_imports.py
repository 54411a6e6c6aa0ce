"""A process that reports imports only the libraries that it uses."""

from __future__ import annotations

import subprocess
import sys

IMPORT_ALL = """
import pkgutil, sys
import relax_core.observe
for module in pkgutil.iter_modules(relax_core.observe.__path__):
    __import__(f"relax_core.observe.{module.name}")
print(sorted({"torch", "ray", "matplotlib", "tensorboard", "transformers", "omegaconf"} & set(sys.modules)))
"""


def test_no_module_imports_a_heavy_library() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"
