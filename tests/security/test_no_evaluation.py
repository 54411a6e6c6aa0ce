"""Tests that functions decorated with `evaluates_no_text` cannot execute text, and that other calls are unchanged."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sympy
from sympy.core.sympify import SympifyError

from rewards.mathematics.no_evaluation import EvaluationRefused, evaluates_no_text

X = sympy.Symbol("x")


def _unpickled() -> object:
    return pickle.loads(pickle.dumps(Path))


@evaluates_no_text
def guarded(function: Callable[[], object]) -> object:
    return function()


@pytest.mark.parametrize(
    "function",
    [
        *(lambda: eval("1+1"), lambda: eval("1+1", {"__builtins__": {}}), lambda: exec("x = 1"), _unpickled),
        *(lambda: compile("1", "", "eval"), lambda: os.system("true"), lambda: subprocess.run([sys.executable, "-V"])),
        *(lambda: guarded.__code__.replace(co_name="x"), os.fork),
    ],
)
def test_a_way_from_text_to_code_is_refused(function: Callable[[], object]) -> None:
    with pytest.raises(EvaluationRefused):
        guarded(function)


@pytest.mark.parametrize(
    "text", ["x.diff('1')", "().__class__", "'a'", "Symbol('x')", "f(x)", "lambda: 1", "[1]", "x y"]
)
def test_sympy_reads_text_by_the_grammar_alone(text: str) -> None:
    for function in (sympy.sympify, sympy.S, sympy.Number, sympy.N):
        with pytest.raises((SympifyError, ValueError)):
            guarded(lambda function=function: function(text))  # type: ignore[misc]
    with pytest.raises(SyntaxError):
        guarded(lambda: sympy.parse_expr(text))
    with pytest.raises(EvaluationRefused):
        guarded(lambda: sympy.parse_expr.__wrapped__(text))  # the original, which other modules may have imported


def test_sympy_still_reads_numbers() -> None:
    assert guarded(lambda: sympy.Number("42")) == 42
    assert guarded(lambda: sympy.Number("0.5")) == sympy.Float("0.5")
    assert guarded(lambda: sympy.sympify("(1/2)*sqrt(8)")) == sympy.sqrt(2)
    assert guarded(lambda: sympy.nsimplify(sympy.Float(0.25))) == sympy.Rational(1, 4)


def test_the_name_of_an_unknown_is_no_part_of_a_program(tmp_path: Path) -> None:
    """Without the guard, sympy writes a function as source code and uses it to sum a series and refine a root."""
    evil = sympy.Symbol(f"__import__('os').mkdir({str(tmp_path / 'ran')!r})")
    n = sympy.Symbol("n")
    series = sympy.Sum(evil**n / sympy.factorial(n), (n, 0, sympy.oo))
    with contextlib.suppress(TypeError):  # without lambdify, sympy cannot decide whether the terms vanish
        guarded(lambda: (series - sympy.sqrt(5)).evalf())
    assert not (tmp_path / "ran").exists()
    with pytest.raises(NotImplementedError):
        guarded(lambda: sympy.lambdify(n, evil))
    known = sympy.Sum(1 / (sympy.factorial(n) * 2**n), (n, 0, sympy.oo))
    assert float(guarded(known.evalf)) == pytest.approx(1.6487212707)  # type: ignore[arg-type]
    root = sympy.CRootOf(X**5 - X - 1, 0)
    assert float(guarded(root.evalf)) == pytest.approx(1.1673039782)  # type: ignore[arg-type]
    complex_root = complex(guarded(sympy.CRootOf(X**5 - X - 1, 1).evalf))  # type: ignore[call-overload]
    assert complex_root**5 == pytest.approx(complex_root + 1)


def test_imports_and_polynomials_go_on() -> None:
    sys.modules.pop("colorsys", None)
    guarded(lambda: __import__("colorsys"))
    y, z = sympy.symbols("y z")
    assert guarded(lambda: sympy.groebner([X * y - z, y**2 - X, z**2 - y], X, y, z, order="grevlex")) is not None


def test_outside_nothing_is_refused() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)
    assert eval("1+1") == 2
    assert sympy.sympify("Symbol('x').diff()") == 1
    assert sympy.lambdify(X, X + 1)(1) == 2
    done: list[int] = []

    def other_thread() -> None:
        thread = threading.Thread(target=lambda: done.append(eval("1+1")))
        thread.start()
        thread.join(timeout=10)

    guarded(other_thread)
    assert done == [2]
