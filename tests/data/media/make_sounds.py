"""Makes audio for tests. Writes bytes directly if no library can write such a file."""

from __future__ import annotations

import io
import struct
import tempfile
from pathlib import Path

import av
import numpy as np
import soundfile

from tests.data.media.make_files import grey_frames


def tone(seconds: float, rate: int = 16_000, hertz: float = 440.0, channels: int = 1) -> np.ndarray:
    """Returns a slightly noisy tone, float32 ``[samples, channels]``."""
    count = round(seconds * rate)
    noise = np.random.default_rng(0).normal(size=(count, channels)) * 0.01
    angles = 2 * np.pi * hertz * np.arange(count) / rate
    samples: np.ndarray = (0.5 * np.sin(angles)[:, None] + noise).astype(np.float32)
    return samples


def stored(samples: np.ndarray, form: str, *, rate: int = 16_000, subtype: str | None = None) -> bytes:
    """Encodes samples ``[samples, channels]`` in a file format."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def wav(
    data: bytes, *, channels: int = 1, rate: int = 16_000, bits: int = 16, kind: int = 1, size: int | None = None
) -> bytes:
    """Returns a WAV with these header values. ``kind`` 1 means integers, 3 means floats."""
    block = min(channels * bits // 8, 65_535)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, kind, channels, rate, min(rate * block, (1 << 32) - 1), block, bits)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def floats(values: np.ndarray, **header: int) -> bytes:
    """Returns a WAV of unchanged float32 samples."""
    return wav(values.astype("<f4").tobytes(), bits=32, kind=3, **header)


def flac_of_an_hour() -> bytes:
    """Returns one hour of silence at 16 kHz."""
    return stored(np.zeros((16_000 * 3600, 1), np.float32), "FLAC")


def with_flac_samples(data: bytes, samples: int) -> bytes:
    """Returns a FLAC with another number of samples in its header."""
    bits = int.from_bytes(data[18:26], "big") & ~((1 << 36) - 1) | samples
    return data[:18] + bits.to_bytes(8, "big") + data[26:]


def film(
    *,
    seconds: float = 2.0,
    sound_seconds: float | None = 2.0,
    form: str = "mp4",
    sound_codec: str = "aac",
    rate: int = 16_000,
    layout: str = "mono",
    frames: int | None = None,
) -> bytes:
    """Returns a video of ``seconds`` with a tone of ``sound_seconds``. If ``frames`` is 0, it has no pictures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film"
        with av.open(str(path), "w", format=form) as container:
            levels = range(round(seconds * 8) if frames is None else frames)
            stream = container.add_stream("h264" if form == "mp4" else "vp8", rate=8) if levels else None
            track = container.add_stream(sound_codec, rate=rate, layout=layout) if sound_seconds else None
            if stream is not None:
                stream.height, stream.width, stream.pix_fmt = 64, 96, "yuv420p"
                for frame in grey_frames(levels):
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
                container.mux(stream.encode())
            if track is not None:
                assert sound_seconds is not None
                channels = track.codec_context.channels
                samples = tone(sound_seconds, rate, channels=channels).T
                resampler = av.AudioResampler(
                    format=track.codec_context.format.name, frame_size=track.codec_context.frame_size or 1024
                )
                heard = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
                heard.sample_rate, heard.pts = (
                    rate,
                    0,
                )  # the file then records the priming samples of AAC
                for part in [*resampler.resample(heard), *resampler.resample(None)]:
                    container.mux(track.encode(part))
                container.mux(track.encode())
        return path.read_bytes()
