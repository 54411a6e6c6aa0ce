"""Decodes six generated files for `relax doctor`: ``python -m relax_core.data.media.media_trial_main``.

The files are decoded in a separate process, because a broken build of a decoder crashes its process.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from relax_core.contracts.media import MediaKind, MediaSource
from relax_core.data.media.item_encoder import encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.families.architecture import AudioSettings, PatchSettings

_SIDE = 64
# The patch sizes of Qwen3-VL, with arbitrary token ids. The limits allow the small images of this trial.
TRIAL_SETTINGS = PatchSettings(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    image_token_id=1,
    video_token_id=2,
    vision_start_token_id=3,
    vision_end_token_id=4,
    min_pixels=_SIDE**2,
)
# The audio and video settings of Qwen3-Omni; its videos have no time stamps.
TRIAL_AUDIO = AudioSettings(
    sampling_rate=16_000,
    mel_bins=128,
    fft_size=400,
    hop_length=160,
    chunk_frames=100,
    audio_token_id=5,
    audio_start_token_id=6,
    audio_end_token_id=7,
)
TIMED_SETTINGS = dataclasses.replace(TRIAL_SETTINGS, positions_per_second=13)
_LEVEL = 200
_TOLERANCE = 8  # tolerance, because WebP and MP4 change pixel values slightly
_RATE, _HERTZ, _SECONDS = 24_000, 1_000, 1.0
_BIN = 42  # index of the mel bin around 1,000 Hz, of 128 bins


def main() -> None:
    """Prints the formats that were decoded. Raises an exception if a file cannot be decoded or is decoded wrongly."""
    files: dict[str, tuple[MediaKind, bytes]] = {
        "PNG": ("image", _image("PNG")),
        "WebP": ("image", _image("WEBP")),
        "MP4": ("video", _video()),
        "WAV": ("audio", _sound("WAV")),
        "MP3": ("audio", _sound("MP3")),
        "MP4 with sound": ("video", _video(sound=True)),
    }
    for name, (kind, data) in files.items():
        heard = "sound" in name
        _, tensors = encode_item(
            MediaSource(kind=kind, data=data),
            TIMED_SETTINGS if heard else TRIAL_SETTINGS,
            MediaLimits(),
            root=Path("/"),
            tokenize=lambda text: [0],
            audio=TRIAL_AUDIO,
            audio_in_video=heard,
        )
        _check(name, tensors)
    print(", ".join(files))


def _check(name: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for wrong pixels, or for a tone that is not in its mel bin."""
    if "frames" in tensors:
        wrong = int(np.abs(tensors["frames"].astype(int) - _LEVEL).max())
        if wrong > _TOLERANCE:
            raise ValueError(f"{name} has pixels that are {wrong} levels off")
    if "features" in tensors:
        loudest = int(tensors["features"][:, 20:-20].mean(axis=1).argmax())
        if abs(loudest - _BIN) > 1:
            raise ValueError(f"{name} has its tone in mel bin {loudest}, and {_BIN} is right")


def _image(form: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (_LEVEL,) * 3).save(file, form)
    return file.getvalue()


def _tone() -> np.ndarray:
    """Returns a tone, float32 ``[samples]``."""
    angles = 2 * np.pi * _HERTZ * np.arange(int(_RATE * _SECONDS)) / _RATE
    tone: np.ndarray = (0.5 * np.sin(angles)).astype(np.float32)
    return tone


def _sound(form: str) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.stack([_tone()] * 2, axis=1), _RATE, format=form)
    return file.getvalue()


def _video(*, sound: bool = False) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = _SIDE
        stream.pix_fmt = "yuv420p"
        track = container.add_stream("aac", rate=_RATE, layout="mono") if sound else None
        for _ in range(4):
            pixels = np.full((_SIDE, _SIDE, 3), _LEVEL, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
        if track is not None:
            heard = av.AudioFrame.from_ndarray(_tone()[None], format="fltp", layout="mono")
            heard.sample_rate = _RATE
            container.mux(track.encode(heard))
            container.mux(track.encode())
    return file.getvalue()


if __name__ == "__main__":
    main()
