"""Tests the encode workers: limits of time and memory, death and replacement, the event loop, shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from relax_core.contracts.media import MediaError, MediaSource
from relax_core.data.media.encode_pool import EncodePool
from tests.data.media.conftest import LIMITS, MakeSettings, refused
from tests.data.media.make_files import noise, saved, video

LONG_S = 60.0


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def small() -> MediaSource:
    return MediaSource(kind="image", data=saved(noise(64, 64), "PNG"))


@pytest.fixture(scope="module")
def slow() -> MediaSource:
    """Makes a video that needs more than a second of decoding."""
    frames = [noise(720, 1280, seed) for seed in range(6)]
    return MediaSource(kind="video", data=video(frames * 20, group=1, codec="mpeg4"))


def test_an_item_that_takes_too_long_is_refused_and_the_worker_replaced(
    make_settings: MakeSettings, slow: MediaSource
) -> None:
    limits = dataclasses.replace(LIMITS, item_bytes=100 << 20, worker_timeout_s=0.15)
    with EncodePool(make_settings(limits), workers=1) as pool:
        (first,) = (worker.pid for worker in pool.workers)
        with refused("timeout", "no answer within 0.15 s"):
            asyncio.run(pool.encode(slow))
        assert pool.workers[0].pid != first and _gone(first)


def test_an_item_whose_worker_dies_is_encoded_by_the_next_and_refused_if_that_dies_too(
    make_settings: MakeSettings, slow: MediaSource
) -> None:
    limits = dataclasses.replace(LIMITS, item_bytes=100 << 20)
    with EncodePool(make_settings(limits), workers=1) as pool:
        first = asyncio.run(pool.encode(small()))
        os.kill(pool.workers[0].pid, signal.SIGKILL)  # an idle worker dies; the next item notices it
        assert asyncio.run(pool.encode(small())).digest == first.digest
        pool.workers[0].replace()
        os.kill(pool.workers[0].pid, signal.SIGKILL)  # a starting worker dies
        assert asyncio.run(pool.encode(small())).digest == first.digest

        def kill_busy(deaths: int) -> None:
            give_up = time.monotonic() + LONG_S
            for _ in range(deaths):
                while not pool.workers[0]._ready and time.monotonic() < give_up:
                    time.sleep(0.01)
                pid = pool.workers[0].pid
                used = _cpu_ticks(pid)
                while _cpu_ticks(pid) < used + 5 and time.monotonic() < give_up:
                    time.sleep(0.01)
                os.kill(pid, signal.SIGKILL)
                while pool.workers[0].pid == pid and time.monotonic() < give_up:
                    time.sleep(0.01)

        killer = threading.Thread(target=kill_busy, args=(2,))
        killer.start()
        with refused("worker_killed", "SIGKILL"):
            asyncio.run(pool.encode(slow))
        killer.join(LONG_S)
        assert asyncio.run(pool.encode(small())).rows == 4


def _cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_a_worker_without_enough_memory_refuses_the_item(make_settings: MakeSettings) -> None:
    limits = dataclasses.replace(LIMITS, source_pixels=64_000_000, worker_bytes=450 << 20)
    large = MediaSource(kind="image", data=saved(Image.new("RGBA", (7_900, 7_900)), "PNG"))
    with EncodePool(make_settings(limits), workers=1) as pool:
        with refused("worker_killed", "are not enough"):
            asyncio.run(pool.encode(large))
        assert asyncio.run(pool.encode(small())).rows == 4


def test_the_event_loop_goes_on_while_large_items_are_encoded(pool: EncodePool) -> None:
    """Other threads only wait for pipes. So the event loop's tasks continue between any two steps of an encode."""
    source = MediaSource(kind="image", data=saved(noise(1_500, 1_500), "BMP"))  # 6.7 MB through the pipe

    async def run() -> int:
        turns = 0
        encoding = asyncio.gather(*(pool.encode(source) for _ in range(4)))
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len({item.digest for item in await encoding}) == 1
        return turns

    assert asyncio.run(run()) >= 5


def test_a_closed_pool_leaves_no_process_and_refuses(make_settings: MakeSettings, slow: MediaSource) -> None:
    pool = EncodePool(make_settings(dataclasses.replace(LIMITS, item_bytes=100 << 20)), workers=2)
    asyncio.run(pool.encode(small()))
    pids = [worker.pid for worker in pool.workers]
    raised: list[BaseException] = []

    async def encode_all() -> None:
        raised.extend(await asyncio.gather(*(pool.encode(slow) for _ in range(5)), return_exceptions=True))

    def encode() -> None:
        asyncio.run(encode_all())

    encoding = threading.Thread(target=encode)
    encoding.start()
    give_up = time.monotonic() + LONG_S
    while not pool._idle.empty():
        assert time.monotonic() < give_up
        time.sleep(0.001)
    pool.close()
    encoding.join(LONG_S)
    assert len(raised) == 5 and all(isinstance(error, MediaError | RuntimeError) for error in raised)
    assert all(map(_gone, pids))
    pool.close()
    with pytest.raises(RuntimeError):
        asyncio.run(pool.encode(small()))


def test_a_worker_imports_no_model_library(pool: EncodePool) -> None:
    asyncio.run(pool.encode(small()))
    for worker in pool.workers:
        mapped = Path(f"/proc/{worker.pid}/maps").read_text()
        assert "libtorch" not in mapped and "/transformers/" not in mapped
    assert "relax_core.data.media.encode_worker_main" not in sys.modules


def test_a_missing_library_is_named_with_what_installs_it(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("raise ImportError('no module av')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with (
        EncodePool(make_settings(), workers=1) as pool,
        pytest.raises(RuntimeError, match=r"no module av.*pip install 'relax-core\[omni\]'"),
    ):
        asyncio.run(pool.encode(small()))
