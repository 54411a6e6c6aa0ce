# ruff: noqa: E501 (a case is one line)
"""Tests generated hostile and broken audio files: each is refused with its reason, within a worker's limits."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import struct
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relax_core.contracts.media import MediaKind, MediaSource
from relax_core.data.media.encode_pool import EncodePool, EncodeSettings
from relax_core.data.media.media_headers import read_media_header
from relax_core.data.media.media_trial_main import TIMED_SETTINGS, TRIAL_AUDIO
from tests.data.media.conftest import LIMITS, Encode, MakeSettings, check_hostile, check_memory, refused
from tests.data.media.make_files import sound_only, video
from tests.data.media.make_sounds import film, flac_of_an_hour, floats, stored, tone, wav, with_flac_samples
from tests.data.media.test_hostile_files import PLAYLISTS, plain_png

Content = Callable[[], bytes]
CPU_S = 2.0  # processor time to read a header


@cache
def clip(form: str) -> bytes:
    return stored(tone(2.0, channels=2), form)


@cache
def an_hour() -> bytes:
    return flac_of_an_hour()


@cache
def heard_film() -> bytes:
    return film()


@cache
def long_track() -> bytes:
    return film(seconds=1.0, sound_seconds=31.0)


def with_value(value: float) -> bytes:
    samples = tone(1.0)[:, 0].copy()
    samples[8_000] = value
    return floats(samples)


def tagged_mp3() -> bytes:
    """Returns a file with an ID3 tag that claims 256 MB. The file has ten bytes of the tag."""
    return b"ID3\4\0\0\x7f\x7f\x7f\x7f" + b"TIT2" + bytes(10)


CASES: dict[str, tuple[MediaKind, str, Content]] = {
    "empty.wav": ("audio", "truncated", lambda: b""),
    "only magic.wav": ("audio", "truncated", lambda: b"RIFF\4\0\0\0WAVE"),
    "only magic.flac": ("audio", "truncated", lambda: b"fLaC"),
    "only magic.ogg": ("audio", "truncated", lambda: b"OggS"),
    "only magic.mp3": ("audio", "truncated", lambda: b"ID3"),
    "only a sync word.mp3": ("audio", "truncated", lambda: b"\xff\xfb\x90\x64"),
    "header alone.wav": ("audio", "truncated", lambda: clip("WAV")[:44]),
    "header alone.flac": ("audio", "truncated", lambda: clip("FLAC")[:42]),
    "no samples.wav": ("audio", "too_short", lambda: wav(b"")),
    "no samples.flac": ("audio", "truncated", lambda: stored(np.zeros((0, 1), np.float32), "FLAC")),
    "no samples.ogg": ("audio", "too_short", lambda: stored(np.zeros((0, 1), np.float32), "OGG")),
    "one sample.wav": ("audio", "too_short", lambda: wav(bytes(2))),
    "90 ms.wav": ("audio", "too_short", lambda: stored(tone(0.09), "WAV")),
    "not a number.wav": ("audio", "not_finite", lambda: with_value(float("nan"))),
    "infinite.wav": ("audio", "not_finite", lambda: with_value(float("inf"))),
    "minus infinite.wav": ("audio", "not_finite", lambda: with_value(float("-inf"))),
    "65,535 channels.wav": ("audio", "too_many_channels", lambda: wav(bytes(65_535 * 4), channels=65_535)),
    "9 channels.wav": ("audio", "too_many_channels", lambda: stored(tone(0.5, channels=9), "WAV")),
    "no channels.wav": ("audio", "too_many_channels", lambda: wav(bytes(32_000), channels=0)),
    "rate 0.wav": ("audio", "bad_rate", lambda: wav(bytes(32_000), rate=0)),
    "rate 1.wav": ("audio", "bad_rate", lambda: wav(bytes(32_000), rate=1)),
    "rate 4 billion.wav": ("audio", "bad_rate", lambda: wav(bytes(32_000), rate=(1 << 32) - 1)),
    "rate 384 kHz.wav": ("audio", "bad_rate", lambda: wav(bytes(384_000), rate=384_000)),
    "an hour in 180 KB.flac": ("audio", "too_long", an_hour),
    "an hour that says a second.flac": ("audio", "too_long", lambda: with_flac_samples(an_hour(), 0)),
    "31 s.wav": ("audio", "too_long", lambda: stored(tone(31), "WAV")),
    "31 s.mp3": ("audio", "too_long", lambda: stored(tone(31), "MP3")),
    "31 s.ogg": ("audio", "too_long", lambda: stored(tone(31), "OGG")),
    "4 GB that are not there.wav": ("audio", "truncated", lambda: wav(bytes(32_000), size=(1 << 32) - 2)),
    "more samples than there are.flac": ("audio", "truncated", lambda: with_flac_samples(clip("FLAC"), 64_000)),
    "noise.wav": ("audio", "truncated", lambda: b"RIFF\xff\xff\0\0WAVE" + np.random.default_rng(7).bytes(3_000)),
    "noise.flac": ("audio", "truncated", lambda: b"fLaC" + np.random.default_rng(7).bytes(3_000)),
    "noise.mp3": ("audio", "truncated", lambda: b"ID3\4\0\0\0\0\0\0" + np.random.default_rng(7).bytes(3_000)),
    "a tag of 256 MB.mp3": ("audio", "truncated", tagged_mp3),
    "zeros in the middle.ogg": ("audio", "truncated", lambda: clip("OGG")[:200] + bytes(1_000) + clip("OGG")[1_200:]),
    "compressed by an odd codec.wav": ("audio", "truncated", lambda: wav(bytes(32_000), kind=0x1234)),
    "AIFF.wav": ("audio", "unknown_format", lambda: stored(tone(1.0), "AIFF")),
    "a picture.wav": ("audio", "unknown_format", plain_png),
    "text.wav": ("audio", "unknown_format", lambda: b"hello"),
    "pickle.wav": ("audio", "unknown_format", lambda: b"\x80\x04cos\nsystem\n"),
    "a sound.png": ("image", "unknown_format", lambda: clip("WAV")),
    "a sound as a video.mp4": ("video", "unknown_format", lambda: clip("FLAC")),
    **{f"{name}.mp3": ("audio", "unknown_format", lambda name=name: PLAYLISTS[name]) for name in PLAYLISTS},
    "a playlist behind a box.m4a": ("audio", "truncated", lambda: struct.pack(">I4s", 16, b"ftyp") + b"M4A \0\0\0\0" + PLAYLISTS["hls"]),
    "a playlist behind a tag.mp3": ("audio", "truncated", lambda: b"ID3\4\0\0\0\0\0\0" + PLAYLISTS["ffconcat"]),
    "a film without sound.mp4": ("audio", "no_audio_track", lambda: video([np.zeros((64, 96, 3), np.uint8)] * 8)),
    "sound without a film.mp4": ("video", "no_frames", sound_only),
    "a silent film.mp4": ("video", "no_audio_track", lambda: film(sound_seconds=None)),
    "a track of 31 s.mp4": ("video", "too_long", long_track),
    "a track of 50 ms.mp4": ("video", "too_short", lambda: film(sound_seconds=0.05, sound_codec="flac")),
    "an odd codec.mkv": ("audio", "unknown_format", lambda: film(form="matroska", frames=0, sound_codec="wavpack")),
    "9 MB.wav": ("audio", "too_many_bytes", lambda: bytes(9 << 20)),
}  # fmt: skip
for _name in ("WAV", "FLAC", "OGG", "MP3", "film"):
    for _tenth in range(1, 10):

        def _part(name: str = _name, tenth: int = _tenth) -> bytes:
            data = heard_film() if name == "film" else clip(name)
            return data[: len(data) * tenth // 10]

        CASES[f"{_tenth} tenths.{_name}"] = ("video" if _name == "film" else "audio", "truncated", _part)


@pytest.fixture(scope="module")
def hearing(make_settings: MakeSettings) -> EncodeSettings:
    settings = make_settings(tower=TIMED_SETTINGS)
    return msgspec.structs.replace(settings, audio=TRIAL_AUDIO, audio_in_video=True)


@pytest.fixture(scope="module")
def hear(hearing: EncodeSettings) -> Iterator[Encode]:
    """Encodes with one worker. Checks that the worker survives all files within its address space limit."""
    with EncodePool(hearing, workers=1) as pool:
        started = [worker.pid for worker in pool.workers]
        yield lambda source: asyncio.run(pool.encode(source))
        check_memory(pool, started)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_sound_gives_its_reason(hear: Encode, hearing: EncodeSettings, name: str) -> None:
    check_hostile(hear, Path(hearing.root), name, CASES[name])


def test_a_header_is_enough_to_refuse_an_hour() -> None:
    data = an_hour()
    began = time.process_time()
    with refused("too_long", "3,600"):
        read_media_header(MediaSource(kind="audio", data=data), LIMITS, root=Path("/"))
    assert time.process_time() - began < CPU_S


def test_paths_that_are_no_sounds_below_the_root(hear: Encode, hearing: EncodeSettings) -> None:
    root = Path(hearing.root)
    outside = root.parent / "outside.wav"
    outside.write_bytes(clip("WAV"))
    (root / "link out.wav").symlink_to(outside)
    (root / "zero.wav").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe.wav")
    for path, word in {
        "link out.wav": "outside_root", str(outside): "outside_root", "zero.wav": "outside_root",
        "pipe.wav": "unknown_format", ".": "unknown_format", "nowhere.wav": "missing_file",
        "https://example.org/a.wav": "remote_refused", "concat:a.wav|b.wav": "remote_refused",
    }.items():  # fmt: skip
        with refused(word):
            hear(MediaSource(kind="audio", path=path))


def test_a_track_and_a_video_of_different_lengths_are_one_item(hear: Encode) -> None:
    for seconds, heard in ((4.0, 1.0), (1.0, 4.0)):
        item = hear(MediaSource(kind="video", data=film(seconds=seconds, sound_seconds=heard)))
        assert item.audio_seconds == pytest.approx(heard, abs=0.15)
        assert (item.ids == TRIAL_AUDIO.audio_token_id).sum() == TRIAL_AUDIO.rows_of_frames(item.audio_frames)
        assert (item.ids == TIMED_SETTINGS.video_token_id).sum() == item.patches // 4


def test_a_worker_with_less_memory_refuses_only_what_needs_more(make_settings: MakeSettings) -> None:
    limits = dataclasses.replace(LIMITS, audio_seconds_max=600.0, worker_bytes=420 << 20, item_bytes=64 << 20)
    settings = msgspec.structs.replace(make_settings(limits), audio=TRIAL_AUDIO)
    silence = stored(np.zeros((16_000 * 599, 1), np.float32), "FLAC")
    with EncodePool(settings, workers=1) as pool:
        with refused("worker_killed"):
            asyncio.run(pool.encode(MediaSource(kind="audio", data=silence)))
        assert asyncio.run(pool.encode(MediaSource(kind="audio", data=clip("WAV")))).audio_frames == 200
