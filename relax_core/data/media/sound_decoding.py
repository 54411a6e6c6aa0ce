"""Decodes sounds (audio files and sound tracks of videos) within limits, and computes Whisper's log-mel features.

This module reads the headers of sounds before libsndfile does, because libsndfile may shorten a truncated file without
an error. It computes the features with numpy in float64, like transformers' WhisperFeatureExtractor without torch.
(With torch, WhisperFeatureExtractor uses float32; a worker process does not import torch.)
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, NamedTuple

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.source_files import VIDEO_FORMATS
from relax_core.data.media.video_decoding import opened_container
from relax_core.families.architecture import AudioSettings

MAX_CHANNELS = 8
RATES = (4_000, 192_000)  # smallest and largest sample rate of a source in Hz
PACKET = 2048  # most samples of padding that an encoder appends to a sound
_ROUNDING_S = 0.001  # tolerance in seconds for limits of a length, because files count whole packets or samples


@dataclass(frozen=True, kw_only=True)
class SoundHeader:
    """Holds the header of a sound; ``seconds`` is None if the file does not state the length."""

    rate: int
    channels: int
    seconds: float | None


def check_sound(header: SoundHeader, limits: MediaLimits) -> None:
    """Raises MediaError for a header that breaks a limit."""
    if not 1 <= header.channels <= MAX_CHANNELS:
        message = f"it has {header.channels} channels, and 1 to {MAX_CHANNELS} are read. Mix it down."
        raise MediaError("audio", "too_many_channels", message)
    if not RATES[0] <= header.rate <= RATES[1]:
        message = f"it has {header.rate:,} samples a second, and {RATES[0]:,} to {RATES[1]:,} are read. Convert it."
        raise MediaError("audio", "bad_rate", message)
    if header.seconds is not None:
        check_seconds(header.seconds, limits)


def check_seconds(seconds: float, limits: MediaLimits) -> None:
    """Raises MediaError for a length outside the limits."""
    if seconds > limits.audio_seconds_max + _ROUNDING_S:
        message = f"it is {seconds:,.2f} s long, and the limit is {limits.audio_seconds_max:g} s. Cut it."
        raise MediaError("audio", "too_long", message)
    if seconds < limits.audio_seconds_min - _ROUNDING_S:
        message = f"it is {seconds:,.3f} s long, and the least is {limits.audio_seconds_min:g} s."
        raise MediaError("audio", "too_short", message)


def max_samples(rate: int, limits: MediaLimits) -> int:
    """Returns the number of samples after which decoding stops because the sound is too long."""
    return int((limits.audio_seconds_max + _ROUNDING_S) * rate) + 1


def without_padding(samples: np.ndarray, length: int) -> np.ndarray:
    """Returns the first ``length`` decoded samples if all further samples may be padding, else all samples."""
    return samples[:length] if len(samples) - length <= PACKET else samples


def check_samples(samples: np.ndarray, rate: int, limits: MediaLimits) -> None:
    """Raises MediaError if the number of decoded samples ``[samples]`` breaks a limit, or if a sample is not finite."""
    check_seconds(len(samples) / rate, limits)
    if not np.isfinite(samples).all():
        raise MediaError("audio", "not_finite", "it has samples that are infinite or not a number.")


# The sizes of the samples in WAV headers that SoX, FFmpeg and other programs write into a pipe.
_UNKNOWN = frozenset({0x7FFFF000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFDB, 0xFFFFFFFF})
_SMALLEST_UNKNOWN = min(_UNKNOWN)
_EVEN = (1, 3, 6, 7, 0xFFFE)  # codes of WAV formats with samples of fixed size: PCM, floats, A-law, mu-law, extensible
_MAX_CHUNKS = 1_000  # most chunks before a WAV's samples
_OGG_END = 4  # the flag of the last page of an Ogg stream
_FIRST_FRAME = 192  # bytes of an MP3's first frame that may contain the frame count
_END = 1 << 45  # the size in bytes that is reported for an MP3 without a frame count


class _WavData(NamedTuple):
    """Holds a WAV's header, the offset and the value of its field for the size of the samples, and their real size."""

    header: SoundHeader
    at: int
    size: int
    said: int


