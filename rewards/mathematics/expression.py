r"""Parses a mathematical expression from text into sympy objects, without evaluating text as code.

sympy's parser, ``parse_expr``, translates text into Python and calls ``eval``. So an answer or a label could run code
with the rights of the run's user. This module replaces ``parse_expr`` by a tokenizer and a precedence parser for a
fixed grammar. Text outside of the grammar raises `ExpressionError`.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/") signed | power)*         the second form is a product without a sign, as in 2x
    signed  = ("+" | "-") signed | power
    power   = factor (("**" | "^") signed)?
    factor  = atom "!"*
    atom    = number | constant | function "(" sum ")" | unknown | "(" sum ")"

A number has ASCII digits, at most one point, and an optional exponent (``1.5e-3``). `CONSTANTS` and `FUNCTIONS` list
the known names. The name of a Greek letter is one unknown. Any other name is read letter by letter and digit by digit,
so ``x2y`` is the product x·2·y. A letter is an unknown. Letters are the ASCII letters and `MORE_LETTERS`. Text is not
normalised, so look-alikes of other alphabets, wide digits and Roman numerals are outside of the grammar.

All limits are checked before sympy computes: length of the text, number of tokens, nesting, digits of a number, and
bits of each intermediate value. So ``9**9**9`` takes no time.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 1000
MAX_TOKENS = 300
MAX_NESTED = 40
MAX_DIGITS = 310  # limit of digits of one number; a finite float has at most 309 digits before the point
MAX_BITS = 4096  # limit of bits of a numerator, a denominator, or a float's binary exponent
MAX_POWER = 64  # largest exponent if the base contains a sum
MAX_FACTORIAL = 200

MORE_LETTERS = "αβγδεζηθικλμνξοπρςστυφχψωϑϕϖϱϵℓħ"  # Greek, some letters in both LaTeX forms, and LaTeX's ell and hbar
_LETTER = f"A-Za-z{MORE_LETTERS}"
_TOKEN = re.compile(
    rf"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<name>[{_LETTER}][{_LETTER}0-9]*)"
    r"|(?P<sign>\*\*|[-+*/^()!])|(?P<space>[ \t\n]+)"
)
_PIECES = re.compile(rf"[0-9]+|[{_LETTER}]")
# The name of a Greek letter is one unknown, as in sympy.
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
    """The text is outside of the grammar, or exceeds a limit."""


def expression(text: str, *, products_without_sign: bool = False, evaluate: bool = True) -> Any:
    """Returns the sympy expression that a text denotes.

    Arithmetic of numbers is computed, unless ``evaluate`` is False. All other parts stay unevaluated; call ``doit`` on
    the result to evaluate them. With ``products_without_sign``, ``2x`` is a product. Raises `ExpressionError` if the
    text is outside of the grammar or exceeds a limit.
    """
    tokens = _tokens(text)
    folded = _Reader(tokens, products_without_sign=products_without_sign, build=_Build(fold=True)).whole()
    if evaluate:
        return folded
    # The limits apply to computed numbers. They were checked above.
    return _Reader(tokens, products_without_sign=products_without_sign, build=_Build(fold=False)).whole()


@dataclass(frozen=True)
class _Token:
    """Holds the text of a number, a name or a sign. A token of the kind "end" follows the last token."""

    kind: str
    text: str


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters; an expression has at most {MAX_CHARACTERS}")
    found: list[_Token] = []
    at = 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise ExpressionError(f"{text[at]!r} at character {at} is outside of the grammar")
        if match.lastgroup == "name":
            found += _named(match[0])
        elif match.lastgroup != "space":
            found.append(_Token(str(match.lastgroup), match[0]))
        at = match.end()
    if len(found) > MAX_TOKENS:
        raise ExpressionError(f"{len(found)} tokens; an expression has at most {MAX_TOKENS}")
    return [*found, _Token("end", "")]


def _named(name: str) -> list[_Token]:
    """Returns one token for a known name, and one token per letter and digit of any other name."""
    if name in FUNCTIONS or name in CONSTANTS or name in _UNKNOWN_NAMES:
        return [_Token("name", name)]
    return [_Token("number" if piece.isdigit() else "name", piece) for piece in _PIECES.findall(name)]


class _Reader:
    """Reads the tokens of one expression from left to right."""

    def __init__(self, tokens: list[_Token], *, products_without_sign: bool, build: _Build) -> None:
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
        """Consumes and returns the next token if it is one of these signs, else returns ""."""
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
        if self._depth > MAX_NESTED:
            raise ExpressionError(f"more than {MAX_NESTED} levels of nesting")

    def _named(self, name: str) -> Any:
        if name in FUNCTIONS:
            return self._build.applied(FUNCTIONS[name], self._parenthesis())
        return _constant(CONSTANTS[name]) if name in CONSTANTS else _unknown(name)


@dataclass(frozen=True)
class _Build:
    """Builds the parts of an expression.

    With ``fold``, arithmetic of numbers is computed; other parts stay unevaluated.

    Building an unevaluated part is fast. Evaluation by sympy may be slow: the sign of 38 nested logarithms takes
    minutes.
    """

    fold: bool

    def sum_of(self, terms: list[Any]) -> Any:
        return self._joined(_sympy().Add, operator.add, terms)

    def product_of(self, factors: list[Any]) -> Any:
        return self._joined(_sympy().Mul, operator.mul, factors)

    def _joined(self, kind: Any, folded: Callable[[Any, Any], Any], parts: list[Any]) -> Any:
        if len(parts) == 1:
            return parts[0]
        if self.fold:
            numbers = [number for number in parts if number.is_Number]
            terms = [term for term in parts if not term.is_Number]
            parts = [*([functools.reduce(lambda a, b: _checked(folded(a, b)), numbers)] if numbers else []), *terms]
        flat = [arg for part in parts for arg in (part.args if part.func is kind else (part,))]
        return kind(*flat, evaluate=False) if len(flat) > 1 else flat[0]

    def subtracted(self, term: Any) -> Any:
        if self.fold and term.is_Number:
            return -term
        return _sympy().Mul(_integer("-1"), term, evaluate=False)

    def power(self, base: Any, exponent: Any) -> Any:
        if self.fold:
            _check_power(base, exponent)
            if base.is_Number and exponent.is_Number:
                return _checked(_sympy().Pow(base, exponent))
        return _sympy().Pow(base, exponent, evaluate=False)

    def factorial(self, value: Any) -> Any:
        if value.is_Number and not (value.is_Integer and 0 <= value.p <= MAX_FACTORIAL):
            raise ExpressionError(f"a factorial of another number than 0 to {MAX_FACTORIAL}")
        return _sympy().factorial(value, evaluate=self.fold and value.is_Number)

    def applied(self, function: str, value: Any) -> Any:
        if function == "sqrt":
            return self.power(value, _sympy().S.Half)
        return getattr(_sympy(), function)(value, evaluate=False)


def _number(text: str) -> Any:
    digits, _, exponent = text.lower().partition("e")
    if len(digits) > MAX_DIGITS or len(exponent) > len("-300") or abs(int(exponent or 0)) > MAX_DIGITS:
        raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
    return _integer(text) if text.isdigit() else _checked(_sympy().Float(text))


def _integer(text: str) -> Any:
    return _sympy().Integer(int(text))


@functools.cache
def _unknown(letter: str) -> Any:
    return _sympy().Symbol(letter)


def _constant(name: str) -> Any:
    return getattr(_sympy(), name)


@functools.cache
def _sympy() -> Any:
    import sympy  # the import takes a second, and the data check does not need it

    return sympy


def _check_power(base: Any, exponent: Any) -> None:
    """Raises `ExpressionError` if a power may have more than `MAX_BITS` bits, or is a tower of unknown height."""
    sympy = _sympy()
    if any(not power.exp.is_Number for power in exponent.atoms(sympy.Pow)):
        raise ExpressionError("a power in an exponent, without a number as its own exponent")
    if base.is_Rational and abs(base.p) <= 1 and base.q == 1:
        return  # 0, 1 and -1
    bits = max([1, *map(_bits, base.atoms(sympy.Number))])
    most = (MAX_POWER if base.has(sympy.Add) else MAX_BITS // bits) // _height(base)
    for number in exponent.atoms(sympy.Number):
        if abs(number.p) > most * number.q if number.is_Rational else number.is_Float and bool(abs(number) > most):
            raise ExpressionError(f"a power with an exponent above {most}")


def _height(value: Any) -> int:
    """Returns the factor, at least 1, by which powers inside a value multiply an outer exponent."""
    inner = max([1, *map(_height, value.args)])
    if not value.is_Pow or not value.exp.is_Rational:
        return inner
    return int(inner * max(1, abs(value.exp.p) // value.exp.q))


def _checked(value: Any) -> Any:
    """Returns the value if its numbers are within the limits. Otherwise raises `ExpressionError`."""
    if any(_bits(number) > MAX_BITS for number in value.atoms(_sympy().Number)):
        raise ExpressionError(f"a value of more than {MAX_BITS} bits")
    return value


def _bits(number: Any) -> int:
    """Returns the bits of a rational number, or the absolute binary exponent of a float, or 0 for an infinity."""
    if number.is_Rational:
        return int(max(abs(number.p).bit_length(), number.q.bit_length()))
    if number.is_Float:
        _, _, power, width = number._mpf_
        return int(abs(power + width))
    return 0
