"""The generated multimodal tasks "see", "four_modalities" and "tone_of_picture", and the cache folders of their files.

"see" has three parts: it asks for the colour of a picture (PNG), asks for the direction of motion in a video (MP4), or
gives a word to copy. "four_modalities" has a fourth part, which asks for the pitch of a tone (WAV). The parts
alternate, and so do the four answers of each part. "tone_of_picture" shows a picture and a tone and asks whether they
match: the first colour matches the first tone, and so on. In a control task ("…_exchanged"), files of some kinds are
random, so these files carry no information.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import wave
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_core.config.schema import TONE_OF_PICTURE, MediaTask
from relax_core.contracts.media import MediaKind, MediaSource
from relax_core.contracts.private_folder import file_locked, private_folder, user_cache

_LAST_FILE = ".complete"
_MAKE_DEADLINE_S = 120.0


def cache_folder() -> Path:
    """Returns the parent folder of all folders of `made_folder`."""
    return user_cache().resolve()


def made_folder(name: str, make: Callable[[Path], None], *, what: str) -> Path:
    """Returns the folder ``name``. If it does not exist, ``make`` creates its files; ``what`` names them in errors.

    The files are written to a temporary folder, which is then renamed. So no process reads an incomplete folder.
    """
    root = cache_folder()
    folder = root / name
    if not (folder / _LAST_FILE).is_file():
        private_folder(root, key="XDG_CACHE_HOME")
        with file_locked(root / f".{name}.lock", deadline_s=_MAKE_DEADLINE_S, makes=what):
            if not (folder / _LAST_FILE).is_file():
                _fill(folder, make)
    return folder


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        make(partial)
        (partial / _LAST_FILE).touch()
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


COLOUR, DIRECTION, WORD = PARTS = ("colour", "direction", "word")
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (230, 210, 50)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # steps in x and y
WORDS = ("north", "south", "east", "west")
ANSWERS = {COLOUR: tuple(COLOURS), DIRECTION: tuple(DIRECTIONS), WORD: WORDS}
VARIANTS = {"train": 24, "eval": 12}  # number of files for each answer
FILES = {split: count * (len(COLOURS) + len(DIRECTIONS)) for split, count in VARIANTS.items()}
SIDES = (32, 64)  # smallest and largest width and height of a picture in pixels
VIDEO_SIDE, FRAMES, FRAMES_A_SECOND, SQUARE, STEP = 48, 8, 2, 12, 5  # of a video; VIDEO_SIDE, SQUARE and STEP in pixels
QUESTIONS = {COLOUR: "which colour?", DIRECTION: "which way?"}
MAX_ROWS = 160  # most rows of one picture or video of this task, for the built-in models
_VISION_TASK_VERSION = 1  # increase this when the files below change


class VisionExample(NamedTuple):
    """Holds one example of the task "see"; ``source`` is None in the part with a word to copy."""

    part: str
    prompt: str
    answer: str
    source: MediaSource | None


def vision_example(*, split: str, rng: random.Random, index: int, exchange: bool) -> VisionExample:
    """Returns example ``index`` of a split. With ``exchange`` the example's media show a random answer."""
    part, turn = PARTS[index % len(PARTS)], index // len(PARTS) % 4
    if part == WORD:
        return VisionExample(part, f"say {WORDS[turn]}", WORDS[turn], None)
    answers = ANSWERS[part]
    shown = rng.randrange(4) if exchange else turn
    source = vision_source(split, part, answers[shown], rng.randrange(VARIANTS[split]))
    return VisionExample(part, QUESTIONS[part], answers[turn], source)


def vision_source(split: str, part: str, answer: str, variant: int) -> MediaSource:
    """Returns the picture or the video that shows an answer; the first call makes all files."""
    kind: MediaKind = "image" if part == COLOUR else "video"
    return MediaSource(kind=kind, path=str(_vision_file(files_folder(), split, part, answer, variant)))


@cache
def files_folder() -> Path:
    """Returns the folder of the pictures and videos; the first call makes them in about a second.

    Raises ValueError if Pillow or PyAV is not installed.
    """
    return made_folder(f"see-{_VISION_TASK_VERSION}", _make_vision_files, what="the pictures")


def _vision_file(folder: Path, split: str, part: str, answer: str, variant: int) -> Path:
    return folder / split / f"{answer}-{variant:02d}.{'png' if part == COLOUR else 'mp4'}"


def _make_vision_files(folder: Path) -> None:
    try:
        import av  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"data.task=see: {error.name} is not installed; it makes the pictures and videos. Run pip install "
            "'relax-core[omni]'."
        ) from error
    for split, variants in VARIANTS.items():
        (folder / split).mkdir()
        for variant in range(variants):
            for answer, colour in COLOURS.items():
                rng = random.Random(f"{split}/{answer}/{variant}")
                _write_picture(_vision_file(folder, split, COLOUR, answer, variant), rng, colour)
            for answer, step in DIRECTIONS.items():
                rng = random.Random(f"{split}/{answer}/{variant}")
                _write_video(_vision_file(folder, split, DIRECTION, answer, variant), rng, step)


