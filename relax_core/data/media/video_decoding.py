"""Decodes the sampled frames of a video with PyAV.

Checks the limits in the header, in the packets and while decoding.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from relax_core.contracts.media import MediaError
from relax_core.data.media.media_limits import MediaLimits, check_source_size

# The codecs of phones, cameras, browsers and data sets. FFmpeg has hundreds of further codecs, most of them old and
# little tested.
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg")
_CLOCK_S = 0.002  # tolerance of times in seconds, because Matroska counts in milliseconds


@dataclass(frozen=True, kw_only=True)
class VideoHeader:
    """Holds the header of a video: frames, frames per second, and the size of a frame before rotation."""

    frames: int
    fps: float
    height: int
    width: int

    @property
    def seconds(self) -> float:
        """Returns the length in seconds."""
        return self.frames / self.fps if self.fps > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class VideoIndex:
    """Holds the presentation times of a video's frames, in order, and marks frames that begin a group of pictures.

    ``times`` is None if the container does not give each frame a distinct time.
    """

    header: VideoHeader
    times: Sequence[int] | None
    keys: Sequence[int]


def sample_frames(frames: int, fps: float, limits: MediaLimits) -> list[int]:
    """Returns the numbers of the sampled frames: evenly spaced, ``limits.video_fps`` per second, as in Qwen3-VL."""
    count = int(frames / fps * limits.video_fps)
    count = min(max(count, limits.video_frames_min), limits.video_frames_max, frames)
    indices: list[int] = np.linspace(0, frames - 1, count).round().astype(int).tolist()
    return indices


def stamp_seconds(indices: Sequence[int], fps: float, step: int) -> list[float]:
    """Returns the time of each frame step in seconds: the middle between the step's first and last frame."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % step)]
    return [(padded[at] / fps + padded[at + step - 1] / fps) / 2 for at in range(0, len(padded), step)]


def stamp_text(seconds: float) -> str:
    """Returns the time stamp of a frame step."""
    return f"<{seconds:.1f} seconds>"


def step_seconds(indices: Sequence[int], fps: float, step: int) -> float:
    """Returns the time between two frame steps in seconds, as Qwen-Omni's tools pass it to transformers.

    The sampled frames are assumed to be spread evenly over the whole length of the video.
    """
    return step * (indices[-1] + 1) / fps / len(indices)


def video_header(file: IO[bytes], form: str, limits: MediaLimits) -> VideoHeader:
    """Returns a video's header. Counts the packets only if the header lacks the number of frames or the frame rate.

    Raises MediaError if the header breaks a limit.
    """
    with _opened(file, form, limits) as (_, stream):
        header = _header(stream, limits)
    return header if header.frames and header.fps > 0 else video_index(file, form, limits).header


def video_index(file: IO[bytes], form: str, limits: MediaLimits) -> VideoIndex:
    """Returns the index of a video's packets, without decoding them. Raises MediaError as `video_header` does."""
    with _opened(file, form, limits) as (container, stream):
        said = _header(stream, limits)
        times: list[int | None] = []
        keys: list[int] = []
        end = 0
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.is_corrupt:
                raise MediaError("video", "truncated", f"frame {len(times)} is not complete.")
            times.append(packet.pts)
            end = max(end, (packet.pts or 0) + (packet.duration or 0))
            if packet.is_keyframe and packet.pts is not None:
                keys.append(packet.pts)
            if len(times) > limits.source_frames:
                raise _too_many_frames(f"more than {limits.source_frames:,}", limits)
        if len(times) < said.frames * 0.99 - 1:
            raise MediaError("video", "truncated", f"its header says {said.frames} frames, and {len(times)} are there.")
        if not times:
            raise MediaError("video", "no_frames", "it has no frames.")
        known = sorted(time for time in times if time is not None)
        distinct = len(known) == len(times) and len(set(known)) == len(known)
        fps = said.fps
        if not (said.frames and fps > 0):  # as in video_header: for MP4, the rate already is frames divided by length
            fps = _mean_rate(fps, len(times), float((end - known[0]) * stream.time_base) if distinct else 0.0)
        header = VideoHeader(frames=len(times), fps=fps, height=said.height, width=said.width)
        _check_length(header.seconds, limits)
        if distinct:
            _check_length(float((known[-1] - known[0]) * stream.time_base), limits)
        return VideoIndex(header=header, times=known if distinct else None, keys=sorted(keys))


def _mean_rate(said: float, frames: int, seconds: float) -> float:
    """Returns frames per second: the header's rate ``said`` if it fits the measured ``seconds``, else a measured rate.

    A Matroska header may have the shortest time between two frames, or no time. ``seconds`` may lack the last frame's
    duration. It is 0 if unknown.
    """
    if seconds > 0 and (said <= 0 or abs(seconds - frames / said) > 1 / said + _CLOCK_S):
        return frames / seconds
    if said <= 0:
        raise MediaError("video", "no_frames", "neither its header nor its frames give a frame rate.")
    return said


def _display_matrix(frame: Any) -> tuple[int, ...]:
    """Returns a, b, c, d of a frame's display matrix, which maps (x, y) to (a x + c y, b x + d y)."""
    found = [bytes(side_data) for side_data in frame.side_data if side_data.type.name == "DISPLAYMATRIX"]
    a, b, _, c, d, *_ = np.frombuffer(found[0], "<i4").tolist() if found else (1, 0, 0, 0, 1, 0)
    return a, b, c, d


