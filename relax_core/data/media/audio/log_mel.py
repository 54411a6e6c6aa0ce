"""Computes Whisper's features of a sound: the logarithm of its energy in mel bins, with numpy in float64.

transformers' WhisperFeatureExtractor computes the same in float64 with numpy, or in float32 with torch where it is
installed, which a worker process does not import.
"""

from __future__ import annotations

from functools import cache

import numpy as np

_LEAST = 1e-10  # of the energy in a bin
_RANGE = 8.0  # decades below the largest energy of the sound, under which all is the same
_BLOCK = 4096  # frames that are computed at a time
_LINEAR_HZ = 200 / 3  # of a mel on Slaney's scale, up to 1,000 Hz
_BREAK_HZ, _BREAK_MEL = 1_000.0, 15.0
_LOG_STEP = np.log(6.4) / 27
_TOP_HZ = 8_000.0


def log_mel(samples: np.ndarray, *, sampling_rate: int, mel_bins: int, fft_size: int, hop_length: int) -> np.ndarray:
    """Returns the features of ``samples``, float32 ``[mel_bins, len(samples) // hop_length]``.

    ``samples`` is float32 ``[samples]``, more than half of ``fft_size``. The sound is mirrored at both ends.
    """
    count = len(samples) // hop_length
    padded = np.pad(samples.astype(np.float64), fft_size // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft_size) / fft_size)
    filters = mel_filters(sampling_rate=sampling_rate, mel_bins=mel_bins, fft_size=fft_size)
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft_size)[::hop_length][:count]
    energy = np.empty((count, mel_bins))
    for start in range(0, count, _BLOCK):
        spectrum = np.fft.rfft(frames[start : start + _BLOCK] * window)
        energy[start : start + _BLOCK] = (spectrum.real**2 + spectrum.imag**2) @ filters
    logs = np.log10(np.maximum(energy.T, _LEAST))
    scaled: np.ndarray = ((np.maximum(logs, logs.max() - _RANGE) + 4.0) / 4.0).astype(np.float32)
    return scaled


@cache
def mel_filters(*, sampling_rate: int, mel_bins: int, fft_size: int) -> np.ndarray:
    """Returns triangular filters on Slaney's mel scale from 0 to 8,000 Hz, each of area 1, ``[frequencies, bins]``."""
    frequencies = np.linspace(0, sampling_rate // 2, 1 + fft_size // 2)
    edges = _hertz(np.linspace(0, _mel(_TOP_HZ), mel_bins + 2))
    slopes = edges[None] - frequencies[:, None]
    widths = np.diff(edges)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    filters: np.ndarray = triangles * (2 / (edges[2:] - edges[:-2]))
    return filters


def _mel(hertz: float) -> float:
    return float(_BREAK_MEL + np.log(hertz / _BREAK_HZ) / _LOG_STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    curved = _BREAK_HZ * np.exp(_LOG_STEP * (mels - _BREAK_MEL))
    return np.where(mels < _BREAK_MEL, _LINEAR_HZ * mels, curved)
