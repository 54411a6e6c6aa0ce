"""Lets unmodified megatron.core run on a CPU if there is no CUDA.

`install` puts a finder on ``sys.meta_path``. If ``megatron.core`` is imported on a machine without CUDA, each of its
modules is compiled from its own source after an AST pass (patch_cuda_calls.py). torch itself is unchanged. With CUDA
the finder does nothing. Compiled code is cached in the user's cache folder under a digest of the source, because the
pass takes about two seconds a process. Tests run it with megatron-core 0.16.1.
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

from relax_core.contracts.host.private_folder import private_folder, user_cache

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@functools.cache
def has_cuda() -> bool:
    """Returns True if this process trains on a GPU; it imports torch."""
    import torch

    return torch.cuda.is_available()


def wait_for_passes() -> None:
    """Waits until the GPU has done the passes that this thread gave it; on a CPU they are done.

    The time of a rank's passes is then its own, and not part of the first wait for the other ranks.
    """
    if has_cuda():
        import torch

        torch.cuda.current_stream().synchronize()


def training_device() -> torch.device:
    """Returns the device of the parameters: this process's current CUDA device, or the CPU."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def cache_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME or ~/.cache`` / relax / megatron-<version>-<python tag>."""
    version = importlib.metadata.version("megatron-core")
    return user_cache(f"megatron-{version}-{sys.implementation.cache_tag}")


@functools.cache
def _rules_digest() -> bytes:
    """Returns a digest of the AST pass's own source, so that changed rules do not find old code."""
    from relax_core.train.megatron_on_cpu import patch_cuda_calls as patch_cuda_calls

    return hashlib.blake2b(Path(patch_cuda_calls.__file__).read_bytes(), digest_size=16).digest()


@functools.cache
def _code_cache(root: str | None) -> CodeCache:
    """Returns the cache below the user's cache folder ``root``, which is checked once a process."""
    return CodeCache(cache_folder())


@functools.cache
def _check_private(folder: Path) -> None:
    """Raises ValueError if the folder is there and belongs to another user."""
    if folder.exists():
        private_folder(folder, key="XDG_CACHE_HOME")


class CodeCache:
    """Caches compiled modules on disk by source content; files appear complete, so several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, source: bytes, filename: str) -> Path:
        """Returns the cache path of a source; the file name is part of the key, because tracebacks show it."""
        digest = hashlib.blake2b(source, digest_size=16, key=_rules_digest())
        digest.update(filename.encode())
        return self.folder / f"{digest.hexdigest()}.marshal"

    def read(self, path: Path) -> CodeType | None:
        """Returns the cached code, or None if there is none.

        Raises ValueError if the folder belongs to another user, whose code it would be.
        """
        try:
            _check_private(self.folder)
            payload = path.read_bytes()
        except FileNotFoundError:
            return None
        code = marshal.loads(payload)
        assert isinstance(code, CodeType)
        return code

    def write(self, path: Path, code: CodeType) -> None:
        """Caches code; a cache that cannot be written (full disk, read-only home) only makes each start slower."""
        try:
            private_folder(self.folder, key="XDG_CACHE_HOME")
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
    """Compiles a module through the AST pass and works around what megatron-core 0.16.1 gets wrong on a CPU."""

    def get_code(self, fullname: str) -> CodeType:
        """Returns the module's patched code, from the cache if it is there."""
        from relax_core.train.megatron_on_cpu import patch_cuda_calls as patch_cuda_calls

        source = self.get_data(self.path)
        cache = _code_cache(os.environ.get("XDG_CACHE_HOME"))
        cached = cache.path(source, self.path)
        code = cache.read(cached)
        if code is None:
            code = patch_cuda_calls.compile_for_cpu(source, self.path)
            cache.write(cached, code)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module with the CPU stand-in for ``torch.cuda`` and applies the workarounds for it."""
        from relax_core.train.megatron_on_cpu import megatron_workarounds
        from relax_core.train.megatron_on_cpu import patch_cuda_calls as patch_cuda_calls
        from relax_core.train.megatron_on_cpu.cpu_namespace import cpu_namespace

        setattr(module, patch_cuda_calls.NAMESPACE, cpu_namespace())
        with warnings.catch_warnings():
            # Megatron warns in each process that GPU libraries are missing, which is normal on a CPU.
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* (is|are) not installed")
            super().exec_module(module)
        megatron_workarounds.apply(module)


class CpuFinder:
    """Finds ``megatron.core`` as usual and replaces its loader on machines without CUDA."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the module's spec with the loader for a CPU, or None if the finder does not apply."""
        if name != "megatron.core" and not name.startswith("megatron.core."):
            return None
        if has_cuda():
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = CpuLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Puts the finder first; the import of relax_core.train calls it before anything imports ``megatron.core``."""
    assert "megatron.core" not in sys.modules, "import relax_core.train before megatron.core"
    sys.meta_path.insert(0, CpuFinder)
