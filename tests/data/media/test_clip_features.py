"""Compares audio features with transformers' extractor. Also tests every format, and the resulting items."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor

from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.contracts.media_file import read_item, write_item
from relax_core.data.media.item_encoder import clip_item, encode_item
from relax_core.data.media.media_headers import planned_item, read_media_header
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_trial_main import TIMED_SETTINGS, TRIAL_AUDIO, TRIAL_SETTINGS
from relax_core.data.media.sound_decoding import clip_features, log_mel, mel_filters
from relax_core.data.media.source_files import open_source
from tests.data.media.make_sounds import film, floats, stored, tone

LIMITS = MediaLimits()
WHISPER = {"sampling_rate": 16_000, "mel_bins": 128, "fft_size": 400, "hop_length": 160}


def features_of(data: bytes) -> tuple[np.ndarray, float]:
    opened = open_source(MediaSource(kind="audio", data=data), LIMITS, root=Path("/"))
    return clip_features(opened.file, opened.form, TRIAL_AUDIO, LIMITS)


def item_of(data: bytes, kind: str = "audio", *, together: bool = False) -> tuple[MediaItem, dict[str, np.ndarray]]:
    return encode_item(
        MediaSource(kind=kind, data=data),  # type: ignore[arg-type]
        TIMED_SETTINGS,
        LIMITS,
        root=Path("/"),
        tokenize=lambda text: [0],
        audio=TRIAL_AUDIO,
        audio_in_video=together,
    )


def whisper(samples: np.ndarray, bins: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Returns transformers' features of one clip in float64 (numpy) and in float32 (torch)."""
    extractor = WhisperFeatureExtractor(feature_size=bins)
    exact = extractor._np_extract_fbank_features(samples[None], "cpu")[0]
    given = extractor(samples, sampling_rate=16_000, padding=True, truncation=False, return_tensors="np")
    return exact, given["input_features"][0]


