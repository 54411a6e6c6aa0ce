"""Turns an open sound, or the sound track of an open video, into the features of one model."""

from __future__ import annotations

from typing import IO

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.audio.log_mel import log_mel
from relax_core.data.media.audio.sound_files import decode_file, file_header
from relax_core.data.media.audio.sound_limits import SoundHeader, check_samples
from relax_core.data.media.audio.sound_tracks import decode_track, track_header
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.source_files import VIDEO_FORMATS
from relax_core.families.architecture import AudioSettings


def sound_header(file: IO[bytes], form: str, limits: MediaLimits) -> SoundHeader:
    """Returns what a file says about its sound, without decoding it. Raises MediaError if that breaks a limit."""
    return track_header(file, form, limits) if form in VIDEO_FORMATS else file_header(file, form, limits)


def clip_features(file: IO[bytes], form: str, audio: AudioSettings, limits: MediaLimits) -> tuple[np.ndarray, float]:
    """Returns the features of a sound, float32 ``[mel bins, frames]``, and its length in seconds.

    The channels are averaged, and the mean is resampled to the model's rate. A sound is encoded alone, padded to no
    length, so that its features do not depend on others. Raises MediaError.
    """
    import soxr

    decode = decode_track if form in VIDEO_FORMATS else decode_file
    samples, rate = decode(file, form, limits)
    check_samples(samples, rate, limits)
    if rate != audio.sampling_rate:
        samples = soxr.resample(samples, rate, audio.sampling_rate, quality="HQ")
    features = log_mel(
        samples,
        sampling_rate=audio.sampling_rate,
        mel_bins=audio.mel_bins,
        fft_size=audio.fft_size,
        hop_length=audio.hop_length,
    )
    if not np.isfinite(features).all():
        raise MediaError("audio", "not_finite", "its samples are too large for their energy to be a number.")
    return features, len(samples) / audio.sampling_rate
