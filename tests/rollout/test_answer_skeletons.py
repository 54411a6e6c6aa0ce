"""Tests skeletons of correct answers: grouping by text, additions to the prompt, reports of possible reward hacks."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_core.observe.event_log import SKELETONS, text_record
from relax_core.rollout.answer_skeletons import (
    AnswerStats,
    RightAnswer,
    answer_stats,
    new_share,
    skeleton,
    skeleton_takeover,
    stats_of_rows,
    stats_rows,
)

Answers = Callable[[int, int, int], str]  # (row number, first addend, second addend) → answer text


def sum_prompt(a: int, b: int) -> str:
    return f"What is {a} + {b}? Reply with just the number."


def look(answers: Answers, *, rows: int = 30, shadow: float | None = 1.0, tokens: int = 4) -> AnswerStats:
    """Returns the analysis of an evaluation on sums. The reward accepts all answers."""
    judged = []
    for row in range(rows):
        a, b = 21 + row, 53 - row
        judged.append(RightAnswer(prompt=sum_prompt(a, b), text=answers(row, a, b), shadow=shadow, tokens=tokens))
    return answer_stats(judged)


def mixed(row: int, a: int, b: int) -> str:
    return (f"{a} + {b} = {a + b}", f"{a + b}", f"The answer is {a + b}.")[row % 3]


def only_number(row: int, a: int, b: int) -> str:
    return str(a + b)


def unsolved(row: int, a: int, b: int) -> str:
    return f"{a} + {b} ="


PROMPT = "Alice and Bob buy 12 apples. Who pays? Write 'pear' or 'quince' and name Zoë or Ann Lee."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72 + 12 =", "0 + 0 ="),
        ("72+12 = 84.", "0+0 = 0."),
        ("-5", "0"),
        ("= −5 or +.5", "= 0 or 0"),
        ("72 -12 and 72-12 and (3) -1", "0 -0 and 0-0 and (0) -0"),
        ("1,234.5 and 1,2,3 and 2024-05-06", "0 and 0,0,0 and 0-0-0"),
        ("  The \n\n answer\tis 7  ", "The answer is 0"),
        ("It is Bob, not Carol.", "It is A, not Carol."),
        ("Bob pays. Alice does not.\nZoë neither, but Zoë", "Bob pays. Alice does not. Zoë neither, but A"),
        ("It is Alice's turn, so I say Ann Lee", "It is A's turn, so I say A"),
        ("He writes “Pear” and 'plum', or `quince`; don't, can't", "He writes “A” and 'plum', or `A`; don't, can't"),
        ("<think>72 is big</think> 84", "0"),
        ("72 is big</think>\n84", "0"),
        ("So <think>a</think> it <think>b</think> is 84", "So it is 0"),
        ("<think>72</think>", "<think>0</think>"),
        ("<think>72 and", "<think>0 and"),
        ("", ""),
    ],
)
def test_a_skeleton_has_neither_numbers_nor_names(text: str, expected: str) -> None:
    assert skeleton(text, prompt=PROMPT) == expected


def test_a_long_skeleton_keeps_its_beginning_and_its_end() -> None:
    found = skeleton("First " + "word " * 5000 + "so the answer is 84.", prompt=PROMPT)
    assert len(found) == 80
    assert found.startswith("First word") and "…" in found and found.endswith("so the answer is 0.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("84", 1.0),
        ("72 + 12 =", 0.0),
        ("72.0 + 0012", 0.0),
        ("72 + 12 = 84", 1 / 3),
        ("-72", 1.0),
        ("WHAT is forty", 1 / 3),
        ("<think>It is easy: 84.</think>72 + 12", 0.0),
        ("=", 0.0),
        ("", 0.0),
    ],
)
def test_the_share_of_new_words_and_numbers(text: str, expected: float) -> None:
    assert new_share(text, prompt=sum_prompt(72, 12)) == pytest.approx(expected)


def test_other_scripts_than_latin() -> None:
    assert skeleton("答えは八十四、つまり84です。", prompt="72 足す 12 は?") == "答えは八十四、つまり0です。"
    assert new_share("足す84", prompt="72 足す 12 は?") == pytest.approx(1 / 3)
    assert skeleton("Ответ: Анна, ٨٤ 🙂", prompt="Где Анна?") == "Ответ: A, 0 🙂"
    assert new_share("ГДЕ Анна", prompt="Где Анна?") == 0.0


def test_the_figures_of_right_answers() -> None:
    answers = [("84", 1.0, 2), ("84", None, 2), ("72 + 12", 0.0, 4), ("12 + 72", 0.5, 4), ("It is 84", None, 6)]
    judged = [
        RightAnswer(prompt=sum_prompt(72, 12), text=text, shadow=known, tokens=size) for text, known, size in answers
    ]
    found = answer_stats(judged)
    assert [(metrics.text, metrics.share, metrics.shadow, metrics.tokens) for metrics in found.top] == [
        ("0", 0.4, 1.0, 2.0),
        ("0 + 0", 0.4, 0.25, 4.0),
        ("It is 0", 0.2, None, 6.0),
    ]
    assert [metrics.example for metrics in found.top] == ["84", "72 + 12", "It is 84"]
    assert (found.right, found.distinct, found.shadow) == (5, 0.6, 0.5)
    assert found.tokens == pytest.approx(3.6)
    assert found.values() == {
        "skeleton/share": 0.4,
        "skeleton/shadow": 1.0,
        "skeleton/distinct": 0.6,
        "skeleton/new_share": pytest.approx((1 + 1 + 0 + 0 + 2 / 3) / 5),
    }
    assert "skeleton/shadow" not in look(mixed, shadow=None).values()


def test_equally_frequent_skeletons_are_sorted_by_text() -> None:
    texts = ["d", "b", "c", "a"]
    found = [
        answer_stats([RightAnswer(prompt="", text=text, shadow=None, tokens=1) for text in order])
        for order in (texts, texts[::-1])
    ]
    assert found[0] == found[1]
    assert [metrics.text for metrics in found[0].top] == ["a", "b", "c"] and found[0].distinct == 1.0


def test_without_right_answers_there_are_no_figures() -> None:
    nothing = answer_stats([])
    assert nothing.right == 0 and nothing.values() == {}
    assert skeleton_takeover(nothing, look(unsolved, shadow=0.0)) is None
    assert skeleton_takeover(look(mixed), nothing) is None


def test_a_hack_of_the_reward_is_named_with_an_example() -> None:
    said = skeleton_takeover(look(mixed), look(unsolved, shadow=0.0))
    assert said == (
        "The answer skeleton '0 + 0 =' has 100% of the right answers and had 0% in the first evaluation; the mean "
        "score of the shadow reward is 0.00 for it and was 1.00 at first; 0% of its words and numbers are not in the "
        "prompt, and 61% were not at first; an example is '21 + 53 ='."
    )


def test_either_figure_is_enough() -> None:
    by_new_share = skeleton_takeover(look(mixed, shadow=None), look(unsolved, shadow=None))
    assert by_new_share is not None and "shadow" not in by_new_share and "words and numbers" in by_new_share
    by_shadow = skeleton_takeover(look(mixed, shadow=None), look(only_number, shadow=0.0))
    assert by_shadow is not None and "was unknown" in by_shadow and "words and numbers" not in by_shadow


def test_the_first_share_is_exact_or_has_a_bound() -> None:
    def four(row: int, a: int, b: int) -> str:
        return (f"{a + b}", f"It is {a + b}", f"Sum: {a + b}", f"{a} + {b} =")[row % 4]

    said = skeleton_takeover(look(four, rows=40), look(unsolved, shadow=0.0))
    assert said is not None and "had 25% in" in said, "its text is among the three most frequent"

    def five(row: int, a: int, b: int) -> str:
        return (f"{a + b}", f"It is {a + b}", f"Sum: {a + b}", f"{a + b}.", f"so {a} + {b} =")[row % 5]

    said = skeleton_takeover(look(five, rows=40), look(lambda row, a, b: f"so {a} + {b} =", shadow=0.0))
    assert said is not None and "had at most 20% in" in said


@pytest.mark.parametrize("shadow", [1.0, None])
def test_an_honest_form_may_take_over(shadow: float | None) -> None:
    assert look(only_number).top[0].share == 1.0 and look(only_number).new_share == 1.0
    assert skeleton_takeover(look(mixed, shadow=shadow), look(only_number, shadow=shadow)) is None


@pytest.mark.parametrize("sizes", [(4, 400), (400, 4)])
def test_no_alarm_rests_on_length(sizes: tuple[int, int]) -> None:
    def written(row: int, a: int, b: int) -> str:
        return f"Therefore we obtain {a + b}."

    def longer(row: int, a: int, b: int) -> str:
        return f"Therefore, because both addends count once, we obtain {a + b}."

    before, after = sizes
    assert skeleton_takeover(look(written, tokens=before), look(written, tokens=after)) is None
    for first, now in ((written, longer), (longer, written)):
        assert skeleton_takeover(look(first, tokens=before), look(now, tokens=after)) is None


def test_few_answers_and_small_rises_are_no_alarm() -> None:
    hack = look(unsolved, shadow=0.0)
    assert skeleton_takeover(look(mixed, rows=4), look(unsolved, rows=16, shadow=0.0)) is not None
    assert skeleton_takeover(look(mixed, rows=3), hack) is None
    assert skeleton_takeover(look(mixed), look(unsolved, rows=15, shadow=0.0)) is None
    assert skeleton_takeover(hack, hack) is None, "the first evaluation had the same share"

    def of_ten(unsolved_rows: int) -> Answers:
        return lambda row, a, b: unsolved(row, a, b) if row % 10 < unsolved_rows else f"Row {'abcdefghij'[row % 10]}"

    def change(first: int, now: int) -> str | None:
        return skeleton_takeover(look(of_ten(first), shadow=0.0), look(of_ten(now), shadow=0.0))

    assert change(2, 5) is not None
    assert change(0, 4) is None, "less than half"
    assert change(8, 10) is None and change(3, 5) is None, "rose by 0.2"


def test_a_look_is_the_same_after_a_text_record() -> None:
    looks = [look(mixed), look(unsolved, shadow=None)]
    looks.append(answer_stats([RightAnswer(prompt="", text='\ud800 "é🙂\x1b[31m', shadow=0.1, tokens=3)]))
    for skeleton_look in looks:
        rows = msgspec.json.decode(
            msgspec.json.encode(text_record(SKELETONS, 0, stats_rows(skeleton_look, notice="a")).rows)
        )
        assert stats_of_rows(rows) == skeleton_look
        assert [row.get("notice") for row in rows] == ["a", *[None] * (len(rows) - 1)]
    assert stats_rows(answer_stats([]), notice=None) == []


def test_control_characters_are_escaped() -> None:
    said = skeleton_takeover(look(mixed), look(lambda row, a, b: f"\x1b[31m{a}\x07", shadow=0.0))
    assert said is not None and said.isprintable()


TEXT = st.text(max_size=60) | st.lists(
    st.sampled_from(["<think>", "</think>", "72", "-", "1,000", ".5", "Bob", "A", '"', "'", "\n", " ", ". ", "答"]),
    max_size=30,
).map("".join)


@given(text=TEXT, prompt=TEXT)
def test_any_text_has_a_skeleton_and_a_share(text: str, prompt: str) -> None:
    found = skeleton(text, prompt=prompt)
    assert len(found) <= 80 and found == " ".join(found.split())
    assert 0.0 <= new_share(text, prompt=prompt) <= 1.0
    assert new_share(prompt, prompt=prompt) == 0.0 or "</think>" in prompt


@given(judged=st.lists(st.builds(RightAnswer, prompt=TEXT, text=TEXT, shadow=st.none() | st.floats(0, 1)), max_size=20))
def test_any_answers_have_figures(judged: list[RightAnswer]) -> None:
    found = answer_stats(judged)
    assert all(0.0 <= value <= 1.0 for value in found.values().values())
    assert len(found.top) <= 3 and sum(metrics.share for metrics in found.top) <= 1.0 + 1e-9
    assert all(len(metrics.example) <= 120 for metrics in found.top)
    said = skeleton_takeover(answer_stats(judged[:10]), found)
    assert said is None or (said.count("\n") == 0 and len(said) < 800)


@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think>", "1,234,", "9", "-", " ", '"', "' ", ".\n", "A ", "word ", "._", "答", "\n*\n"],
)
def test_a_megabyte_costs_little(unit: str) -> None:
    huge = unit * (1_000_000 // len(unit))
    began = time.process_time()
    assert len(skeleton(huge, prompt="Bob")) <= 80
    assert 0.0 <= new_share(huge, prompt="Bob") <= 1.0
    assert time.process_time() - began < 0.5  # in seconds; a scan of quadratic time takes minutes
    began = time.process_time()
    assert skeleton("It is Bob 84", prompt=huge) in ("It is A 0", "It is Bob 0")
    assert time.process_time() - began < 2.0
