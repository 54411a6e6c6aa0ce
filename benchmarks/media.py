"""Measures encode workers: ``python -m benchmarks.media``; ``--parts`` selects sounds, pictures and stored.

``sounds`` prints the speed, as a multiple of real time, at which one worker decodes 30 s of sound and computes its
features. ``pictures`` prints the time of one image or video, the speedup by a second worker, the stalls of the event
loop meanwhile, and a worker's memory. ``stored`` prints how often a run encodes each image, video or sound, and the
bytes that the bus stores for a group with one item. The target is printed next to each result.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from relax_core.contracts.media import Media, MediaItem, MediaSource
from relax_core.data.media.encode_pool import EncodePool, EncodeSettings
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_trial_main import TRIAL_AUDIO, TRIAL_SETTINGS
from relax_core.rollout.item_cache import ItemCache
from relax_core.tools.tiny_text import write_prompt_tokenizer

ROUNDS, ITEMS, TICK_S = 5, 8, 0.001
GROUP_SIZE, RE_ASKS, EVALUATIONS = 8, 2, 2
SOUND_SECONDS, SOUND_RATE = 30, 44_100
SOUNDS = {"WAV": "PCM_16", "FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III"}
REACH_SOUND = 100
REACH_WORKERS, REACH_STALL_MS, REACH_ENCODES, REACH_BYTES = 1.6, 5.0, 1.0, 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures encode workers.")
    parts = {"sounds": measure_sounds, "pictures": measure_pictures, "stored": measure_stored}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="default: all")
    for part in parser.parse_args().parts:
        parts[part]()


def measure_sounds() -> None:
    """Prints the speed of one worker on stereo sounds of 30 s, as a multiple of real time."""
    sources = {form: _sound(form, subtype) for form, subtype in SOUNDS.items()}
    seconds: dict[str, list[float]] = {form: [] for form in sources}
    cpu: dict[str, list[float]] = {form: [] for form in sources}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        settings = EncodeSettings(
            model_folder=folder,
            tower=TRIAL_SETTINGS,
            limits=MediaLimits(audio_seconds_max=SOUND_SECONDS + 1),
            root=folder,
            folder=folder,
            audio=TRIAL_AUDIO,
        )
        with EncodePool(settings, workers=1) as pool:
            for source in sources.values():
                asyncio.run(_encode_all(pool, [source], []))
            for _ in range(ROUNDS):
                for form, source in sources.items():
                    used = _cpu_seconds(pool)
                    seconds[form].append(asyncio.run(_encode_all(pool, [source] * ITEMS, [])) / ITEMS)
                    cpu[form].append((_cpu_seconds(pool) - used) / ITEMS)
            pid = pool.workers[0].pid
            memory = f"{_status(pid, 'VmRSS'):.0f} MB, at most {_status(pid, 'VmHWM'):.0f} MB"
    for form in sources:
        took, computing = statistics.median(seconds[form]), statistics.median(cpu[form])
        print(
            f"{SOUND_SECONDS} s of sound, {form}: {took * 1e3:.0f} ms, {SOUND_SECONDS / took:.0f} times real time "
            f"(reach {REACH_SOUND}); computing {computing * 1e3:.0f} ms, {SOUND_SECONDS / computing:.0f} times"
        )
    print(f"memory of a worker that has encoded sounds alone: {memory}")


def measure_pictures() -> None:
    """Prints the measurements of images and videos."""
    sources = {"4-megapixel JPEG": _image("JPEG"), "4-megapixel PNG": _image("PNG"), "64-frame video, 720p": _video()}
    seconds: dict[tuple[str, int], list[float]] = {}
    cpu: dict[str, list[float]] = {}
    stalls: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write_prompt_tokenizer(Path(folder), vision=True)
        settings = EncodeSettings(
            model_folder=folder, tower=TRIAL_SETTINGS, limits=MediaLimits(), root=folder, folder=folder
        )
        began = time.perf_counter()
        with EncodePool(settings, workers=1) as one_worker, EncodePool(settings, workers=2) as two_workers:
            for source in sources.values():
                asyncio.run(_encode_all(one_worker, [source], stalls))
                asyncio.run(_encode_all(two_workers, [source] * 4, stalls))
            print(f"start of 3 workers and one item of each kind: {time.perf_counter() - began:.2f} s")
            stalls.clear()
            for _ in range(ROUNDS):
                for name, source in sources.items():
                    for workers, pool in ((1, one_worker), (2, two_workers)):
                        used = _cpu_seconds(one_worker)
                        took = asyncio.run(_encode_all(pool, [source] * ITEMS, stalls))
                        if workers == 1:
                            cpu.setdefault(name, []).append((_cpu_seconds(one_worker) - used) / ITEMS)
                        seconds.setdefault((name, workers), []).append(took / ITEMS)
            peaks = [_status(worker.pid, "VmHWM") for worker in two_workers.workers]
            now = [_status(worker.pid, "VmRSS") for worker in two_workers.workers]
    for name in sources:
        single, double = (statistics.median(seconds[name, workers]) for workers in (1, 2))
        print(f"{name}: {single * 1e3:.0f} ms an item, {statistics.median(cpu[name]) * 1e3:.0f} ms of them computing")
        print(f"    two workers are {single / double:.2f} times as fast (reach {REACH_WORKERS} on two idle cores)")
    late = np.percentile(stalls, 99) * 1e3
    print(
        f"event loop, {len(stalls)} ticks: p99 {late:.1f} ms late (reach {REACH_STALL_MS}), "
        f"most {max(stalls) * 1e3:.1f} ms"
    )
    print(f"memory of a worker: {max(now):.0f} MB, at most {max(peaks):.0f} MB")


def measure_stored() -> None:
    """Prints how often the items of a run are encoded, and the bytes that the bus stores for a group."""
    sources = [_image("JPEG"), _image("PNG"), _video(), _sound("FLAC", SOUNDS["FLAC"])]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write_prompt_tokenizer(Path(folder), vision=True)
        settings = EncodeSettings(
            model_folder=folder,
            tower=TRIAL_SETTINGS,
            limits=MediaLimits(audio_seconds_max=SOUND_SECONDS + 1),
            root=folder,
            folder=folder,
            audio=TRIAL_AUDIO,
        )
        with EncodePool(settings, workers=2) as pool:
            encodes, items = asyncio.run(_run_of(pool, sources))
        stored = [_stored_bytes(Path(folder), item) for item in items]
    print(
        f"encodes an item, groups of {GROUP_SIZE}, re-asks and evaluations: {encodes:.2f} (reach {REACH_ENCODES:.2f})"
    )
    for item, nbytes in zip(items, stored, strict=True):
        raw = sum(tensor.nbytes for tensor in item.tensors)
        message = (
            f"media bytes of a group with one {item.kind} on the bus: {nbytes / raw:.3f} of its frames and features"
        )
        pixels = item.patches * TRIAL_SETTINGS.temporal_patch_size * TRIAL_SETTINGS.patch_size**2 * 3
        patches = f", 1/{GROUP_SIZE * 4 * pixels / nbytes:.1f} of the float32 patches of {GROUP_SIZE} samples"
        print(f"{message} (reach {REACH_BYTES}){patches if pixels else ''}")


async def _encode_all(pool: EncodePool, sources: Sequence[MediaSource], stalls: list[float]) -> float:
    """Returns the seconds of encoding. Appends the delay of each event loop tick to ``stalls``."""
    began = time.perf_counter()
    encoding = asyncio.gather(*map(pool.encode, sources))
    while not encoding.done():
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        stalls.append(time.perf_counter() - due)
    await encoding
    return time.perf_counter() - began


async def _run_of(pool: EncodePool, sources: Sequence[MediaSource]) -> tuple[float, list[MediaItem]]:
    """Requests items like a run. Returns the number of encodes per item, and the items.

    A group requests its items once, `RE_ASKS` more times, and once for each of `EVALUATIONS`. Each sample holds its
    items.
    """
    cache = ItemCache(pool, max_bytes=0)  # for items without an owner
    held = await cache.items(sources, owner="the prompt of a data set that other prompts share")
    for asked in range(1 + RE_ASKS + EVALUATIONS):
        owners = [f"{asked}-{sample}" for sample in range(GROUP_SIZE)]
        await asyncio.gather(*(cache.items(sources, owner=owner) for owner in owners))
        for owner in owners:
            cache.release(owner)
    return cache.encoded / len(sources), held


def _stored_bytes(folder: Path, item: MediaItem) -> int:
    """Returns the bytes that the bus stores for a group with one item: the item's file and its record in the group."""
    return (folder / item.digest).stat().st_size + len(msgspec.msgpack.encode([Media(item, 0, item.rows)]))