def _ground(rng: random.Random, height: int, width: int) -> Any:
    import numpy as np

    return np.full((height, width, 3), [rng.randrange(50) for _ in range(3)], dtype=np.uint8)


def _write_picture(file: Path, rng: random.Random, colour: tuple[int, int, int]) -> None:
    """Writes a picture of random size: a block of the colour at a random position on a dark background."""
    from PIL import Image

    height, width = (rng.randint(*SIDES) for _ in range(2))
    pixels = _ground(rng, height, width)
    top, left = rng.randrange(height // 2), rng.randrange(width // 2)
    pixels[top : top + height // 2, left : left + width // 2] = colour
    Image.fromarray(pixels).save(file)


def _write_video(file: Path, rng: random.Random, step: tuple[int, int]) -> None:
    """Writes a bright square that crosses the picture in one direction."""
    import av

    ground, across = _ground(rng, VIDEO_SIDE, VIDEO_SIDE), rng.randint(0, VIDEO_SIDE - SQUARE)
    with av.open(str(file), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_A_SECOND, options={"crf": "12"})
        stream.width = stream.height = VIDEO_SIDE
        stream.pix_fmt = "yuv420p"
        for number in range(FRAMES):
            along = STEP * (number if sum(step) > 0 else FRAMES - 1 - number)
            x, y = (along, across) if step[0] else (across, along)
            pixels = ground.copy()
            pixels[y : y + SQUARE, x : x + SQUARE] = (240, 220, 180)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


TONES = {"low": 300.0, "mid": 700.0, "high": 1500.0, "top": 3000.0}  # hertz
TONE_VARIANTS = {"train": 24, "eval": 12}  # files of each tone
SECONDS = (0.3, 0.8)  # smallest and largest length
_RATES = (8_000, 16_000, 44_100)
_PITCH = 0.06  # largest relative deviation of a tone's pitch
_NOISE = 0.02  # amplitude as a share of full scale
_TONE_VERSION = 1  # increase this when the files below change


def tone_source(split: str, tone: str, variant: int) -> MediaSource:
    """Returns the file of a tone; the first call makes all files."""
    return MediaSource(kind="audio", path=str(_tone_file(_tone_folder(), split, tone, variant)))


@cache
def _tone_folder() -> Path:
    return made_folder(f"tones-{_TONE_VERSION}", _make_tones, what="the tones")


def _tone_file(folder: Path, split: str, tone: str, variant: int) -> Path:
    return folder / split / f"{tone}-{variant:02d}.wav"


def _make_tones(folder: Path) -> None:
    for split, variants in TONE_VARIANTS.items():
        (folder / split).mkdir()
        for variant in range(variants):
            for tone, hertz in TONES.items():
                rng = random.Random(f"{split}/{tone}/{variant}")
                _write_tone(_tone_file(folder, split, tone, variant), rng, hertz)


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


TONE, MATCH = "tone", "match"
MODALITY_PARTS = (COLOUR, DIRECTION, TONE, WORD)
MODALITY_ANSWERS = {**ANSWERS, TONE: tuple(TONES), MATCH: ("yes", "no")}
_QUESTIONS = {**QUESTIONS, TONE: "which tone?", MATCH: "do they match?"}


class ModalityExample(NamedTuple):
    """Holds one example; its ``sources`` precede the prompt, in order."""

    part: str
    prompt: str
    answer: str
    sources: tuple[MediaSource, ...]


def modality_example(name: str, task: MediaTask, *, split: str, rng: random.Random, index: int) -> ModalityExample:
    """Returns example ``index`` of a split of the task ``name``."""
    if name.startswith(TONE_OF_PICTURE):
        return _match_example(task, split=split, rng=rng, index=index)
    part, turn = MODALITY_PARTS[index % len(MODALITY_PARTS)], index // len(MODALITY_PARTS) % 4
    answer = MODALITY_ANSWERS[part][turn]
    if part == WORD:
        return ModalityExample(part, f"say {answer}", answer, ())
    source = _source(task, part, turn, split=split, rng=rng)
    return ModalityExample(part, _QUESTIONS[part], answer, (source,))


def _match_example(task: MediaTask, *, split: str, rng: random.Random, index: int) -> ModalityExample:
    answer, colour = MODALITY_ANSWERS[MATCH][index % 2], index // 2 % len(COLOURS)
    tone = colour if answer == "yes" else (colour + rng.randrange(1, len(TONES))) % len(TONES)
    picture = _source(task, COLOUR, colour, split=split, rng=rng)
    heard = _source(task, TONE, tone, split=split, rng=rng)
    return ModalityExample(MATCH, _QUESTIONS[MATCH], answer, (picture, heard))


def _source(task: MediaTask, part: str, turn: int, *, split: str, rng: random.Random) -> MediaSource:
    """Returns a file that shows answer ``turn`` of a part.

    If the task exchanges the part's kind, the answer is random.
    """
    kind = {COLOUR: "image", DIRECTION: "video", TONE: "audio"}[part]
    shown = MODALITY_ANSWERS[part][rng.randrange(4) if kind in task.exchanged else turn]
    if part == TONE:
        return tone_source(split, shown, rng.randrange(TONE_VARIANTS[split]))
    return vision_source(split, part, shown, rng.randrange(VARIANTS[split]))
