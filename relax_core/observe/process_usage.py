"""Measures the CPU, memory and GPU usage of a process of the run and of its children. GPU usage needs NVML."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

USAGE_S = 5.0  # the shortest time between two measurements
CHILDREN_S = 30.0  # interval of the search for children; a search reads one file per thread
MB = 1e6
_CGROUP = Path("/sys/fs/cgroup")
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
_UTIME, _RSS = 11, 21  # field numbers in /proc/PID/stat after the program name


class GpuUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Holds NVML's measurements of one GPU: the share of time with work (0 to 1), and the used memory in MB."""

    index: int
    busy: float
    memory_mb: float


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the resource usage of one process at one measurement.

    ``cores`` is the CPU time per second of wall time since the previous measurement. ``memory_mb`` is the resident
    memory in MB, with shared pages. ``children`` is the number of child processes; ``children_cores`` and
    ``children_memory_mb`` are totals over them. ``gpus`` are the GPUs that the process may use.
    """

    cores: float
    memory_mb: float
    children: int = 0
    children_cores: float = 0.0
    children_memory_mb: float = 0.0
    gpus: tuple[GpuUsage, ...] = ()


class UsageMeter:
    """Measures a process of this host at most once in `USAGE_S` seconds. The default is the calling process."""

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._own = pid is None
        self._newest: ProcessUsage | None = None
        self._measured = self._looked = -CHILDREN_S
        self._children: set[int] = set()
        self._cpu_s: dict[int, float] = {}  # pid → CPU seconds at the newest measurement

    def newest(self, known_children: Collection[int] = ()) -> ProcessUsage | None:
        """Returns the newest measurement.

        Returns None before the second measurement and after the end of the process.
        """
        now = time.monotonic()
        if now - self._measured < USAGE_S:
            return self._newest
        if now - self._looked >= CHILDREN_S:
            self._looked, self._children = now, children_of(self._pid)
        passed_s, self._measured = now - self._measured, now
        found = {pid: used for pid in {self._pid, *self._children, *known_children} if (used := _used(pid)) is not None}
        before, self._cpu_s = self._cpu_s, {pid: cpu_s for pid, (cpu_s, _) in found.items()}
        own, children = found.get(self._pid), found.keys() - {self._pid}
        self._newest = None
        if own is not None and self._pid in before:
            cores = {pid: max(0.0, cpu_s - before.get(pid, cpu_s)) / passed_s for pid, cpu_s in self._cpu_s.items()}
            self._newest = ProcessUsage(
                cores=round(cores[self._pid], 4),
                memory_mb=round(own[1] / MB, 1),
                children=len(children),
                children_cores=round(sum(cores[pid] for pid in children), 4),
                children_memory_mb=round(sum(found[pid][1] for pid in children) / MB, 1),
                gpus=tuple(gpu_usages()) if self._own else (),
            )
        return self._newest


def usage_numbers(name: str, usage: ProcessUsage) -> dict[str, float]:
    """Returns the usage as metrics. The metric names begin with ``name``."""
    numbers = {"cores": usage.cores, "memory_mb": usage.memory_mb}
    if usage.children:
        numbers |= {
            "children": float(usage.children),
            "children_cores": usage.children_cores,
            "children_memory_mb": usage.children_memory_mb,
        }
    for gpu in usage.gpus:
        numbers |= {f"gpu{gpu.index}_busy": gpu.busy, f"gpu{gpu.index}_memory_mb": gpu.memory_mb}
    return {f"{name}/{key}": value for key, value in numbers.items()}


def children_of(pid: int) -> set[int]:
    """Returns the pids of a process's children. Empty if the process has ended or the kernel lists no children."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return {int(child) for task in tasks for child in _text(task / "children").split()}
    except OSError:
        return set()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


def _used(pid: int) -> tuple[float, int] | None:
    """Returns the CPU seconds since the start and the resident memory in bytes, or None if the process has ended."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if len(fields) <= _RSS or fields[0] == "Z":
        return None
    return (int(fields[_UTIME]) + int(fields[_UTIME + 1])) / _TICKS, int(fields[_RSS]) * _PAGE


# -- GPUs -------------------------------------------------------------------------------------------------------------
def gpu_usages() -> Iterable[GpuUsage]:
    """Yields the usage of each GPU in CUDA_VISIBLE_DEVICES. Empty if the variable, NVML or a GPU is missing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    nvml = _nvml() if visible else None
    if nvml is None:
        return
    for index, name in enumerate(visible.split(",")):
        try:
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.strip().isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(name.strip())
            )
            busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
            memory = nvml.nvmlDeviceGetMemoryInfo(handle).used
        except nvml.NVMLError:
            continue
        yield GpuUsage(index=index, busy=busy, memory_mb=round(memory / MB, 1))


@functools.cache
def _nvml() -> Any:
    """Returns `pynvml` after initialising NVML, or None if pynvml or NVML is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def available_bytes() -> int:
    """Returns the available memory of the machine, or of the container if that is less, in bytes."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        statistics = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
        free = min(free, int(text) - used)
    return free