def _sound(form: str, subtype: str) -> MediaSource:
    """Returns a chord over noise in stereo."""
    import soundfile

    times = np.arange(SOUND_SECONDS * SOUND_RATE) / SOUND_RATE
    noise = np.random.default_rng(0).normal(size=(len(times), 2)) * 0.02
    chord = sum(np.sin(2 * np.pi * hertz * times) for hertz in (220.0, 277.2, 329.6)) / 6
    file = io.BytesIO()
    soundfile.write(file, noise + np.asarray(chord)[:, None], SOUND_RATE, format=form, subtype=subtype)
    return MediaSource(kind="audio", data=file.getvalue())


def _image(form: str) -> MediaSource:
    from PIL import Image

    rows, columns = np.mgrid[:1_600, :2_500]
    pixels = np.stack([rows // 8, columns // 12, (rows * columns) % 251], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return MediaSource(kind="image", data=file.getvalue())


def _video() -> MediaSource:
    """Returns a video of 40 seconds at 25 frames per second. Models use 64 of its frames."""
    import av

    file = io.BytesIO()
    rows, columns = np.mgrid[:720, :1_280]
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("h264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 720, 1_280, "yuv420p"
        stream.codec_context.options = {"preset": "ultrafast"}
        for number in range(1_000):
            grey = ((rows + columns + 4 * number) // 4).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="gray")
            container.mux(stream.encode(frame.reformat(format="yuv420p")))
        container.mux(stream.encode())
    return MediaSource(kind="video", data=file.getvalue())


def _cpu_seconds(pool: EncodePool) -> float:
    fields = Path(f"/proc/{pool.workers[0].pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _status(pid: int, key: str) -> float:
    """Returns a field of /proc/PID/status in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
