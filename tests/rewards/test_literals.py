"""Tests the decision whether a text is a literal number."""

from __future__ import annotations

import pytest

from rewards.mathematics.literals import is_literal, stands_alone

NUMBERS = (
    *("84", "84.0", "+84", "-7", "−3", "1,234", "1{,}234", "84.", ".5", "1e3", "50%", r"50\%", "50 percent"),
    *("84 dollars", "5 cm", r"5 \text{ cm}^2", "12 km/h", r"90^\circ", r"90^{\circ}", r"\$5", "£5", "$84$", r"\(84\)"),
    *("1/2", r"\frac{1}{2}", r"\dfrac{3}{4}", r"\frac12", r"-\frac{1}{2}", r"1\frac{1}{2}", "2 2/3", r"0.\overline{3}"),
    *(r"1.5 \times 10^{3}", "10^{-20}", "5x10^3", "x = 84", "72+12=84", "84**", "1,000,000"),
)
LISTS = ("(1, 2)", "(1,2)", r"\{1,2\}", "1, 3", "[0, 1)", r"(\frac{1}{2}, 3)", "1 and 2", "2,3,5", r"\left(1, 2\right)")
NEITHER = (
    *("72+12", "72 + 12", "12 * 7", "168/2", r"\frac{168}{2}", "84/1", "2/4", "7^2+35", r"\sqrt{4}", r"2\pi", "2^3"),
    *("84 = 72 + 12", "x<=84", r"x \le 84", "80 81 82", "84 or 85", "(72+12, 3)", "6!", r"\frac{1}{2}+1", "84x", "1/0"),
    *("", "abc", "A", r"\binom{9}{3}", r"83 \text{ or } 84", "-", "=", "1" * 3000),
)


@pytest.mark.parametrize("text", [*NUMBERS, *LISTS])
def test_a_number_that_is_written_out_is_a_literal(text: str) -> None:
    assert is_literal(text)


@pytest.mark.parametrize("text", NEITHER)
def test_an_expression_is_none(text: str) -> None:
    assert not is_literal(text)


LONG = (
    *("5 " + "a" * 1990 + "!", "5" + " a" * 990 + "!", "5 " + "cm/" * 600 + "!", "1" * 1990 + "!", "1," * 990 + "!"),
    *("(" * 1990, "5^" * 990, "5 " + "." * 1990 + "1", "5 " + "m ^ 2 " * 300 + "!", "5" + " " * 1990 + "!"),
)


@pytest.mark.parametrize("text", LONG)
def test_long_texts_are_read(text: str) -> None:
    """A pattern with exponential backtracking would not terminate."""
    assert not is_literal(text)


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("first 41, then 84", True),
        ("84 or 85? No: 84", True),
        ("Step 1: 32\nStep 2: 84", True),
        ("16 - 3 - 4 = 9 eggs, 9 * 2 = 84 dollars", True),
        ("84", True),
        ("$84$ or $85$", False),
        ("Answer: 84 or 83", False),
        ("x<=84", False),
        (r"x \\geq 84", False),
        ("The answer is not 84, it is 125.", False),
        ("125, 128, 84", False),
        ("84 83 82", False),
        ("between 80 and 84", False),
        ("84-85", False),
        ("x != 84", False),
        ("2.5, 84", False),
        (r"\sqrt{67}, 84", False),
        (r"84 or \frac{1}{3}", False),
        (r"84 \text{ fractions}", True),
        ("184, 284, 85 or 84", False),
        ("184, 2.84", True),  # a part of longer numbers is not enough
    ],
)
def test_a_number_among_others_does_not_stand_alone(text: str, alone: bool) -> None:
    assert stands_alone("84", text) == alone


@pytest.mark.parametrize(
    ("found", "text", "alone"),
    [
        ("1000", "The answer is 1,000.", True),
        ("1000", "1,000 or -8", False),
        (r"\frac{1}{2}", r"$\frac{1}{2}$ or $\frac{1}{3}$", False),
        ("2.75", "12.75, 2.75", False),
    ],
)
def test_a_number_is_found_in_its_other_writing(found: str, text: str, alone: bool) -> None:
    assert stands_alone(found, text) == alone


@pytest.mark.parametrize("piece", ["84, ", "8", " ", "(", "$", "\\", "1,000", "or ", "84"])
def test_long_texts_are_searched_in_time(piece: str) -> None:
    assert stands_alone("84", piece * 10_000) in (True, False)
