"""The generated task "see": the colour of a picture, the direction in which something moves in a video, a word to copy.

Pictures are PNG files and videos are MP4 files, made once in the user's cache folder. Training and evaluation have
files of their own. An example is a pure function of split, seed and index, as in `relax_core.data.generated`; the parts
take turns, and in each part the four answers take turns, so guessing is right in a quarter of the cases.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from relax_core.contracts.media import MediaKind, MediaSource
from relax_core.data.tasks.made_folder import made_folder

COLOUR, DIRECTION, WORD = PARTS = ("colour", "direction", "word")
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (230, 210, 50)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # steps in x and y
WORDS = ("north", "south", "east", "west")
ANSWERS = {COLOUR: tuple(COLOURS), DIRECTION: tuple(DIRECTIONS), WORD: WORDS}
VARIANTS = {"train": 24, "eval": 12}  # files of each answer
FILES = {split: count * (len(COLOURS) + len(DIRECTIONS)) for split, count in VARIANTS.items()}
SIDES = (32, 64)  # the least and the largest width and height of a picture in pixels
VIDEO_SIDE, FRAMES, FRAMES_A_SECOND, SQUARE, STEP = 48, 8, 2, 12, 5  # of a video; lengths in pixels
QUESTIONS = {COLOUR: "which colour?", DIRECTION: "which way?"}
MOST_ROWS = 160  # rows of one picture or video of this task, at most, for the builtin models
_VERSION = 1  # to be raised when the files below change


class SeenExample(NamedTuple):
    """Is one example; ``source`` is None for a word to copy."""

    part: str
    prompt: str
    answer: str
    source: MediaSource | None


def see_example(*, split: str, rng: random.Random, index: int, exchange: bool) -> SeenExample:
    """Returns example ``index`` of a split. With ``exchange`` its picture is any row's, so that it tells nothing."""
    part, turn = PARTS[index % len(PARTS)], index // len(PARTS) % 4
    if part == WORD:
        return SeenExample(part, f"say {WORDS[turn]}", WORDS[turn], None)
    answers = ANSWERS[part]
    shown = rng.randrange(4) if exchange else turn
    source = seen_source(split, part, answers[shown], rng.randrange(VARIANTS[split]))
    return SeenExample(part, QUESTIONS[part], answers[turn], source)


def seen_source(split: str, part: str, answer: str, variant: int) -> MediaSource:
    """Returns the picture or the video that shows an answer; all files are made on first use."""
    kind: MediaKind = "image" if part == COLOUR else "video"
    return MediaSource(kind=kind, path=str(_file(files_folder(), split, part, answer, variant)))


@cache
def files_folder() -> Path:
    """Returns the folder of the pictures and videos, which are made on first use in about a second.

    Raises ValueError if Pillow or PyAV is not installed.
    """
    return made_folder(f"see-{_VERSION}", _make, what="the pictures")


def _file(folder: Path, split: str, part: str, answer: str, variant: int) -> Path:
    return folder / split / f"{answer}-{variant:02d}.{'png' if part == COLOUR else 'mp4'}"


def _make(folder: Path) -> None:
    try:
        import av  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"data.task=see: {error.name} is not installed, which makes its pictures and videos. Run pip install "
            "'relax-core[omni]'."
        ) from error
    for split, variants in VARIANTS.items():
        (folder / split).mkdir()
        for variant in range(variants):
            for answer, colour in COLOURS.items():
                rng = random.Random(f"{split}/{answer}/{variant}")
                _write_picture(_file(folder, split, COLOUR, answer, variant), rng, colour)
            for answer, step in DIRECTIONS.items():
                rng = random.Random(f"{split}/{answer}/{variant}")
                _write_video(_file(folder, split, DIRECTION, answer, variant), rng, step)


def _ground(rng: random.Random, height: int, width: int) -> Any:
    import numpy as np

    return np.full((height, width, 3), [rng.randrange(50) for _ in range(3)], dtype=np.uint8)


def _write_picture(file: Path, rng: random.Random, colour: tuple[int, int, int]) -> None:
    """Writes a block of the colour on a dark ground, of any size and at any place."""
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
