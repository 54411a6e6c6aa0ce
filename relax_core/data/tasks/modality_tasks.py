"""The generated tasks "four_modalities" and "tone_of_picture".

The first asks for the colour of a picture (PNG), the direction in a video (MP4), the pitch of a tone (WAV), or has a
word to copy; the four parts take turns, and so do the four answers of each. The second shows a picture and a tone and
asks whether they belong together: the first colour with the first tone, and so on. "yes" and "no" take turns. In a
control, the files of the exchanged kinds are any row's, so that they tell nothing.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from relax_core.config.media_schema import TONE_OF_PICTURE, MediaTask
from relax_core.contracts.media import MediaSource
from relax_core.data.tasks.see_task import ANSWERS as SEEN_ANSWERS
from relax_core.data.tasks.see_task import COLOUR, COLOURS, DIRECTION, VARIANTS, WORD, seen_source
from relax_core.data.tasks.see_task import QUESTIONS as SEEN_QUESTIONS
from relax_core.data.tasks.tone_files import TONE_VARIANTS, TONES, tone_source

TONE, MATCH = "tone", "match"
MODALITY_PARTS = (COLOUR, DIRECTION, TONE, WORD)
MODALITY_ANSWERS = {**SEEN_ANSWERS, TONE: tuple(TONES), MATCH: ("yes", "no")}
_QUESTIONS = {**SEEN_QUESTIONS, TONE: "which tone?", MATCH: "do they match?"}


class ModalityExample(NamedTuple):
    """Is one example; its ``sources`` stand before the prompt, in order."""

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
    """Returns a file that shows answer ``turn`` of a part, or any answer if the task exchanges the part's kind."""
    kind = {COLOUR: "image", DIRECTION: "video", TONE: "audio"}[part]
    shown = MODALITY_ANSWERS[part][rng.randrange(4) if kind in task.exchanged else turn]
    if part == TONE:
        return tone_source(split, shown, rng.randrange(TONE_VARIANTS[split]))
    return seen_source(split, part, shown, rng.randrange(VARIANTS[split]))