def written_header(file: IO[bytes], form: str) -> SoundHeader | None:
    """Returns the header of a WAV or FLAC file.

    Checks the pages of an Ogg file. Returns None for Ogg and all other formats.

    Raises MediaError for an incomplete file. Sets the file back to position 0.
    """
    try:
        file.seek(0)
        if form == "WAV":
            return _wav_data(file).header
        if form == "FLAC":
            return _flac_header(file)
        if form == "OGG":
            _check_pages(file)
        return None
    except struct.error as error:
        raise _cut("its header is not complete.") from error
    finally:
        file.seek(0)


def readable_file(file: IO[bytes], form: str) -> Any:
    """Returns a file object, at position 0, that libsndfile reads to the end of the sound.

    Without this wrapper, libsndfile reads no samples from a WAV with size 0 in its header, which is written into a
    pipe. For an MP3 without a frame count, libsndfile guesses the length from the file's size and the first frame; this
    cuts the end of a file with a variable bit rate. The file must have passed `written_header`.
    """
    file.seek(0)
    if form == "WAV":
        found = _wav_data(file)
        file.seek(0)
        if found.said == 0 < found.size:
            data = bytearray(file.read())
            data[found.at : found.at + 4] = struct.pack("<I", found.size)
            return io.BytesIO(data)
    if form == "MP3":
        is_counted = _counts_frames(file)
        file.seek(0)
        if not is_counted:
            return _Endless(file)
    return file


class _Endless:
    """Wraps a file and reports a very large size, so libsndfile does not guess a length from the size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._behind: int | None = None  # the position after a seek from the reported end

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._behind = _END + offset if whence == io.SEEK_END else None
        return self._file.seek(offset, whence) if self._behind is None else self._behind

    def tell(self) -> int:
        return self._file.tell() if self._behind is None else self._behind

    def read(self, count: int) -> bytes:
        return self._file.read(count) if self._behind is None else bytes(count)


def _counts_frames(file: IO[bytes]) -> bool:
    """Returns whether the first frame of an MP3, after an ID3 tag, contains the frame count."""
    head = file.read(10)
    at = 0
    if head[:3] == b"ID3" and len(head) == 10:
        at = 10 + sum((byte & 0x7F) << 7 * (3 - place) for place, byte in enumerate(head[6:]))
    file.seek(at)
    frame = file.read(_FIRST_FRAME)
    for mark in (b"Xing", b"Info"):
        place = frame.find(mark)
        if place >= 0:
            return bool(frame[place + 7 : place + 8] and frame[place + 7] & 1)
    return b"VBRI" in frame


def _wav_data(file: IO[bytes]) -> _WavData:
    size = file.seek(0, 2)
    file.seek(4)
    (whole,) = struct.unpack("<I", file.read(4))
    file.seek(12)
    code = channels = rate = block = 0
    for _ in range(_MAX_CHUNKS):
        name, length = struct.unpack("<4sI", file.read(8))
        behind = file.tell() + length + length % 2
        if name == b"data":
            break
        if name == b"fmt ":
            code, channels, rate, _, block = struct.unpack("<HHIIH", file.read(14))
        file.seek(behind)
    else:
        raise _cut("it has no samples.")
    left, said = size - file.tell(), length
    never_written = length == 0 and (whole >= _SMALLEST_UNKNOWN or whole + 8 <= file.tell())
    if length in _UNKNOWN or never_written:
        length = left
    if length > left:
        raise _cut(f"its header says {length:,} bytes of samples, and {left:,} are there.")
    known = code in _EVEN and rate > 0 and block > 0
    header = SoundHeader(rate=rate, channels=channels, seconds=length / block / rate if known else None)
    return _WavData(header, at=size - left - 4, size=length, said=said)


def _flac_header(file: IO[bytes]) -> SoundHeader:
    head = file.read(26)
    if len(head) < 26 or head[4] & 0x7F != 0:
        raise _cut("its header is not complete.")
    bits = int.from_bytes(head[18:26], "big")  # rate: 20 bits, channels - 1: 3, bits - 1: 5, samples: 36
    rate, channels, samples = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
    return SoundHeader(rate=rate, channels=channels, seconds=samples / rate if rate and samples else None)


def _check_pages(file: IO[bytes]) -> None:
    """Raises MediaError if the last page of an Ogg file is cut or does not end its stream."""
    size, at, flags = file.seek(0, 2), 0, 0
    while at < size:
        file.seek(at)
        head = file.read(27)
        if head[:4] != b"OggS" and at > 0:
            break  # data after the last page is not sound
        (flags, count) = struct.unpack_from("<5xB20xB", head)
        at += 27 + count + sum(file.read(count))
    if at > size or not flags & _OGG_END:
        raise _cut("its last page is missing.")


def _cut(text: str) -> MediaError:
    return MediaError("audio", "truncated", f"it is truncated or damaged: {text}")


# Maps each format that the first bytes of a file show to the formats that libsndfile may report for the file.
_FOUND = {"WAV": ("WAV", "WAVEX"), "FLAC": ("FLAC",), "OGG": ("OGG",), "MP3": ("MP3",)}
_BLOCK = 1 << 16  # number of samples that are decoded at a time
_UNKNOWN_LENGTH = 1 << 40  # if a file does not state its number of samples, libsndfile reports more than this


def file_header(file: IO[bytes], form: str, limits: MediaLimits) -> SoundHeader:
    """Returns the header of a sound. Raises MediaError if the header breaks a limit."""
    written = written_header(file, form)
    if written is not None:
        check_sound(written, limits)
    with _opened(file, form) as sound:
        header = _header(sound)
    check_sound(header, limits)
    return header


def decode_file(file: IO[bytes], form: str, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Returns the mean of a sound's channels, float32 ``[samples]`` with full scale 1, and the sample rate."""
    header = file_header(file, form, limits)
    is_padded = form == "MP3" and header.seconds is None  # with a frame count the file also states its padding
    most = max_samples(header.rate, limits) + (PACKET if is_padded else 0)
    blocks, count = [np.zeros(0, np.float32)], 0
    with _opened(file, form) as sound:
        while count <= most:
            block = sound.read(_BLOCK, dtype="float32", always_2d=True)
            if not len(block):
                break
            blocks.append(block.mean(axis=1, dtype=np.float32))
            count += len(block)
    if header.seconds is not None and count < round(header.seconds * header.rate):
        said = round(header.seconds * header.rate)
        message = f"it is truncated or damaged: its header says {said:,} samples, and {count:,} are there."
        raise MediaError("audio", "truncated", message)
    samples = np.concatenate(blocks)
    if is_padded:
        samples = without_padding(samples, round(limits.audio_seconds_max * header.rate))
    return samples, header.rate


