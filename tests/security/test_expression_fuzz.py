"""Tests the expression grammar on any text: bounded time, ExpressionError as the only error, and correct values."""

from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
import sympy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sympy.core.cache import clear_cache

from rewards.mathematics.expression import MAX_BITS, MAX_NESTED, ExpressionError, expression

WRITTEN = "0 1 7 12 9999 .5 0.25 1e3 1e-9 1e400 x y z xy α π pi E I oo nan sqrt ln exp sin abs mu ( ) + - * / ^ ** ! !!"
ODD = ", . = [ ] { } ' \" _ __ \\ \\137 @ : ; # % $ & | ~ < > ? lambda import eval diff x.diff f' ⅾ ⅰ ｄ ３ ٣ ² ½ 𝟙 é"
PIECES = [*WRITTEN.split(" "), *ODD.split(" "), "\u202e", "\0", "\n", " "]
TEXTS = st.one_of(
    st.text(max_size=80),
    st.text(alphabet="0123456789+-*/^().!exy ", max_size=80),
    st.lists(st.sampled_from(PIECES), max_size=60).map("".join),
)
FUZZ = settings(
    max_examples=1500, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LIMIT_S = 0.05
CPU = time.thread_time  # this clock does not count other processes


@FUZZ
@given(text=TEXTS, products=st.booleans(), evaluate=st.booleans())
def test_any_text_is_an_expression_or_none_in_bounded_time(text: str, products: bool, evaluate: bool) -> None:
    def seconds() -> float:
        began = CPU()
        with contextlib.suppress(ExpressionError):
            expression(text, products_without_sign=products, evaluate=evaluate)
        return CPU() - began

    if seconds() > LIMIT_S:  # the first call may include garbage collection, or the first use of a part of sympy
        clear_cache()
        assert seconds() < LIMIT_S, text


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "10^10^10",
        "9.5**9.5**9.5**9.5",
        "((9**99)**99)**99",
        "1e300**1e300",
        "1e999999999",
        "x**(9**9**9)",
        "2**(x**y)",
        "(x+1)**100000",
        "sqrt(2)**99999",
        "9999999!",
        "9!!!!!!!!",
        "1" * 500,
        "x" * 2000,
        "(" * 5000,
        "(" * (MAX_NESTED + 1) + "1" + ")" * (MAX_NESTED + 1),
        "sqrt(" * 100 + "2" + ")" * 100,
        "2**" * 100 + "2",
        "1" + "+1" * 400,
        "9" * 300 + "**" + "9" * 300,
        "9" * 300 + ("*" + "9" * 300) * 4,
    ],
)
def test_what_would_take_long_is_refused_at_once(text: str) -> None:
    began = CPU()
    with pytest.raises(ExpressionError):
        expression(text, products_without_sign=True)
    assert CPU() - began < LIMIT_S


@pytest.mark.parametrize(
    "text",
    [
        *(
            "x.diff(y)",
            "x.\u217e\u2170ff('\\137')",
            "'a'",
            '"a"',
            "x[0]",
            "{1}",
            "lambda: 1",
            "f(x, y)",
        ),
        *("ln(x, y)", "sqrt(x=1)", "__import__", "a_b", "1_000", "0x1f.", "1;2", "1,2", "\\137", "@x", "`x`", "x:=1"),
        *("٣", "３", "²", "½", "𝟙", "ⅰ", "ｄ", "é", "ß", "x²", "2\u200b", "\u202e1", "−1", "2×3", "6÷2", "", " ", "()"),
    ],
)
def test_text_outside_of_the_grammar_is_no_expression(text: str) -> None:
    for products in (False, True):
        with pytest.raises(ExpressionError):
            expression(text, products_without_sign=products)


# Draws an expression as text, and its value as a fraction, or None for an expression without a value.
def _numbers() -> st.SearchStrategy[tuple[str, Fraction | None]]:
    return st.integers(0, 99).map(lambda value: (str(value), Fraction(value)))


def _combined(parts: st.SearchStrategy[tuple[str, Fraction | None]]) -> st.SearchStrategy[tuple[str, Fraction | None]]:
    return st.one_of(
        st.tuples(parts, st.sampled_from("+-*/"), parts).map(lambda operands: _binary(*operands)),
        parts.map(lambda operand: (f"(-({operand[0]}))", None if operand[1] is None else -operand[1])),
        st.tuples(parts, st.integers(-3, 3), st.sampled_from(["**", "^"])).map(lambda operands: _power(*operands)),
        st.tuples(parts, parts).map(lambda operands: _binary(operands[0], "", operands[1])),
    )


def _binary(
    left: tuple[str, Fraction | None], sign: str, right: tuple[str, Fraction | None]
) -> tuple[str, Fraction | None]:
    text = f"({left[0]}){sign}({right[0]})"
    if left[1] is None or right[1] is None or (sign == "/" and right[1] == 0):
        return text, None
    return text, {"+": Fraction.__add__, "-": Fraction.__sub__, "/": Fraction.__truediv__}.get(sign, Fraction.__mul__)(
        left[1], right[1]
    )


def _power(base: tuple[str, Fraction | None], exponent: int, sign: str) -> tuple[str, Fraction | None]:
    text = f"({base[0]}){sign}{exponent}"
    return text, None if base[1] is None or (base[1] == 0 and exponent < 0) else base[1] ** exponent


def _is_above_a_limit(text: str) -> bool:
    return text.count("**") + text.count("^") >= 3 or text.count("(") > MAX_NESTED or len(text) > 300


@FUZZ
@given(made=st.recursive(_numbers(), _combined, max_leaves=12))
def test_arithmetic_equals_an_independent_evaluation(made: tuple[str, Fraction | None]) -> None:
    text, wanted = made
    try:
        value = expression(text, products_without_sign=True)
    except ExpressionError:  # a value, an intermediate value or the nesting is above its limit
        assert wanted is None or _is_above_a_limit(text), text
        return
    if wanted is None:
        assert not value.is_Rational or "0" in text  # sympy represents a division by zero as infinity or nan
    else:
        assert value.is_Rational, text
        assert Fraction(int(value.p), int(value.q)) == wanted
        assert max(int(value.p).bit_length(), int(value.q).bit_length()) <= MAX_BITS


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("-2^2", "-4"),
        ("2^-1", "1/2"),
        ("2^3^2", "512"),
        ("1/2x", "x/2"),
        ("xy^2", "x*y*y"),
        ("2xy", "y*x*2"),
        ("x2y", "2*x*y"),
        ("2sqrt(2)", "sqrt(8)"),
        ("x(x+1)", "x^2+x"),
        ("(x+1)(x-1)", "x^2-1"),
        ("3!/2", "3"),
        ("ln(exp(2))", "2"),
        ("2α+α", "3α"),
        ("1.5", "3/2"),
        ("mu(2)", "2mu"),
        ("--3", "3"),
    ],
)
def test_two_writings_of_one_value_are_equal(text: str, same: str) -> None:
    left, right = (expression(written, products_without_sign=True).doit() for written in (text, same))
    assert sympy.simplify(left - right) == 0
