"""One message for a cause, again after a while, one when it is over; the next controller knows what was told."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from relax_core.observe.alarm_book import FILE, MOST_CHARACTERS, AlarmBook, clean, read_alarms


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_cause_is_told_once_again_later_and_when_it_is_over(tmp_path: Path) -> None:
    clock = Clock()
    book = AlarmBook(tmp_path, repeat_s=60.0, clock=clock)
    told = []
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        clock.now = 1000.0 + now
        told.append(book.tell("rule", "a", title="a", text=str))
    assert [None if one is None else (one.kind, one.left_out) for one in told] == [
        *(("new", 0), None, None, ("again", 2), None)
    ]
    assert book.tell("rule", "b", title="b", text=str) is not None, "another cause is another message"
    over = book.over("rule", "a", title="a", text=str)
    assert over is not None and over.kind == "over" and book.over("rule", "a", title="a", text=str) is None
    again = book.tell("rule", "a", title="a", text=str)
    assert again is not None and again.kind == "new"


def test_the_next_controller_goes_on_where_the_last_one_was(tmp_path: Path) -> None:
    clock = Clock()
    AlarmBook(tmp_path, repeat_s=60.0, clock=clock).tell("stalled", "no step", title="t", text=lambda: "x")
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"event": "half a li')
    book = AlarmBook(tmp_path, repeat_s=60.0, clock=clock)
    assert book.tell("stalled", "no step", title="t", text=lambda: "x") is None
    assert book.over("stalled", "no step", title="t", text=lambda: "x") is not None
    assert [one.kind for one in read_alarms(tmp_path / FILE)] == ["new", "over"], "the half line is left out"


def test_a_message_that_cannot_be_kept_is_told_and_says_so(tmp_path: Path) -> None:
    book = AlarmBook(tmp_path, repeat_s=60.0)
    (tmp_path / FILE).symlink_to("/dev/full")
    assert book.tell("disk_low", "disk", title="t", text=lambda: "x") is not None
    assert "alarms.jsonl lacks messages" in book.problem and "No space left" in book.problem


def test_no_file_is_no_alarm(tmp_path: Path) -> None:
    assert read_alarms(tmp_path / FILE) == []


def test_what_an_exception_quotes_and_secrets_stay_here() -> None:
    environment = {"MY_API_KEY": "abc-123-def", "PATH": "/usr/bin"}
    text = "rollout-0 failed with abc-123-def at https://me:pass@host/x?token=t0p and Bearer xyz"
    cleaned = clean(text, environment=environment)
    assert cleaned.startswith("rollout-0 failed with <redacted> at https://<redacted>@host/x?token=<redacted>")
    assert "xyz" not in cleaned
    quoted = clean("actor-0 died: ValueError: the answer 'my own words' is wrong", environment={})
    assert quoted == "actor-0 died: ValueError (the run's logs say more)"


@given(st.text(max_size=2000))
def test_any_text_becomes_a_short_one_without_control_characters(text: str) -> None:
    cleaned = clean(text, environment={})
    assert len(cleaned) <= MOST_CHARACTERS and not any(ord(one) < 9 or ord(one) == 27 for one in cleaned)