@given(
    samples=st.integers(1_600, 40_000),
    hertz=st.floats(30, 7_900),
    loud=st.sampled_from((0.0, 1e-4, 0.5, 30.0)),
    noise=st.sampled_from((0.0, 1e-3, 0.2)),
    bins=st.sampled_from((80, 128)),
)
@settings(max_examples=60, deadline=None)
def test_the_features_are_those_of_transformers(
    samples: int, hertz: float, loud: float, noise: float, bins: int
) -> None:
    sound = loud * np.sin(2 * np.pi * hertz * np.arange(samples) / 16_000)
    sound = (sound + noise * np.random.default_rng(samples).normal(size=samples)).astype(np.float32)
    ours = log_mel(sound, **(WHISPER | {"mel_bins": bins}))
    exact, single = whisper(sound, bins)
    assert ours.dtype == np.float32 and ours.shape == exact.shape == single.shape == (bins, samples // 160)
    np.testing.assert_allclose(ours, exact, atol=1e-6)
    # float32 is inexact if a bin has little energy compared with the loudest bin.
    np.testing.assert_allclose(ours, single, atol=2e-3)
    assert np.abs(ours - single).mean() < 1e-5


def test_the_filters_are_those_of_transformers() -> None:
    ours = mel_filters(sampling_rate=16_000, mel_bins=128, fft_size=400)
    np.testing.assert_allclose(ours, WhisperFeatureExtractor(feature_size=128).mel_filters, atol=1e-12)


def test_silence_is_a_sound_like_any_other() -> None:
    item, tensors = item_of(stored(np.zeros((16_000, 1), np.float32), "WAV"))
    assert item.rows == 13 and item.description == "[audio 1.0 s]" and (tensors["features"] == -1.5).all()


@pytest.mark.parametrize(
    ("form", "subtype", "off"),
    [
        ("WAV", "PCM_16", 2e-4), ("WAV", "PCM_24", 1e-6), ("WAV", "FLOAT", 1e-7), ("WAV", "PCM_U8", 0.1),
        ("WAV", "ULAW", 0.1), ("WAV", "IMA_ADPCM", 0.2), ("WAV", "MS_ADPCM", 0.2),
        ("WAVEX", "PCM_16", 2e-4), ("FLAC", "PCM_24", 1e-6), ("OGG", "VORBIS", 0.3), ("OGG", "OPUS", 0.3),
        ("MP3", "MPEG_LAYER_III", 0.3),
    ],
)  # fmt: skip
def test_every_format_gives_the_sound(form: str, subtype: str, off: float) -> None:
    """``off`` limits the mean difference to the features of the original samples."""
    samples = tone(1.0)
    features, seconds = features_of(stored(samples, form, subtype=subtype))
    assert seconds == pytest.approx(1.0, abs=0.08)
    exact = log_mel(samples[:, 0], **WHISPER)
    middle = slice(10, 85)
    assert np.abs(features[:, middle] - exact[:, middle]).mean() < off
    assert features[:, middle].mean(axis=1).argmax() == exact[:, middle].mean(axis=1).argmax()


@pytest.mark.parametrize(
    ("form", "codec"),
    [("mp4", "aac"), ("mp4", "mp3"), ("mp4", "alac"), ("matroska", "pcm_s16le"), ("webm", "libopus")],
)
def test_the_track_of_a_container_is_a_sound(form: str, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 16_000
    layout = "stereo" if codec == "pcm_s16le" else "mono"
    features, seconds = features_of(film(sound_seconds=1.0, form=form, sound_codec=codec, rate=rate, layout=layout))
    exact = log_mel(tone(1.0)[:, 0], **WHISPER)
    assert seconds == pytest.approx(1.0, abs=0.15)
    assert features[:, 20:80].mean(axis=1).argmax() == exact[:, 20:80].mean(axis=1).argmax()


def test_channels_are_averaged_and_rates_are_resampled() -> None:
    left, right = tone(1.0, hertz=400)[:, 0], tone(1.0, hertz=3_000)[:, 0]
    features, _ = features_of(floats(np.stack([left, right], axis=1), channels=2))
    np.testing.assert_allclose(features, log_mel((left + right) / 2, **WHISPER), atol=1e-5)
    for rate in (4_000, 8_000, 44_100, 48_000, 192_000):
        features, seconds = features_of(floats(tone(1.5, rate=rate)[:, 0], rate=rate))
        assert features.shape == (128, 150) and seconds == pytest.approx(1.5, abs=1e-3)
        assert abs(int(features[:, 20:-20].mean(axis=1).argmax()) - 18) <= 1, "440 Hz are 6.6 mels, the 18th bin"


def test_a_sound_is_the_same_from_another_format_and_another_place() -> None:
    """The digest covers the features, and lossless formats contain the same samples."""
    samples = np.round(tone(0.7) * 32_767) / 32_768
    first, tensors = item_of(stored(samples, "WAV", subtype="PCM_16"))
    second, again = item_of(stored(samples, "FLAC", subtype="PCM_16"))
    assert first == second and first.digest == second.digest
    assert tensors["features"].tobytes() == again["features"].tobytes()
    other_settings = dataclasses.replace(TRIAL_AUDIO, chunk_frames=50)
    assert clip_item(other_settings, tensors["features"], 0.7)[0].digest != first.digest


def test_a_clip_of_each_length_of_the_limits_has_its_rows(tmp_path: Path) -> None:
    for seconds, rows in ((0.1, 2), (1.0, 13), (7.3, 95), (30.0, 390)):
        data = stored(tone(seconds), "WAV")
        item, tensors = item_of(data)
        assert (item.rows, item.advance, item.patches, item.frames) == (rows, rows, 0, 0)
        assert item.audio_frames == tensors["features"].shape[1] == round(seconds * 100)
        header = read_media_header(MediaSource(kind="audio", data=data), LIMITS, root=tmp_path)
        planned = planned_item(header, TRIAL_SETTINGS, LIMITS, audio=TRIAL_AUDIO)
        assert (planned.rows, planned.nbytes) == (rows, tensors["features"].nbytes)
        placed = write_item(tmp_path, item, tensors)
        read, views = read_item(memoryview((tmp_path / placed.digest).read_bytes()))
        assert read == placed and (views["features"] == tensors["features"]).all()


def test_a_video_and_its_sound_are_one_item(tmp_path: Path) -> None:
    data = film(seconds=2.0, sound_seconds=2.0)
    seen, _ = item_of(data, "video")
    item, tensors = item_of(data, "video", together=True)
    heard, alone = item_of(data)
    assert item.description == f"[video 96×64, {seen.frames} frames, {heard.audio_seconds:.1f} s of sound]"
    assert tensors["features"].tobytes() == alone["features"].tobytes()
    assert item.rows == seen.rows + heard.rows + 2 and item.patches == seen.patches
    assert item.ids[0] == TRIAL_AUDIO.audio_start_token_id and item.ids[-1] == TRIAL_AUDIO.audio_end_token_id
    assert item.placeholder == [TIMED_SETTINGS.video_token_id]
    header = read_media_header(MediaSource(kind="video", data=data), LIMITS, root=tmp_path, audio_in_video=True)
    planned = planned_item(header, TIMED_SETTINGS, LIMITS, audio=TRIAL_AUDIO)
    assert abs(planned.rows - item.rows) <= 2, "the track's encoder adds a few samples"


def test_offsets_are_whole_where_they_can_be_and_else_fractions() -> None:
    whole, _ = item_of(film(seconds=2.0, sound_seconds=None), "video")
    assert not whole.fractional and whole.rotary_offsets.dtype == np.int32 and whole.seconds == 1.0
    parts, _ = item_of(film(seconds=3.0, sound_seconds=None, frames=19), "video")
    assert parts.fractional and parts.rotary_offsets.dtype == np.float32
    step = parts.rotary_offsets[0, parts.rows // parts.grid[0]]
    assert step == pytest.approx(parts.seconds * 13) and step % 1


def test_a_wav_of_another_library_is_read() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setparams((2, 2, 44_100, 0, "NONE", "not compressed"))
        written.writeframes(bytes(4 * 44_100))
    assert features_of(file.getvalue())[0].shape == (128, 100)


def test_images_and_videos_import_no_library_of_sounds() -> None:
    code = (
        "import sys, relax_core.data.media.encode_worker_main, relax_core.data.generated\n"
        "assert not {'soundfile', 'soxr', 'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())})
