"""Lets unmodified megatron.core run on a CPU, or on another device without CUDA (`relax_core.train.device`).

`install` puts a finder on ``sys.meta_path``. If a process without a CUDA device imports ``megatron.core``, each of its
modules is compiled from its own source after an AST pass (`compile_without_cuda`). The pass replaces CUDA calls and
device names by calls and names of this process's device. The module's ``torch.cuda`` is then `namespace`: one device,
and streams that do nothing. Its matrix products are `matmul`, which is fast in bfloat16 on every CPU. Workarounds for
megatron-core 0.16.1 without CUDA are applied when a module is imported. torch itself is unchanged. On a CUDA device the
finder does nothing.

The pass also removes TensorBoard, which Megatron imports if it is installed: its import takes 0.2 s, and ranks report
to the event log. Compiled code is cached in the user's cache folder under a digest of the source, because the pass
takes about two seconds per process. Tests run it with megatron-core 0.16.1. This module imports torch only when
``megatron.core`` is imported.
"""

from __future__ import annotations

import ast
import contextlib
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
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from relax_core.contracts.private_folder import private_folder, user_cache
from relax_core.train.device import matmul, training_device

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> _Event:
        return self

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _no_context(*args: Any, **kwargs: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


@functools.cache
def namespace() -> ModuleType:
    """Returns this process's stand-in module; names that it lacks (types in annotations) come from ``torch.cuda``."""
    import torch

    own = training_device().torch
    stream = _Stream()
    module = ModuleType("relax_device_namespace")
    members: dict[str, Any] = {
        "current_device": lambda: own,
        "device_count": lambda: 1,
        "is_available": lambda: False,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *args: (0, 0),
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": object,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "stream": _no_context,
        "device": _no_context,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.random.default_generator.manual_seed,
        "default_generators": [torch.random.default_generator],
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "matmul": matmul,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
        "memory_stats": lambda *args: {},
        "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context),
        "random": module,
        "__getattr__": lambda name: getattr(torch.cuda, name),
    }
    members |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed_all"), _nothing)
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _disable_jit_fuser(jit: Any) -> None:
    """Turns off torch.compile, which takes tens of seconds on a CPU, before any module uses its decorator."""
    jit.disable_jit_fuser()


def _cpu_rng_state(tensor_parallel_random: Any) -> None:
    """Makes the RNG tracker, which addresses CUDA generators by index, use the CPU's only generator."""
    import torch

    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(tensor_parallel_random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU" not in record.getMessage()
    )


def _uneven_splits(mappings: Any) -> None:
    """Pads uneven gathers of expert tensor parallelism, because gloo requires equally many tokens on each rank."""
    import torch
    import torch.distributed as dist

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_along_first_dim(
        tensor: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if sizes is None or group.size() == 1:
            return gather(tensor, group, sizes, *args, **kwargs)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_along_first_dim(
        tensor: torch.Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, sizes, *args, **kwargs)
        padded = tensor.new_zeros(len(sizes), max(sizes), *tensor.shape[1:])
        for row, part in zip(padded, tensor.split(sizes), strict=True):
            row[: len(part)] = part
        output = torch.empty_like(padded[0])
        dist.reduce_scatter_tensor(output, padded.flatten(0, 1), group=group)
        return output[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_along_first_dim
    mappings._reduce_scatter_along_first_dim = reduce_scatter_along_first_dim


_AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _disable_jit_fuser,
    "megatron.core.tensor_parallel.random": _cpu_rng_state,
    "megatron.core.tensor_parallel.mappings": _uneven_splits,
}


def _apply_workaround(module: ModuleType) -> None:
    """Applies the workaround of a Megatron module that was just executed, if it has one."""
    workaround = _AFTER_IMPORT.get(module.__name__)
    if workaround is not None:
        workaround(module)


NAMESPACE = "__relax_device_namespace__"  # the name of a module's stand-in for torch.cuda

_LEFT_OUT = "torch.utils.tensorboard"
_TENSORS = ("FloatTensor", "HalfTensor", "BFloat16Tensor")


class _DeviceCalls(ast.NodeTransformer):
    """Replaces CUDA calls and names by calls and names of the torch device type ``target``."""

    def __init__(self, target: str) -> None:
        self._target = target
        prefix = "torch" if target == "cpu" else f"torch.{target}"
        self._strings = {"cuda": target} | {f"torch.cuda.{kind}": f"{prefix}.{kind}" for kind in _TENSORS}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replaces ``torch.cuda`` by the stand-in, and ``x.is_cuda`` by the property of the device."""
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(NAMESPACE, node.ctx), node)
        if node.attr == "is_cuda":
            node.attr = f"is_{self._target}"
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """Replaces ``pin_memory=True``, which needs a GPU, and the device of autocast, which knows no stand-ins."""
        if node.arg == "device_type" and isinstance(node.value, ast.Constant):
            node.value = ast.copy_location(ast.Constant("cpu"), node.value)
            return node
        self.generic_visit(node)
        if node.arg == "pin_memory" and isinstance(node.value, ast.Constant):
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replaces ``x.cuda(...)`` by ``x.to(device)``, and products that return a new tensor by `matmul`."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        if node.func.attr == "cuda":
            node.func.attr = "to"
            node.args, node.keywords = [ast.Constant(self._target)], []
        elif node.func.attr == "matmul" and not node.keywords:
            of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            node.args = node.args if of_torch else [node.func.value, *node.args]
            product = ast.Attribute(ast.Name(NAMESPACE, ast.Load()), "matmul", ast.Load())
            node.func = ast.copy_location(product, node.func)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """Replaces the import of TensorBoard by an ImportError, which Megatron handles."""
        if node.module != _LEFT_OUT:
            return node
        missing = ast.Call(ast.Name("ImportError", ast.Load()), [ast.Constant(f"{_LEFT_OUT} is left out")], [])
        return ast.copy_location(ast.Raise(missing), node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replaces device and tensor type names."""
        if isinstance(node.value, str) and node.value in self._strings:
            return ast.copy_location(ast.Constant(self._strings[node.value]), node)
        return node


def compile_without_cuda(source: bytes, filename: str, *, target: str) -> CodeType:
    """Compiles one module of Megatron for the torch device type ``target``, with the source's line numbers."""
    tree = ast.parse(source, filename)
    if b"cuda" in source or b"pin_memory" in source:
        _DeviceCalls(target).visit(tree)
        ast.fix_missing_locations(tree)
    code = compile(tree, filename, "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME or ~/.cache`` / relax / megatron-<version>-<python tag>."""
    version = importlib.metadata.version("megatron-core")
    return user_cache(f"megatron-{version}-{sys.implementation.cache_tag}")


@functools.cache
def _rules_digest() -> bytes:
    """Returns a digest of the AST pass's source, because changed rules must not reuse old code."""
    return hashlib.blake2b(Path(__file__).read_bytes(), digest_size=16).digest()


@functools.cache
def _code_cache(root: str | None) -> CodeCache:
    """Returns the cache below the user's cache folder ``root``, which is checked once per process."""
    return CodeCache(cache_folder())


@functools.cache
def _check_private(folder: Path) -> None:
    """Raises ValueError if the folder exists and belongs to another user."""
    if folder.exists():
        private_folder(folder, key="XDG_CACHE_HOME")


class CodeCache:
    """Caches compiled modules on disk by source content; writes are atomic, so several processes may share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, source: bytes, filename: str) -> Path:
        """Returns the cache path of a source for this device; tracebacks show the file name, so the key has it."""
        digest = hashlib.blake2b(source, digest_size=16, key=_rules_digest())
        digest.update(f"{training_device().type} {filename}".encode())
        return self.folder / f"{digest.hexdigest()}.marshal"

    def read(self, path: Path) -> CodeType | None:
        """Returns the cached code, or None if there is none.

        Raises ValueError if the folder belongs to another user, because the code would be that user's.
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


class DeviceLoader(SourceFileLoader):
    """Compiles a module through the AST pass and applies the workarounds for megatron-core 0.16.1 without CUDA."""

    def get_code(self, fullname: str) -> CodeType:
        """Returns the module's patched code, from the cache if it is there."""
        source = self.get_data(self.path)
        cache = _code_cache(os.environ.get("XDG_CACHE_HOME"))
        cached = cache.path(source, self.path)
        code = cache.read(cached)
        if code is None:
            code = compile_without_cuda(source, self.path, target=training_device().type)
            cache.write(cached, code)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module with the stand-in for ``torch.cuda`` and applies the workarounds for it."""
        setattr(module, NAMESPACE, namespace())
        with warnings.catch_warnings():
            # Megatron warns in each process that GPU libraries are missing, which is normal on a CPU.
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* (is|are) not installed")
            super().exec_module(module)
        _apply_workaround(module)


class DeviceFinder:
    """Finds ``megatron.core`` as usual and replaces its loader in processes without a CUDA device."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns the module's spec with the loader for this device, or None if the finder does not apply."""
        if name != "megatron.core" and not name.startswith("megatron.core."):
            return None
        if training_device().cuda:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = DeviceLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Puts the finder first; the import of relax_core.train calls it before anything imports ``megatron.core``."""
    assert "megatron.core" not in sys.modules, "import relax_core.train before megatron.core"
    sys.meta_path.insert(0, DeviceFinder)
