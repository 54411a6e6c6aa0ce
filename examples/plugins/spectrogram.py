"""An env that shows sounds to a vision model: the spectrogram of the WAV file in a data row's column `sound`.

python -m relax_core model=tiny_qwen3_vl data=file data.path=sounds.jsonl env.name=examples/plugins/spectrogram.py
"""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.contracts.env import EnvConfig, EnvSpec, Message
from relax_core.contracts.media import MediaSource

MAX_SECONDS = 60.0
QUIET_DB = 80.0  # tones this far below the loudest tone are black


@dataclass(frozen=True)
class SpectrogramConfig(EnvConfig):
    name: str = "spectrogram"
    folder: str = "."  # base of relative paths of sounds
    window: int = 512  # samples per column of the picture, which has half as many rows


def messages(row: Mapping[str, Any], config: SpectrogramConfig) -> list[Message]:
    picture = png(spectrogram(samples_of(Path(config.folder) / row["sound"]), window=config.window))
    shown = {"type": "image", "image": MediaSource(kind="image", data=picture)}
    return [{"role": "user", "content": [shown, {"type": "text", "text": row["prompt"]}]}]


def samples_of(file: Path) -> np.ndarray:
    """Returns the first channel of a 16-bit WAV file, float64 ``[samples]`` from -1 to 1."""
    with wave.open(str(file), "rb") as sound:
        if sound.getsampwidth() != 2 or sound.getnframes() > MAX_SECONDS * sound.getframerate():
            raise ValueError(f"{file}: give a WAV file of 16 bits and at most {MAX_SECONDS:.0f} seconds.")
        samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2")
        return samples[:: sound.getnchannels()] / 32768.0


def spectrogram(samples: np.ndarray, *, window: int) -> np.ndarray:
    """Returns the loudness over time, uint8 ``[frequencies, columns]``; low tones are at the bottom."""
    if len(samples) < window:
        raise ValueError(f"a sound of {len(samples)} samples is shorter than env.window={window}.")
    pieces = np.lib.stride_tricks.sliding_window_view(samples, window)[:: window // 2] * np.hanning(window)
    power = np.abs(np.fft.rfft(pieces, axis=1)[:, 1:]) ** 2
    decibels = 10.0 * np.log10(power / max(power.max(), 1e-12) + 1e-12)
    return (np.clip(1.0 + decibels / QUIET_DB, 0.0, 1.0) * 255.0).astype(np.uint8).T[::-1]


def png(pixels: np.ndarray) -> bytes:
    """Returns a grey picture as the bytes of a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    return file.getvalue()


SPEC = EnvSpec(name="spectrogram", summary="shows a sound as a picture", config=SpectrogramConfig, messages=messages)
