"""Tests that videos have the rate and orientation that FFmpeg's tools report, and that piped audio files are read."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from relax_core.contracts.media import MediaError, MediaKind, MediaSource
from relax_core.data.media.item_encoder import encode_item
from relax_core.data.media.media_headers import read_media_header
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_trial_main import TIMED_SETTINGS, TRIAL_AUDIO
from relax_core.data.media.video_decoding import _mean_rate, _upright, video_header, video_index
from tests.data.media.conftest import refused
from tests.data.media.make_sounds import film, stored, tone, with_flac_samples

LIMITS = MediaLimits()
PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@pytest.mark.parametrize(
    ("matrix", "wanted"),
    [
        ((1, 0, 0, 1), PICTURE),
        ((-1, 0, 0, 1), PICTURE[:, ::-1]),  # mirrored: the top stays at the top
        ((1, 0, 0, -1), PICTURE[::-1]),
        ((-1, 0, 0, -1), PICTURE[::-1, ::-1]),
        ((0, 1, -1, 0), np.rot90(PICTURE, -1)),  # a phone in upright position: rotated to the right
        ((0, -1, 1, 0), np.rot90(PICTURE, 1)),
        ((0, 1, 1, 0), PICTURE.transpose(1, 0, 2)),
        ((0, -1, -1, 0), np.rot90(PICTURE, 2).transpose(1, 0, 2)),
    ],
)
def test_a_display_matrix_turns_and_mirrors(matrix: tuple[int, int, int, int], wanted: np.ndarray) -> None:
    assert np.array_equal(_upright(PICTURE, matrix), wanted)


def video(times_ms: list[int], form: str, codec: str) -> io.BytesIO:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=1000)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for time in times_ms:
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), time % 200, np.uint8), format="rgb24")
            frame.pts = time
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return file


@pytest.mark.parametrize(
    "times", [list(range(0, 4000, 250)), [0, 100, 200, 1000, 1100, 2000, 2500, 2700], [0, 40, 80, 3000]]
)
def test_the_rate_of_a_matroska_file_is_measured(times: list[int]) -> None:
    """The header claims 1,000 frames per second. Browsers write no rate."""
    file = video(times, "matroska", "libvpx")
    index = video_index(file, "matroska", MediaLimits())
    measured = (times[-1] - times[0]) / 1000
    assert index.header.frames == len(times)
    assert len(times) / index.header.fps == pytest.approx(measured, abs=0.3)
    assert video_header(file, "matroska", MediaLimits()).fps == index.header.fps


def test_a_plan_and_a_run_take_one_rate_for_an_mp4_of_variable_rate() -> None:
    """25 frames per second, then 5. H.264 reorders frames, so the header lacks some of the duration."""
    file = video([*range(0, 1000, 40), *range(1000, 4000, 200)], "mp4", "h264")
    planned, index = video_header(file, "mov", LIMITS), video_index(file, "mov", LIMITS)
    assert planned == index.header
    assert planned.fps == pytest.approx(40 / 4, rel=0.16)


def test_a_rate_of_the_header_that_fits_stays() -> None:
    assert _mean_rate(30000 / 1001, 90, 3.003) == 30000 / 1001
    assert _mean_rate(25.0, 90, 4.0) == 22.5 and _mean_rate(0.0, 90, 4.0) == 22.5
    with pytest.raises(MediaError):
        _mean_rate(0.0, 1, 0.0)


def heard(data: bytes, limits: MediaLimits = LIMITS, *, kind: MediaKind = "audio") -> tuple[float, float]:
    """Returns the seconds of an audio file, or of a video's audio, in a plan and in a run."""
    source = MediaSource(kind=kind, data=data)
    item, _ = encode_item(
        source, TIMED_SETTINGS, limits, root=Path("/"), tokenize=lambda text: [0], audio=TRIAL_AUDIO,
        audio_in_video=True,
    )  # fmt: skip
    planned = read_media_header(source, limits, root=Path("/"), audio_in_video=True)
    return planned.audio_seconds, item.audio_seconds


@pytest.mark.parametrize("whole", [0, 36, 0x7FFFF024, 0xFFFFFFFF])
@pytest.mark.parametrize("size", [0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFDB, 0xFFFFFFFF, 0, 32_000])
def test_a_wav_of_a_pipe_has_the_samples_that_are_there(size: int, whole: int) -> None:
    head = b"RIFF" + struct.pack("<I", whole) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16000, 32000, 2, 16)
    assert heard(head + b"data" + struct.pack("<I", size) + bytes(32_000)) == (1.0, 1.0)


def test_a_flac_of_a_pipe_is_read_to_its_end() -> None:
    flac = with_flac_samples(stored(tone(1.0), "FLAC"), 0)
    assert heard(flac) == (30.0, 1.0)  # for an unknown length, the plan assumes the longest allowed audio
    with pytest.raises(MediaError):
        heard(flac[: len(flac) // 2])


@pytest.mark.parametrize("tag", [b"", b"ID3\x03\x00\x00\x00\x00\x01\x00" + bytes(128)])
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_an_mp3_without_a_count_of_its_frames_is_read_to_its_end(mode: str, tag: bytes) -> None:
    """With a variable bit rate, an estimate of the length from the first frame would cut the end."""
    counted = io.BytesIO()
    soundfile.write(counted, tone(2.0), 16_000, format="MP3", bitrate_mode=mode, compression_level=0.5)
    assert heard(tag + counted.getvalue()) == (2.0, 2.0)
    data = counted.getvalue().replace(b"Xing", bytes(4)).replace(b"Info", bytes(4))
    planned, seconds = heard(tag + data)
    assert planned == 30.0 and 2.0 <= seconds <= 2.2


def test_the_padding_of_an_mp3_is_not_above_the_limit() -> None:
    data = stored(tone(2.0), "MP3").replace(b"Xing", bytes(4)).replace(b"Info", bytes(4))
    assert heard(data, MediaLimits(audio_seconds_max=2.0)) == (2.0, 2.0)
    with refused("too_long"):
        heard(data, MediaLimits(audio_seconds_max=1.8))


@pytest.mark.parametrize("kind", ["audio", "video"])
@pytest.mark.parametrize(("form", "rate"), [("mp4", 16_000), ("mp4", 44_100), ("mp4", 48_000), ("matroska", 16_000)])
def test_a_track_of_aac_ends_where_its_sound_ends(form: str, rate: int, kind: MediaKind) -> None:
    """AAC has packets of 1,024 samples and pads the last packet: here 32,768 samples for 2 s at 16 kHz."""
    data = film(form=form, rate=rate)
    assert heard(data, MediaLimits(audio_seconds_max=2.0), kind=kind) == (2.0, 2.0)
    with refused("too_long"):
        heard(data, MediaLimits(audio_seconds_max=1.8), kind=kind)


def test_the_padding_of_aac_has_no_features() -> None:
    source = MediaSource(kind="audio", data=film(sound_seconds=1.0))
    item, _ = encode_item(
        source, TIMED_SETTINGS, LIMITS, root=Path("/"), tokenize=lambda text: [0], audio=TRIAL_AUDIO
    )  # fmt: skip
    assert (item.audio_seconds, item.audio_frames) == (1.0, 100)
