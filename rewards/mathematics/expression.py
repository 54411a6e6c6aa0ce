r"""Reads an expression from text and builds it of sympy's objects, without evaluating text.

sympy's own reader, ``parse_expr``, translates text into Python and calls ``eval``. Names, attributes, strings and calls
in an answer or a label then run as code of the run's user. This module is its replacement: a tokenizer and a precedence
parser for a fixed grammar. Text outside of the grammar raises `ExpressionError`.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/") signed | power)*         the second form is a product without a sign, as in 2x
    signed  = ("+" | "-") signed | power
    power   = factor (("**" | "^") signed)?
    factor  = atom "!"*
    atom    = number | constant | function "(" sum ")" | unknown | "(" sum ")"

A number has ASCII digits, one point at most and an exponent (``1.5e-3``). `CONSTANTS` and `FUNCTIONS` list the names
with a meaning. Any other name is the product of its letters and digits: ``x2y`` is x·2·y. A letter is an unknown. The
letters are those of ASCII and the small Greek letters; no text is normalised, so look-alikes of other alphabets, wide
digits and Roman numerals are outside of the grammar.

Every limit below holds before sympy computes: the length of the text, its tokens, the nesting, the digits of a number,
and the bits of each intermediate value. ``9**9**9`` costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

MOST_CHARACTERS = 1000
MOST_TOKENS = 300
MOST_NESTED = 40
MOST_DIGITS = 310  # of one number; a finite float has at most 309 before its point
MOST_BITS = 4096  # of a numerator, a denominator, or of the exponent of two of a float
MOST_POWER = 64  # of a sum or a product
MOST_FACTORIAL = 200

GREEK = "αβγδεζηθικλμνξοπρστυφχψω"
_LETTER = f"A-Za-z{GREEK}"
_TOKEN = re.compile(
    rf"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[{_LETTER}][{_LETTER}0-9]*)"
    r"|(?P<sign>\*\*|[-+*/^()!])|(?P<space>[ \t\n]+)"
)
_PIECES = re.compile(rf"[0-9]+|[{_LETTER}]")
# A Greek letter's name is one unknown, as in sympy.
_UNKNOWN_NAMES = frozenset(
    [
        *(
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "zeta",
            "eta",
            "theta",
            "iota",
            "kappa",
            "lambda",
            "mu",
            "nu",
            "xi",
        ),
        *("omicron", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
    ]
)
CONSTANTS: Mapping[str, str] = {"pi": "pi", "oo": "oo", "E": "E", "I": "I"}  # name -> sympy's name
FUNCTIONS: Mapping[str, str] = {
    **{name: name for name in ("sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc")},
    "abs": "Abs",
}


class ExpressionError(ValueError):
    """The text is outside of the grammar, or above a limit."""


def expression(text: str, *, products_without_sign: bool = False, evaluate: bool = True) -> Any:
    """Returns the sympy expression that a text denotes.

    With ``products_without_sign``, ``2x`` is a product. Without ``evaluate``, sums, products and powers stay as they
    are written. Raises `ExpressionError` for text outside of the grammar or above a limit.
    """
    tokens = _tokens(text)
    reader = _Reader(tokens, products_without_sign=products_without_sign, build=_Evaluated())
    value = reader.whole()  # it holds the limits; the values of an expression that stays as it is are unknown
    if evaluate:
        return value
    return _Reader(tokens, products_without_sign=products_without_sign, build=_AsWritten()).whole()


@dataclass(frozen=True)
class _Token:
    """Is a number, a name or a sign with its text; the kind "end" follows the last one."""

    kind: str
    text: str


def _tokens(text: str) -> list[_Token]:
    if len(text) > MOST_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters; an expression has at most {MOST_CHARACTERS}")
    found: list[_Token] = []
    at = 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise ExpressionError(f"{text[at]!r} at character {at} is outside of the grammar")
        if match.lastgroup != "space":
            found.append(_Token(str(match.lastgroup), match[0]))
        at = match.end()
    if len(found) > MOST_TOKENS:
        raise ExpressionError(f"{len(found)} tokens; an expression has at most {MOST_TOKENS}")
    return [*found, _Token("end", "")]


class _Reader:
    """Reads the tokens of one expression from left to right."""

    def __init__(self, tokens: list[_Token], *, products_without_sign: bool, build: _Evaluated) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._products_without_sign = products_without_sign
        self._build = build

    def whole(self) -> Any:
        value = self._sum()
        if self._next.kind != "end":
            raise ExpressionError(f"{self._next.text!r} follows a complete expression")
        return value

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _takes(self, *signs: str) -> str:
        """Returns the next token and steps over it if it is one of these signs; else an empty text."""
        token = self._next
        if token.kind != "sign" or token.text not in signs:
            return ""
        self._at += 1
        return token.text

    def _sum(self) -> Any:
        terms = [self._product()]
        while sign := self._takes("+", "-"):
            term = self._product()
            terms.append(term if sign == "+" else self._build.subtracted(term))
        return self._build.sum_of(terms)

    def _product(self) -> Any:
        factors = [self._signed()]
        while True:
            if sign := self._takes("*", "/"):
                factor = self._signed()
                factors.append(factor if sign == "*" else self._build.power(factor, _integer("-1")))
            elif self._products_without_sign and self._begins_atom():
                factors.append(self._power())
            else:
                return self._build.product_of(factors)

    def _begins_atom(self) -> bool:
        return self._next.kind in ("number", "name") or self._next.text == "("

    def _signed(self) -> Any:
        negative = False
        while sign := self._takes("+", "-"):
            negative ^= sign == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Any:
        base = self._factor()
        if not self._takes("**", "^"):
            return base
        self._deeper()
        exponent = self._signed()
        self._depth -= 1
        return self._build.power(base, exponent)

    def _factor(self) -> Any:
        value = self._atom()
        while self._takes("!"):
            if self._next.text == "!":
                raise ExpressionError("'!!' is outside of the grammar")
            value = self._build.factorial(value)
        return value

    def _atom(self) -> Any:
        token = self._next
        if token.kind == "number":
            self._at += 1
            return _number(token.text)
        if token.kind == "name":
            self._at += 1
            return self._named(token.text)
        return self._parenthesis()

    def _parenthesis(self) -> Any:
        if not self._takes("("):
            raise ExpressionError(f"{self._next.text or 'the end'!r} where a number, a name or '(' must follow")
        self._deeper()
        value = self._sum()
        self._depth -= 1
        if not self._takes(")"):
            raise ExpressionError(f"{self._next.text or 'the end'!r} where ')' must follow")
        return value

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise ExpressionError(f"more than {MOST_NESTED} levels of nesting")

    def _named(self, name: str) -> Any:
        if name in FUNCTIONS:
            return self._build.applied(FUNCTIONS[name], self._parenthesis())
        if name in CONSTANTS:
            return _constant(CONSTANTS[name])
        pieces = [name] if name in _UNKNOWN_NAMES else _PIECES.findall(name)
        if len(pieces) > 1 and not self._products_without_sign:
            raise ExpressionError(f"{name!r} is no name that an expression may have")
        return self._build.product_of([_number(one) if one.isdigit() else _unknown(one) for one in pieces])


class _Evaluated:
    """Builds expressions that sympy evaluates, and raises `ExpressionError` before a value exceeds the limits."""

    def sum_of(self, terms: list[Any]) -> Any:
        return terms[0] if len(terms) == 1 else _checked(_sympy().Add(*terms))

    def product_of(self, factors: list[Any]) -> Any:
        value = factors[0]
        for factor in factors[1:]:
            value = _checked(_sympy().Mul(value, factor))
        return value

    def subtracted(self, term: Any) -> Any:
        return -term

    def power(self, base: Any, exponent: Any) -> Any:
        _check_power(base, exponent)
        return _checked(_sympy().Pow(base, exponent))

    def factorial(self, value: Any) -> Any:
        if value.is_Number and not (value.is_Integer and 0 <= value.p <= MOST_FACTORIAL):
            raise ExpressionError(f"a factorial of another number than 0 to {MOST_FACTORIAL}")
        return _checked(_sympy().factorial(value))

    def applied(self, function: str, value: Any) -> Any:
        return _checked(getattr(_sympy(), function)(value))


class _AsWritten(_Evaluated):
    """Builds expressions as they are written, by the rules of sympy's ``parse_expr`` with ``evaluate=False``."""

    def sum_of(self, terms: list[Any]) -> Any:
        return terms[0] if len(terms) == 1 else self._flat(_sympy().Add, terms)

    def product_of(self, factors: list[Any]) -> Any:
        return factors[0] if len(factors) == 1 else self._flat(_sympy().Mul, factors)

    def subtracted(self, term: Any) -> Any:
        return _sympy().Mul(_integer("-1"), term, evaluate=False)

    def power(self, base: Any, exponent: Any) -> Any:
        return _sympy().Pow(base, exponent, evaluate=False)

    def factorial(self, value: Any) -> Any:
        return _sympy().factorial(value, evaluate=False)

    def applied(self, function: str, value: Any) -> Any:
        return getattr(_sympy(), function)(value, evaluate=False)

    def _flat(self, kind: Callable[..., Any], parts: list[Any]) -> Any:
        flat = [one for part in parts for one in (part.args if part.func is kind else (part,))]
        return kind(*flat, evaluate=False)


