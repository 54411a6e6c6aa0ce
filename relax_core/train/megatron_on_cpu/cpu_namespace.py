"""Makes the module that Megatron sees as ``torch.cuda`` on a CPU: one device, and streams that do nothing."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


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
def cpu_namespace() -> ModuleType:
    """Returns this process's stand-in module; names that it lacks (types in annotations) come from ``torch.cuda``."""
    cpu = torch.device("cpu")
    stream = _Stream()
    namespace = ModuleType("relax_cpu_namespace")
    members: dict[str, Any] = {
        "current_device": lambda: cpu,
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
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
        "memory_stats": lambda *args: {},
        "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context),
        "random": namespace,
        "__getattr__": lambda name: getattr(torch.cuda, name),
    }
    members |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect", "manual_seed_all"), _nothing)
    for name, member in members.items():
        setattr(namespace, name, member)
    return namespace
