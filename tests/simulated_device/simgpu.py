"""Builds and registers the simulated GPU of simgpu.cpp, whose torch device type is ``simgpu``.

On it a mix-up of host and device raises as on CUDA, and memory and the host's reads are counted. `register` builds it
at the first call (about 80 s on two slow cores) and keeps it in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_core.contracts.private_folder import CACHE_KEY, private_folder, user_cache
from relax_core.train.device import SIMULATED, VARIABLE

SOURCE = Path(__file__).with_name("simgpu.cpp")


class SimulatedStream:
    """Is the device's only stream, on which everything is done when it is called."""

    def wait_stream(self, stream: SimulatedStream) -> None: ...

    def synchronize(self) -> None: ...


class SimulatedModule:
    """Is ``torch.simgpu``: what torch expects of a device's module. There is one device, with one stream."""

    def __init__(self, extension: Any) -> None:
        self.memory_allocated = extension.memory_allocated
        self.max_memory_allocated = extension.max_memory_allocated
        self.reset_peak_memory_stats = extension.reset_peak_memory_stats
        self._stream = SimulatedStream()
        self.host_reads = extension.host_reads  # copies to the host and scalars read, since the process began

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None: ...

    def synchronize(self, device: Any = None) -> None: ...

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self._stream

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        yield

    def manual_seed_all(self, seed: int) -> None: ...

    def get_rng_state(self, device: Any = None) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        import torch

        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[Any]:
        import torch

        return [torch.bfloat16]


@functools.cache
def register() -> SimulatedModule:
    """Registers the device with torch in this process, and returns its module."""
    import torch
    import torch.distributed as dist
    from torch.utils import cpp_extension

    key = hashlib.blake2b(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    folder = private_folder(user_cache(f"simgpu-{key}"), key=CACHE_KEY)
    os.environ.setdefault("MAX_JOBS", "1")
    extension = cpp_extension.load(
        "relax_simgpu", [str(SOURCE)], extra_cflags=["-O1"], build_directory=str(folder), verbose=False
    )
    torch.utils.rename_privateuse1_backend(SIMULATED)
    module = SimulatedModule(extension)
    torch._register_device_module(SIMULATED, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.backend_capability["gloo"].append(SIMULATED)  # collectives travel over the host
    return module


def register_if_chosen() -> None:
    """Registers the device in a process that trains on it."""
    if os.environ.get(VARIABLE) == "simulated":
        register()