def _upright(pixels: np.ndarray, matrix: tuple[int, ...]) -> np.ndarray:
    """Returns pixels ``[height, width, 3]`` rotated and mirrored; only multiples of 90 degrees are applied."""
    a, b, c, d = matrix
    if abs(b) + abs(c) > abs(a) + abs(d):
        pixels, a, d = pixels.transpose(1, 0, 2), c, b
    return pixels[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def decode_frames(
    file: IO[bytes], form: str, limits: MediaLimits, index: VideoIndex, indices: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yields the frames with the given numbers, in order, as upright uint8 ``[height, width, 3]``.

    Before each requested frame the decoder skips to the last group of pictures that begins at or before this frame.
    Raises MediaError for a frame that is damaged or breaks a limit.
    """
    with _opened(file, form, limits) as (container, stream):
        stream.codec_context.options = {"max_pixels": str(limits.source_pixels)}
        stream.codec_context.thread_count = 1
        frames = _by_number(container, stream) if index.times is None else _by_time(container, stream, index, indices)
        wanted = iter(indices)
        number = next(wanted, None)
        matrix: tuple[int, ...] | None = None
        for found, frame in frames:
            while number is not None and found == number:
                check_source_size("video", limits, height=frame.height, width=frame.width)
                if matrix is None:  # all frames of a video have the same matrix
                    matrix = _display_matrix(frame)
                    gc.collect(0)  # PyAV's side data and frame form a reference cycle, which keeps the decoder alive
                yield _upright(frame.to_ndarray(format="rgb24"), matrix)
                number = next(wanted, None)
            if number is None:
                return
        raise MediaError("video", "truncated", f"frame {number} of {index.header.frames} cannot be decoded.")


def _by_number(container: Any, stream: Any) -> Iterator[tuple[int, Any]]:
    for number, frame in enumerate(container.decode(stream)):
        yield number, _whole(frame)


def _by_time(container: Any, stream: Any, index: VideoIndex, indices: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """Yields frames with their numbers.

    Seeks to the last group of pictures that begins at or before a requested frame.
    """
    assert index.times is not None
    numbers = {time: number for number, time in enumerate(index.times)}
    reached, keys = index.times[0] - 1, index.keys[1:]
    decoder = container.decode(stream)
    for time in (index.times[number] for number in indices):
        place = bisect_right(keys, time) - 1
        sought = place >= 0 and keys[place] > reached
        if sought:
            container.seek(keys[place], stream=stream, backward=True)
            decoder = container.decode(stream)
        while reached < time:
            frame = next(decoder, None)
            if frame is None:
                return
            if sought and frame.pts is not None and frame.pts > time:  # the seek went too far
                container.seek(index.times[0], stream=stream, backward=True)
                decoder, keys, sought = container.decode(stream), [], False
                continue
            sought = False
            if frame.pts in numbers:
                reached = frame.pts
                yield numbers[reached], _whole(frame)


def _whole(frame: Any) -> Any:
    if frame.is_corrupt:
        raise MediaError("video", "truncated", "a frame of it is damaged.")
    return frame


def _header(stream: Any, limits: MediaLimits) -> VideoHeader:
    context = stream.codec_context
    if context is None or context.name not in _CODECS:
        name = "of an unknown codec" if context is None else context.name
        raise MediaError("video", "unknown_format", f"its stream is {name}, none of {', '.join(_CODECS)}. Convert it.")
    check_source_size("video", limits, height=context.height, width=context.width)
    if stream.frames > limits.source_frames:
        raise _too_many_frames(f"{stream.frames:,}", limits)
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    if stream.duration is not None and stream.time_base:
        _check_length(float(stream.duration * stream.time_base), limits)
    header = VideoHeader(frames=stream.frames, fps=fps, height=context.height, width=context.width)
    _check_length(header.seconds, limits)
    return header


def _check_length(seconds: float, limits: MediaLimits) -> None:
    if seconds > limits.source_seconds:
        raise MediaError(
            "video",
            "too_long",
            f"it is {seconds:,.0f} s long, and the limit is {limits.source_seconds:,.0f} s. Cut it.",
        )


def _too_many_frames(count: str, limits: MediaLimits) -> MediaError:
    text = f"it has {count} frames, and the limit is {limits.source_frames:,}. Cut it."
    return MediaError("video", "too_many_frames", text)


@contextmanager
def _opened(file: IO[bytes], form: str, limits: MediaLimits) -> Iterator[tuple[Any, Any]]:
    """Opens the first video stream of a file object."""
    with opened_container(file, form, limits) as container:
        if not container.streams.video:
            raise MediaError("video", "no_frames", "it has no video stream.")
        yield container, container.streams.video[0]


@contextmanager
def opened_container(file: IO[bytes], form: str, limits: MediaLimits) -> Iterator[Any]:
    """Opens a container of one of `VIDEO_FORMATS`; errors of FFmpeg inside the block become MediaError."""
    import av

    file.seek(0)
    options = {"format_whitelist": "mov,matroska,webm", "protocol_whitelist": "none", "enable_drefs": "0"}
    try:
        container = av.open(
            file, format=form, container_options=options, metadata_errors="replace",
            options={"max_pixels": str(limits.source_pixels)},
        )  # fmt: skip
        with container:
            yield container
    except av.error.MemoryError as error:
        raise MemoryError(str(error)) from error
    except (av.FFmpegError, OSError, ValueError, ArithmeticError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError("video", "truncated", f"it is truncated or damaged: {error}") from error
