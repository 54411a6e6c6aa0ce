"""The device loader: lets unmodified megatron.core run on a CPU where there is no CUDA.

`install` puts a finder on ``sys.meta_path``. When ``megatron.core`` is imported on a machine without CUDA, each of its
modules is compiled from its own source after an AST pass (retarget.py); torch itself stays untouched. With CUDA the
finder does nothing. Compiled code is cached in the user's cache folder, keyed by source content, because the pass
costs about two seconds a process. Read by running, megatron-core 0.16.1.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.metadata
import logging
import marshal
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@functools.cache
def has_cuda() -> bool:
    """Whether this process trains on a GPU. Imports torch."""
    import torch

    return torch.cuda.is_available()


def training_device() -> torch.device:
    """Where parameters live: this process's current CUDA device, else the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME or ~/.cache`` / relax / megatron-<version>-<python tag>."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    version = importlib.metadata.version("megatron-core")
    return Path(root) / "relax" / f"megatron-{version}-{sys.implementation.cache_tag}"


@functools.cache
def _rules_digest() -> bytes:
    """A digest of the AST pass's own source: changed rules must not find old code."""
    from relax_core.train.megatron_on_cpu import patch_cuda_calls as patch_cuda_calls

    return hashlib.blake2b(Path(patch_cuda_calls.__file__).read_bytes(), digest_size=16).digest()


class CodeCache:
    """Compiled modules on disk, one file a source content. Safe with several processes: files appear whole or not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, source: bytes, filename: str) -> Path:
        """The file name is part of the key, because tracebacks show the one in the code object."""
        digest = hashlib.blake2b(source, digest_size=16, key=_rules_digest())
        digest.update(filename.encode())
        return self.folder / f"{digest.hexdigest()}.marshal"

    def read(self, path: Path) -> CodeType | None:
        try:
            payload = path.read_bytes()
        except FileNotFoundError:
            return None
        code = marshal.loads(payload)
        assert isinstance(code, CodeType)
        return code

    def write(self, path: Path, code: CodeType) -> None:
        """A cache that cannot be written (full disk, read-only home) costs time at each start, not the run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".partial", delete=False) as partial:
                try:
                    partial.write(marshal.dumps(code))
                    partial.close()
                    os.replace(partial.name, path)
                except OSError:
                    os.unlink(partial.name)
                    raise
        except OSError as error:
            _warn_once(f"compiled Megatron code is not cached, so every start takes about 2 s longer: {error}")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class CpuLoader(SourceFileLoader):
    """Compiles a module from its source through the AST pass, then mends what 0.16.1 gets wrong on a CPU."""

    def get_code(self, fullname: str) -> CodeType:
        from relax_core.train.megatron_on_cpu import patch_cuda_calls as patch_cuda_calls

        source = self.get_data(self.path)
        cache = CodeCache(cache_folder())
        cached = cache.path(source, self.path)
        code = cache.read(cached)
        if code is None:
            code = patch_cuda_calls.compile_for_cpu(source, self.path)
            cache.write(cached, code)
        return code

    def exec_module(self, module: ModuleType) -> None:
        from relax_core.train.megatron_on_cpu import megatron_workarounds
        from relax_core.train.megatron_on_cpu import patch_cuda_calls as patch_cuda_calls
        from relax_core.train.megatron_on_cpu.cpu_namespace import cpu_namespace

        setattr(module, patch_cuda_calls.NAMESPACE, cpu_namespace())
        with warnings.catch_warnings():
            # Megatron tells each process that the GPU libraries are missing, which on a CPU is no news.
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* (is|are) not installed")
            super().exec_module(module)
        megatron_workarounds.apply(module)


class CpuFinder:
    """Finds ``megatron.core`` as usual and swaps the loader, on machines without CUDA."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "megatron.core" and not name.startswith("megatron.core."):
            return None
        if has_cuda():
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = CpuLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Puts the finder first. Must run before anything imports ``megatron.core``; the package's import does it."""
    assert "megatron.core" not in sys.modules, "import relax_core.train before megatron.core"
    sys.meta_path.insert(0, CpuFinder)
