"""Makes the tones of the generated tasks that are heard: WAV files of four pitches, in many forms."""

from __future__ import annotations

import random
import wave
from functools import cache
from pathlib import Path

import numpy as np

from relax_core.contracts.media import MediaSource
from relax_core.data.tasks.made_folder import made_folder

TONES = {"low": 300.0, "mid": 700.0, "high": 1500.0, "top": 3000.0}  # hertz
TONE_VARIANTS = {"train": 24, "eval": 12}  # files of each tone
SECONDS = (0.3, 0.8)  # the least and the largest length
_RATES = (8_000, 16_000, 44_100)
_PITCH = 0.06  # share by which a tone's pitch differs at most
_NOISE = 0.02  # of full scale
_VERSION = 1  # to be raised when the files below change


def tone_source(split: str, tone: str, variant: int) -> MediaSource:
    """Returns the file of a tone; all files are made on first use."""
    return MediaSource(kind="audio", path=str(_file(_folder(), split, tone, variant)))


@cache
def _folder() -> Path:
    return made_folder(f"tones-{_VERSION}", _make, what="the tones")


def _file(folder: Path, split: str, tone: str, variant: int) -> Path:
    return folder / split / f"{tone}-{variant:02d}.wav"


def _make(folder: Path) -> None:
    for split, variants in TONE_VARIANTS.items():
        (folder / split).mkdir()
        for variant in range(variants):
            for tone, hertz in TONES.items():
                rng = random.Random(f"{split}/{tone}/{variant}")
                _write_tone(_file(folder, split, tone, variant), rng, hertz)


def _write_tone(file: Path, rng: random.Random, hertz: float) -> None:
    """Writes a tone with its first overtone and some noise, in 16 bits, as mono or stereo."""
    rate, channels, seconds = rng.choice(_RATES), rng.choice((1, 2)), rng.uniform(*SECONDS)
    pitch, loud = hertz * rng.uniform(1 - _PITCH, 1 + _PITCH), rng.uniform(0.2, 0.7)
    angles = 2 * np.pi * pitch * np.arange(int(seconds * rate)) / rate + rng.uniform(0, 2 * np.pi)
    noise = np.random.default_rng(rng.randrange(1 << 32)).normal(size=len(angles))
    samples = loud * (np.sin(angles) + 0.2 * np.sin(2 * angles)) + _NOISE * noise
    whole = (np.clip(samples, -1, 1) * 32767).astype("<i2")
    with wave.open(str(file), "wb") as written:
        written.setparams((channels, 2, rate, 0, "NONE", "not compressed"))
        written.writeframes(np.repeat(whole, channels).tobytes())
