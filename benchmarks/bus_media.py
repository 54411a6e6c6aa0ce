"""Measures the cost of media items on the data bus: ``python -m benchmarks.bus --media``.

The benchmark writes an item of 12 MB, acquires it and puts it on the bus with its group. Then a trainer leases the
group and maps the item. The upper bounds are memcpy and a plain write to a new file in /dev/shm; numpy's memory uses
huge pages. With the kernel's setting "never", files in /dev/shm have small pages, so memcpy into new 4 KB pages is a
separate bound. Backends, storage places and bounds alternate in one Ray session. The bus process maps no item: its peak
memory shows whether items pass through the bus process.
"""

from __future__ import annotations

import asyncio
import mmap
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.bus_transport import T, bus_settings, for_actor, make_row
from relax_core.bus.factory import BACKENDS, create_bus
from relax_core.config.compose import load_config
from relax_core.contracts.columns import MEDIA
from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.media_file import write_item

if TYPE_CHECKING:
    from relax_core.bus.ray_bus import RayBus  # on import Ray reads the environment that `local_ray` sets

GROUPS = 8
FRAMES = (64, 250, 250, 3)  # 12 MB
NEW, REACH = "memcpy, new", 0.5  # the target, as a share of this bound
NEW_SMALL, WARM, FILE = "memcpy, new 4 KB pages", "memcpy, warm", "file, new"
WARM_UP_CYCLES = 2  # Ray's store and the Ray task that moves files into it are slow at first


class MediaLine:
    """Measures one backend with one storage place of media items ("files" or "nodes")."""

    def __init__(self, bus: RayBus, folder: Path, frames: np.ndarray) -> None:
        self._bus, self._folder, self._frames = bus, folder, frames
        self._step = 0
        self.items = 0
        self.seconds: list[tuple[float, float]] = []  # of put and of lease in each cycle, over all groups
        self.message_bytes = 0  # size of the put message of one group
        self.pid = bus.process_id(timeout_s=T)
        self._peak_before = _peak_bytes(self.pid)

    @property
    def grown_bytes(self) -> int:
        """Returns the growth of the bus process's peak memory since this object was made."""
        return _peak_bytes(self.pid) - self._peak_before

    def cycle(self, *, counts: bool = True) -> None:
        asyncio.run(self._cycle(counts))

    async def _cycle(self, counts: bool) -> None:
        bus, step = self._bus, self._step
        admissions = await bus.admit(GROUPS, timeout_s=T)
        start = time.perf_counter()
        items = [
            write_item(self._folder, _item(step * GROUPS + place), {"frames": self._frames}) for place in range(GROUPS)
        ]
        assert await bus.hold({item.digest: item.nbytes for item in items}, timeout_s=T) == []
        placed = [{MEDIA: msgspec.msgpack.encode([Media(item, 0, item.rows)])} for item in items]
        await bus.put(
            [make_row(admission, version=step, columns=own) for admission, own in zip(admissions, placed, strict=True)],
            timeout_s=T,
        )
        after_put = time.perf_counter()
        lease = await bus.lease(for_actor(step, GROUPS, placed[0]), timeout_s=T)
        reader = bus.media_reader(timeout_s=T)
        mapped = [reader.tensors(item)["frames"] for item in items]
        after_lease = time.perf_counter()
        if counts:
            self.seconds.append((after_put - start, after_lease - after_put))
            self.message_bytes = len(placed[0][MEDIA])
        assert all(np.array_equal(array[-1], self._frames[-1]) for array in mapped)
        assert str(self._folder) not in Path(f"/proc/{self.pid}/maps").read_text()
        await bus.ack([lease.lease_id], step=step, dropped={}, timeout_s=T)
        await bus.release_items([item.digest for item in items], timeout_s=T)
        self._step += 1
        self.items += GROUPS


def measure_media(folder: Path, *, rounds: int) -> None:
    """Prints for each backend and storage place the bytes through the bus process and the speed of put and lease."""
    frames = np.random.default_rng(0).integers(0, 256, FRAMES, dtype=np.uint8)
    warm = [np.zeros_like(frames) for _ in range(GROUPS)]
    bounds: dict[str, list[float]] = {way: [] for way in (NEW, NEW_SMALL, WARM, FILE)}
    with ExitStack() as ends:
        lines = _media_lines(ends, folder, frames)
        written = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="relax-benchmark-", dir="/dev/shm")))
        for line in lines.values():
            for _ in range(WARM_UP_CYCLES):
                line.cycle(counts=False)
        for _ in range(rounds):
            for line in lines.values():
                line.cycle()
            for bound, seconds in _time_bounds(frames, warm, written).items():
                bounds[bound].append(seconds)
        _print_media(frames, lines, bounds)


