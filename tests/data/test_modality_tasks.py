"""Tests the tasks with tones: balanced answers, controls, and sound files that match their names."""

from __future__ import annotations

import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from relax_core.config.schema import FOUR_MODALITIES, MEDIA_TASKS, TONE_OF_PICTURE
from relax_core.data.generated import Example, Split, example, parts_of
from relax_core.data.media_tasks import COLOUR, COLOURS, DIRECTION, MODALITY_ANSWERS, MODALITY_PARTS, TONE, TONES, WORD

KINDS = {COLOUR: "image", DIRECTION: "video", TONE: "audio"}


def examples(task: str, count: int = 256, *, split: Split = "eval") -> list[Example]:
    return [example(task, split=split, seed=0, index=index) for index in range(count)]


def shown(task_example: Example, number: int = 0) -> str:
    """Returns the answer that belongs to a file of an example."""
    return Path(str(task_example.sources[number].path)).name.partition("-")[0]


@pytest.mark.parametrize("task", [name for name in MEDIA_TASKS if name.startswith(FOUR_MODALITIES)])
def test_parts_and_answers_are_balanced_and_controls_tell_nothing(task: str) -> None:
    drawn = examples(task)
    assert parts_of(task) == MODALITY_PARTS
    assert Counter((task_example.part, task_example.answer) for task_example in drawn) == {
        (part, answer): 16 for part in MODALITY_PARTS for answer in MODALITY_ANSWERS[part]
    }
    for part, kind in KINDS.items():
        ours = [task_example for task_example in drawn if task_example.part == part]
        assert {source.kind for task_example in ours for source in task_example.sources} == {kind}
        right = sum(shown(task_example) == task_example.answer for task_example in ours) / len(ours)
        assert right < 0.5 if kind in MEDIA_TASKS[task].exchanged else right == 1.0, (task, part)
    assert all(
        not task_example.sources and task_example.prompt == f"say {task_example.answer}"
        for task_example in drawn
        if task_example.part == WORD
    )


def test_an_exchanged_kind_leaves_the_prompts_and_answers_of_all_as_they_are() -> None:
    plain = examples(FOUR_MODALITIES)
    for kind in ("image", "video", "audio"):
        control = examples(f"{FOUR_MODALITIES}_{kind}_exchanged")
        assert [(task_example.prompt, task_example.answer) for task_example in control] == [
            (task_example.prompt, task_example.answer) for task_example in plain
        ]


def test_the_question_of_two_kinds_is_balanced_and_needs_both() -> None:
    drawn = examples(TONE_OF_PICTURE)
    tone_of = dict(zip(COLOURS, TONES, strict=True))
    assert Counter(task_example.answer for task_example in drawn) == {"yes": 128, "no": 128}
    for task_example in drawn:
        assert [source.kind for source in task_example.sources] == ["image", "audio"]
        assert (tone_of[shown(task_example)] == shown(task_example, 1)) == (task_example.answer == "yes")
    for number in (0, 1):  # one file without the other does not determine the answer
        for name in Counter(shown(task_example, number) for task_example in drawn):
            answers = Counter(task_example.answer for task_example in drawn if shown(task_example, number) == name)
            assert 0.3 < answers["yes"] / answers.total() < 0.7
    for kind in ("image", "audio"):
        control = examples(f"{TONE_OF_PICTURE}_{kind}_exchanged")
        right = [
            (tone_of[shown(task_example)] == shown(task_example, 1)) == (task_example.answer == "yes")
            for task_example in control
        ]
        assert 0.4 < np.mean(right) < 0.6


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_tone_has_its_pitch_in_every_form(split: Split) -> None:
    forms = set()
    for task_example in examples(FOUR_MODALITIES, 400, split=split):
        if task_example.part != TONE:
            continue
        with wave.open(str(task_example.sources[0].path)) as file:
            rate, channels, count = file.getframerate(), file.getnchannels(), file.getnframes()
            samples = np.frombuffer(file.readframes(count), "<i2").reshape(-1, channels)[:, 0]
        loudest = np.abs(np.fft.rfft(samples * np.hanning(count))).argmax() * rate / count
        assert loudest == pytest.approx(TONES[task_example.answer], rel=0.07)
        assert count / rate + 1e-3 >= 0.3 and count / rate <= 0.8
        forms.add((rate, channels))
    assert len(forms) == 6