def _header(sound: Any) -> SoundHeader:
    known = 0 <= sound.frames < _UNKNOWN_LENGTH
    return SoundHeader(
        rate=sound.samplerate, channels=sound.channels, seconds=sound.frames / sound.samplerate if known else None
    )


@contextmanager
def _opened(file: IO[bytes], form: str) -> Iterator[Any]:
    """Opens a sound for sequential reading; errors of libsndfile inside the block become MediaError."""
    import soundfile

    try:
        with soundfile.SoundFile(readable_file(file, form)) as sound:
            sound.seekable = lambda: False  # prevents seeks, which fail at the end of a FLAC from a pipe
            if sound.format not in _FOUND[form]:
                message = f"its content is {sound.format} and not {form}. Convert it."
                raise MediaError("audio", "unknown_format", message)
            yield sound
    except soundfile.LibsndfileError as error:
        raise MediaError("audio", "truncated", f"it is truncated or damaged: {error.error_string}") from error


# The codecs of phones, cameras, browsers and data sets, in addition to uncompressed samples (pcm_*).
_CODECS = ("aac", "mp3", "mp3float", "opus", "libopus", "vorbis", "flac", "alac", "ac3", "eac3")
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")
_TRACK_ROUNDING_S = 0.1  # tolerance for a track that is shorter than its header says, because encoders count packets


def track_header(file: IO[bytes], form: str, limits: MediaLimits) -> SoundHeader:
    """Returns the header of a container's sound track. Raises MediaError if the track is missing or breaks a limit."""
    with opened_container(file, form, limits) as container:
        return _track_header(_track(container), limits)


def decode_track(file: IO[bytes], form: str, limits: MediaLimits) -> tuple[np.ndarray, int]:
    """Returns the mean of a track's channels, float32 ``[samples]`` with full scale 1, and the sample rate.

    The result does not contain the padding of the last packet, beyond the track's length.
    """
    import av

    blocks, count = [np.zeros(0, np.float32)], 0
    with opened_container(file, form, limits) as container:
        track = _track(container)
        header = _track_header(track, limits)
        track.codec_context.thread_count = 1
        most = max_samples(header.rate, limits) + PACKET
        planar = av.AudioResampler(format="fltp")  # the resampler raises ValueError if rate or channels change
        for frame in container.decode(track):
            if frame.is_corrupt or frame.sample_rate != header.rate:
                raise MediaError("audio", "truncated", "its sound is damaged.")
            for part in planar.resample(frame):
                blocks.append(part.to_ndarray().mean(axis=0, dtype=np.float32))
                count += len(blocks[-1])
            if count > most:
                break
    if header.seconds is not None and count < (header.seconds - _TRACK_ROUNDING_S) * 0.99 * header.rate:
        message = f"its header says {header.seconds:.2f} s of sound, and {count / header.rate:.2f} s are there."
        raise MediaError("audio", "truncated", message)
    length = round((limits.audio_seconds_max if header.seconds is None else header.seconds) * header.rate)
    return without_padding(np.concatenate(blocks), length), header.rate