def _media_lines(ends: ExitStack, folder: Path, frames: np.ndarray) -> dict[str, MediaLine]:
    """Returns a `MediaLine` for each backend and storage place. ``ends`` closes the buses and removes the folders."""
    lines = {}
    for backend in BACKENDS:
        for place in ("files", "nodes") if backend == "ray" else ("files",):
            name = f"{backend}, {place}"
            shared = Path(tempfile.mkdtemp(prefix="relax-benchmark-", dir="/dev/shm"))
            ends.callback(shutil.rmtree, shared, ignore_errors=True)  # the node may remove the folder at the same time
            bus = create_bus(
                load_config([f"bus={backend}"]).bus,
                bus_settings(
                    GROUPS,
                    media_folder=str(shared / "media" if place == "nodes" else shared),
                    media_nodes=place == "nodes",
                ),
                ledger_path=folder / f"media-{backend}-{place}.sqlite",
                name=name,
                namespace="benchmark",
                socket_folder=folder,
            )
            ends.callback(bus.terminate)
            ends.callback(lambda bus: asyncio.run(bus.close(reason="the benchmark is over", timeout_s=T)), bus)
            lines[name] = MediaLine(bus, asyncio.run(bus.media_folder(timeout_s=T)), frames)
    return lines


def _time_bounds(frames: np.ndarray, warm: Sequence[np.ndarray], written: Path) -> dict[str, float]:
    """Returns the seconds that each bound needs to copy the frames of all groups once."""
    seconds = {}
    start = time.perf_counter()
    copies = [frames.copy() for _ in range(GROUPS)]
    seconds[NEW] = time.perf_counter() - start
    del copies
    start = time.perf_counter()
    pages = [_small_pages(frames) for _ in range(GROUPS)]
    seconds[NEW_SMALL] = time.perf_counter() - start
    del pages
    start = time.perf_counter()
    for target in warm:
        np.copyto(target, frames)
    seconds[WARM] = time.perf_counter() - start
    start = time.perf_counter()
    for number in range(GROUPS):
        (written / str(number)).write_bytes(frames.data)
    seconds[FILE] = time.perf_counter() - start
    for number in range(GROUPS):
        (written / str(number)).unlink()
    return seconds


def _print_media(frames: np.ndarray, lines: Mapping[str, MediaLine], bounds: Mapping[str, Sequence[float]]) -> None:
    nbytes = frames.nbytes * GROUPS
    rates = {bound: nbytes / float(np.median(seconds)) / 1e9 for bound, seconds in bounds.items()}
    print(f"{GROUPS} groups with an item of {frames.nbytes / 1e6:.0f} MB each (GB/s, medians of {len(bounds[NEW])}):")
    print("  " + ", ".join(f"{bound} {rate:.2f}" for bound, rate in rates.items()))
    huge = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().strip()
    print(f"  reach: {REACH} of {NEW}; huge pages of /dev/shm: {huge}")
    for name, line in lines.items():
        put, lease = np.median(line.seconds, axis=0)
        both = nbytes / (put + lease) / 1e9
        shares = ", ".join(f"{both / rate:.2f} of {bound}" for bound, rate in rates.items())
        print(
            f"  {name:<22} put {nbytes / put / 1e9:5.2f}   lease {lease * 1e3:6.1f} ms   "
            f"put + lease {both:5.2f} = {shares}"
        )
        print(
            f"    {line.message_bytes} bytes of a group's media in the bus process, whose peak memory grew by "
            f"{line.grown_bytes / 1e6:.1f} MB over {line.items} items (reach: no bytes of items)"
        )


def _small_pages(frames: np.ndarray) -> mmap.mmap:
    """Copies the frames into new memory of 4 KB pages."""
    memory = mmap.mmap(-1, frames.nbytes)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    np.copyto(np.frombuffer(memory, np.uint8), frames.reshape(-1))
    return memory


def _item(number: int) -> MediaItem:
    frames, height, width, _ = FRAMES
    rows = 1024
    return MediaItem(
        kind="video",
        digest=f"{number:032x}",
        token_ids=np.zeros(rows, "<i4").tobytes(),
        offsets=np.zeros((3, rows), "<i4").tobytes(),
        advance=32.0,
        placeholder=[7],
        grid=[frames // 2, 2, 2],
        seconds=1.0,
        frames=frames,
        width=width,
        height=height,
    )


def _peak_bytes(pid: int) -> int:
    """Returns the peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