def _number(text: str) -> Any:
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > MOST_DIGITS or len(exponent) > len("-300") or abs(int(exponent or 0)) > MOST_DIGITS:
        raise ExpressionError(f"a number of more than {MOST_DIGITS} digits")
    return _integer(text) if text.isdigit() else _checked(_sympy().Float(text))


def _integer(text: str) -> Any:
    return _sympy().Integer(int(text))


@cache
def _unknown(letter: str) -> Any:
    return _sympy().Symbol(letter)


def _constant(name: str) -> Any:
    return getattr(_sympy(), name)


@cache
def _sympy() -> Any:
    import sympy  # its import takes a second, and the check of the data needs none of it

    return sympy


def _check_power(base: Any, exponent: Any) -> None:
    """Raises `ExpressionError` if a power may have more than `MOST_BITS` bits."""
    most = MOST_POWER
    if base.is_Rational:
        if abs(base.p) <= 1 and base.q == 1:
            return  # 0, 1 and -1
        most = MOST_BITS // max(abs(base.p).bit_length(), base.q.bit_length())
    elif base.is_Symbol or base.is_NumberSymbol or base.is_Float:
        most = MOST_BITS
    for number in exponent.atoms(_sympy().Number):
        if abs(number.p) > most * number.q if number.is_Rational else number.is_Float and bool(abs(number) > most):
            raise ExpressionError(f"a power with an exponent above {most}")


def _checked(value: Any) -> Any:
    """Returns a value whose numbers are within the limits, else raises `ExpressionError`."""
    for number in value.atoms(_sympy().Number):
        if number.is_Rational:
            bits = max(abs(number.p).bit_length(), number.q.bit_length())
        elif number.is_Float:
            _, _, power, width = number._mpf_
            bits = abs(power + width)
        else:
            continue  # infinities and nan
        if bits > MOST_BITS:
            raise ExpressionError(f"a value of more than {MOST_BITS} bits")
    return value
