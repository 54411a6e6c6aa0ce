r"""Compares two mathematical answers: by their normal forms, else by whether sympy simplifies their difference to 0.

Source: prm800k's grader, which DeepScaleR, slime and MathRuler also use. It is strict on purpose: an unreduced fraction
is wrong, and so is a decimal number for an integer. sympy may compute without end, so a reward that uses this module
must be isolated.

Departure: the degree of a root is compared. The source reads ``\sqrt[3]{4}`` as ``\sqrt{4}``.

No text is evaluated as Python: `expression` replaces the source's ``parse_expr``, and `no_evaluation` blocks any other
evaluation. Text outside of the grammar of `expression` is compared only by its normal form. The source accepts some
expressions that the grammar excludes: brackets, commas, ``!!``, numbers above the limits such as ``9**9**9``, and
letters and digits other than ASCII and small Greek letters.
"""

from __future__ import annotations

import re
from importlib.util import find_spec

from rewards.mathematics.expression import MORE_LETTERS, ExpressionError, expression
from rewards.mathematics.math_form import math_form
from rewards.mathematics.no_evaluation import evaluates_no_text

_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
_WORDS = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_GLYPHS = (("√", "sqrt"), ("π", "pi"), ("∞", "inf"), ("∪", "U"), ("·", "*"), ("×", "*"))
_THOUSANDS = re.compile(r"([0-9]),([0-9]{3})($|[^0-9])")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_NEVER_PARSED = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+|__")
_MAX_LETTERS = 2  # an expression with more unknowns is treated as text
_BRACKETS = "()[]"
_NESTED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_ROOT = re.compile(rf"\\sqrt *\[ *([0-9A-Za-z]+) *\] *({_NESTED}|[^\s{{])")  # LatexNodes2Text drops the degree
_OTHER_ROOT = re.compile(r"\\sqrt *\[")
_TOLERANCE = 1e-7
_WITHOUT_LETTERS = str.maketrans("", "", MORE_LETTERS)


def check_package(name: str) -> None:
    """Raises ValueError if the package that parses LaTeX is missing. ``name`` is the reward that needs the package."""
    if find_spec("pylatexenc") is None:
        raise ValueError(f"reward={name} needs the package pylatexenc: pip install 'relax-core[rewards]'.")


def prepare() -> None:
    """Imports the libraries before the first answer is scored, because the import takes a second."""
    import sympy  # noqa: F401
    from pylatexenc import latex2text  # noqa: F401


@evaluates_no_text
def is_equal(found: str, wanted: str, *, percent_signs: bool = False) -> bool:
    """Returns whether the answer ``found`` equals the reference ``wanted``.

    ``percent_signs`` removes percent signs in the MATH form. Raises MemoryError if sympy needs too much memory.
    """
    if math_form(found, percent_signs=percent_signs) == math_form(wanted, percent_signs=percent_signs):
        return True
    found, wanted = normal_form(found), normal_form(wanted)
    if found == wanted:
        return True
    if not found:
        return False
    founds, wanteds = _elements(found), _elements(wanted)
    if len(wanteds) > 1 and (found[0] != wanted[0] or found[-1] != wanted[-1]):
        return False  # different kinds of intervals
    return len(founds) == len(wanteds) and all(map(_is_element_equal, founds, wanteds))


def _is_element_equal(found: str, wanted: str) -> bool:
    if _FRACTION.fullmatch(found) and _FRACTION.fullmatch(wanted):
        return found == wanted
    if _is_int_text(found) != _is_int_text(wanted):
        return False
    return _is_difference_zero(wanted, found)


def normal_form(text: str) -> str:
    """Returns an answer in lower case without units, words and LaTeX. Integers are written as in Python."""
    if (whole := re.search(r"^\\text\{(.+?)\}$", text)) is not None:
        text = whole[1]
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for old, new in _WORDS:
        text = text.replace(old, new)
    for unit in _UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    if text[:1] == "{" and text[-1:] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if (value := _as_float(text)) is not None and _is_whole(value):
        text = str(round(value))
    if "\\" in text:
        text = _without_latex(text)
    text = re.sub("- *", "-", text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # mixed numbers
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(text.replace(",", "")))) if _is_int_text(text) else text


def _without_latex(text: str) -> str:
    """Converts LaTeX to plain text. Returns any other text unchanged."""
    from pylatexenc.latex2text import LatexNodes2Text

    written = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    written = _OTHER_ROOT.sub("root[", _ROOT.sub(_root, written))
    try:
        plain: str = LatexNodes2Text().latex_to_text(written)
    except MemoryError:
        raise
    except Exception:  # the library raises errors of many types for text that is not LaTeX
        return text
    for old, new in _GLYPHS:
        plain = plain.replace(old, new)
    return plain.strip()


def _root(found: re.Match[str]) -> str:
    degree, inner = found.groups()
    inner = inner[1:-1] if inner[0] == "{" else inner
    return f"\\sqrt{{{inner}}}" if degree == "2" else f"(({inner})**(1/{degree}))"


def _as_float(text: str) -> float | None:
    try:
        return float(text) if text.isascii() else None  # float() accepts digits of every alphabet
    except ValueError:
        return None


def _is_whole(value: float) -> bool:
    return abs(value) < float("inf") and abs(value - round(value)) <= _TOLERANCE


def _without_thousands(text: str) -> str:
    """Returns a text without thousands separators."""
    while (shorter := _THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def _is_int_text(text: str) -> bool:
    value = _as_float(_without_thousands(text))
    return value is not None and _is_whole(value)


def _elements(text: str) -> list[str]:
    """Returns the elements of a tuple or an interval. Any other text is returned as the only element."""
    text = _without_thousands(text)
    inner = text[1:-1]
    if (
        len(text) > 2
        and text[0] in _BRACKETS
        and text[-1] in _BRACKETS
        and not any(bracket in inner for bracket in _BRACKETS)
    ):
        return [part.strip() for part in inner.split(",")]
    return [text] if text else []


def _is_difference_zero(wanted: str, found: str) -> bool:
    text = f"({wanted})-({found})"
    if not text.translate(_WITHOUT_LETTERS).isascii() or _NEVER_PARSED.search(text):
        return False
    letters = {char for char in text.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    if len(letters) > _MAX_LETTERS:
        return False
    import sympy

    try:
        difference = expression(wanted, products_without_sign=True) - expression(found, products_without_sign=True)
    except ExpressionError:
        return False
    try:
        return bool(sympy.simplify(difference.doit()) == 0)
    except MemoryError:
        raise
    except Exception:  # sympy raises errors of many types for an expression without a value
        return False