def _track(container: Any) -> Any:
    if not container.streams.audio:
        raise MediaError("audio", "no_audio_track", "it has no sound track.")
    return container.streams.audio[0]


def _track_header(track: Any, limits: MediaLimits) -> SoundHeader:
    context = track.codec_context
    if context is None or not (context.name in _CODECS or context.name.startswith("pcm_")):
        name = "of an unknown codec" if context is None else context.name
        message = f"its sound is {name}, none of {', '.join(_CODECS)} and pcm. Convert it."
        raise MediaError("audio", "unknown_format", message)
    rate, seconds, most = context.sample_rate or 0, _seconds(track), limits.audio_seconds_max
    if seconds is not None and rate and most < seconds <= most + PACKET / rate:
        seconds = most  # Matroska counts the padding of the last packet, too
    header = SoundHeader(rate=rate, channels=context.channels or 0, seconds=seconds)
    check_sound(header, limits)
    return header


def _seconds(track: Any) -> float | None:
    """Returns the length of a track, None if only the length of the whole container is known."""
    if track.duration is not None and track.time_base:
        return float(track.duration * track.time_base)
    said = _CLOCK.match(track.metadata.get("DURATION", ""))  # FFmpeg writes the track's length there in Matroska
    return None if said is None else int(said[1]) * 3600 + int(said[2]) * 60 + float(said[3])


_LEAST = 1e-10  # lower limit of the energy in a bin
_RANGE = 8.0  # decades below the largest energy of the sound; smaller energies are clipped
_FRAMES_PER_BATCH = 4096  # number of frames that are computed at a time
_LINEAR_HZ = 200 / 3  # per mel on Slaney's scale, up to 1,000 Hz
_BREAK_HZ, _BREAK_MEL = 1_000.0, 15.0
_LOG_STEP = np.log(6.4) / 27
_TOP_HZ = 8_000.0


def log_mel(samples: np.ndarray, *, sampling_rate: int, mel_bins: int, fft_size: int, hop_length: int) -> np.ndarray:
    """Returns Whisper's log-mel features of ``samples``, float32 ``[mel_bins, len(samples) // hop_length]``.

    ``samples`` is float32 ``[samples]``, with more than ``fft_size / 2`` samples. The sound is mirrored at its two
    ends.
    """
    count = len(samples) // hop_length
    padded = np.pad(samples.astype(np.float64), fft_size // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft_size) / fft_size)
    filters = mel_filters(sampling_rate=sampling_rate, mel_bins=mel_bins, fft_size=fft_size)
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft_size)[::hop_length][:count]
    energy = np.empty((count, mel_bins))
    for start in range(0, count, _FRAMES_PER_BATCH):
        spectrum = np.fft.rfft(frames[start : start + _FRAMES_PER_BATCH] * window)
        energy[start : start + _FRAMES_PER_BATCH] = (spectrum.real**2 + spectrum.imag**2) @ filters
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


def sound_header(file: IO[bytes], form: str, limits: MediaLimits) -> SoundHeader:
    """Returns the header of a sound without decoding the sound. Raises MediaError if the header breaks a limit."""
    return track_header(file, form, limits) if form in VIDEO_FORMATS else file_header(file, form, limits)


def clip_features(file: IO[bytes], form: str, audio: AudioSettings, limits: MediaLimits) -> tuple[np.ndarray, float]:
    """Returns the features of a sound, float32 ``[mel bins, frames]``, and its length in seconds.

    The channels are averaged, and the mean is resampled to the model's rate. Each sound is encoded separately and
    without padding, so its features do not depend on other sounds. Raises MediaError.
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
        raise MediaError("audio", "not_finite", "its samples are too large: their energy is not finite.")
    return features, len(samples) / audio.sampling_rate
