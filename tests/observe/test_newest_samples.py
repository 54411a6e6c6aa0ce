"""The samples that a run prints now and then: the newest groups, once for each time, as plain lines."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from relax_core.observe.sample_log import SAMPLES_FOLDER, TOKENIZER_FOLDER, NewestSamples
from tests.observe.test_samples import group, open_log

DEADLINE_S = 60.0
TEXTS = {7: "turn", 8: "two\nlines", 9: "?", 21: "\x1b[31mred", 22: "\u202edeer"}


def write_tokenizer(run_dir: Path) -> None:
    words = {TEXTS.get(number, f"w{number}"): number for number in range(64)}
    folder = run_dir / SAMPLES_FOLDER / TOKENIZER_FOLDER
    folder.mkdir(parents=True)
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def test_the_newest_groups_are_printed_once_each_time(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    before = open_log(tmp_path)
    before.put(group(0))
    before.close(timeout_s=DEADLINE_S)
    shown = NewestSamples(tmp_path, groups=1, every=10, step=20)
    log = open_log(tmp_path)
    for index in (1, 2):
        log.put(group(index))
    assert shown.lines(29) == []
    log.close(timeout_s=DEADLINE_S)
    assert shown.lines(30) == [
        "group g00000002: turn two↵lines ?",
        "  reward 1.000  w20 U+001B[31mred",
        "  reward 0.250  U+202Edeer w23 w24",
    ]
    assert shown.lines(31) == []
    assert shown.lines(47) == [], "nothing is new"
    third = open_log(tmp_path)
    third.put(group(3))
    third.close(timeout_s=DEADLINE_S)
    assert shown.lines(49) == []
    assert shown.lines(50)[0].startswith("group g00000003: ")


def test_what_cannot_be_read_is_told_and_nothing_is_read_for_no_groups(tmp_path: Path) -> None:
    shown = NewestSamples(tmp_path, groups=2, every=1, step=0)
    log = open_log(tmp_path)
    log.put(group(0))
    log.close(timeout_s=DEADLINE_S)
    (told,) = shown.lines(1)  # there is no tokenizer
    assert told.startswith("samples cannot be shown: ") and "tokenizer.json" in told
    assert NewestSamples(tmp_path, groups=0, every=0, step=0).lines(100) == []
