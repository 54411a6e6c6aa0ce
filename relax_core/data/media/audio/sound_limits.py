"""What a sound may be: its rate, its channels, its length, and numbers that are numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.media_limits import MediaLimits

MOST_CHANNELS = 8
RATES = (4_000, 192_000)  # samples a second of the source
PACKET = 2048  # samples of padding that an encoder sets behind a sound at most
_ROUNDING_S = 0.001  # that a length may exceed a limit by, because files count whole packets or samples


@dataclass(frozen=True, kw_only=True)
class SoundHeader:
    """Holds what a file says about its sound; ``seconds`` is None if it does not say the length."""

    rate: int
    channels: int
    seconds: float | None


def check_sound(header: SoundHeader, limits: MediaLimits) -> None:
    """Raises MediaError for a header that breaks a limit."""
    if not 1 <= header.channels <= MOST_CHANNELS:
        told = f"it has {header.channels} channels, and 1 to {MOST_CHANNELS} are read. Mix it down."
        raise MediaError("audio", "too_many_channels", told)
    if not RATES[0] <= header.rate <= RATES[1]:
        told = f"it has {header.rate:,} samples a second, and {RATES[0]:,} to {RATES[1]:,} are read. Convert it."
        raise MediaError("audio", "bad_rate", told)
    if header.seconds is not None:
        check_seconds(header.seconds, limits)


def check_seconds(seconds: float, limits: MediaLimits) -> None:
    """Raises MediaError for a length outside the limits."""
    if seconds > limits.audio_seconds_max + _ROUNDING_S:
        told = f"it is {seconds:,.2f} s long, and the limit is {limits.audio_seconds_max:g} s. Cut it."
        raise MediaError("audio", "too_long", told)
    if seconds < limits.audio_seconds_min - _ROUNDING_S:
        told = f"it is {seconds:,.3f} s long, and the least is {limits.audio_seconds_min:g} s."
        raise MediaError("audio", "too_short", told)


def most_samples(rate: int, limits: MediaLimits) -> int:
    """Returns the number of samples after which decoding stops, because the sound is too long then."""
    return int((limits.audio_seconds_max + _ROUNDING_S) * rate) + 1


def without_padding(samples: np.ndarray, length: int) -> np.ndarray:
    """Returns the first ``length`` of decoded samples if what follows them may be padding, or else all of them."""
    return samples[:length] if len(samples) - length <= PACKET else samples


def check_samples(samples: np.ndarray, rate: int, limits: MediaLimits) -> None:
    """Raises MediaError for decoded samples ``[samples]`` whose length breaks a limit or that are not finite."""
    check_seconds(len(samples) / rate, limits)
    if not np.isfinite(samples).all():
        raise MediaError("audio", "not_finite", "it has samples that are infinite or not a number.")
