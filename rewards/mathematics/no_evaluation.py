"""Prevents that text in answers is executed as code. sympy and libraries that use it evaluate text in many places.

Inside a function decorated with `evaluates_no_text`, in its thread:

- the grammar of `expression` replaces sympy's ``parse_expr``, which ``sympify`` and ``Number`` call for every string;
- a replacement for sympy's ``lambdify`` computes polynomials directly; sympy's version generates source code;
- an audit hook of the interpreter raises `EvaluationRefused` for every other compilation and execution of code, for
  unpickling and for new processes. It allows imports, and a code generator of sympy that uses no text of an answer.

The first two points keep the libraries usable. The third point covers all other code that evaluates text:
CPython reports ``eval``, ``exec`` and ``compile`` of text to audit hooks before it parses the text, and a hook cannot
be removed. The hook is not a sandbox for running code; it only prevents that text becomes code. Outside of decorated
functions nothing changes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from rewards.mathematics.expression import ExpressionError, expression

P = ParamSpec("P")
T = TypeVar("T")

_LIBRARIES = ("sympy", "math_verify", "latex2sympy2_extended")
_REFUSED = frozenset(
    [
        *("compile", "exec", "code.__new__", "marshal.loads", "pickle.find_class", "os.system", "os.exec", "os.fork"),
        *("os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "ctypes.dlopen", "ctypes.dlsym"),
    ]
)
_IMPORT = "<frozen importlib."  # file names of the import system's code begin with this text
_scope = threading.local()  # frame of the outermost decorated function in this thread, else None


class EvaluationRefused(RuntimeError):
    """A library tried to turn text into code, or to start a process, while it compared answers."""


def evaluates_no_text(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function: while it runs, the function and all libraries that it calls cannot turn text into code."""

    @functools.wraps(function)
    def guarded(*arguments: P.args, **options: P.kwargs) -> T:
        if _frame() is not None:
            return function(*arguments, **options)
        _install()
        _scope.frame = sys._getframe()
        try:
            return function(*arguments, **options)
        finally:
            _scope.frame = None

    return guarded


def _frame() -> FrameType | None:
    return getattr(_scope, "frame", None)


@functools.cache
def _install() -> None:
    """Installs the hook and the replacements, once per process."""
    import sympy.parsing.sympy_parser as parser
    from sympy.polys.monomials import MonomialOps

    lambdify_module = sys.modules["sympy.utilities.lambdify"]  # the package also exports a function with this name
    exempt = MonomialOps._build.__code__
    _replace(parser.parse_expr, _parse_expr(parser.parse_expr))
    _replace(lambdify_module.lambdify, _lambdify(lambdify_module.lambdify))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _REFUSED and _frame() is not None and sys._getframe(1).f_code is not exempt and not _imports():
            raise EvaluationRefused(f"{event} while answers are compared")

    sys.addaudithook(hook)


def _imports() -> bool:
    """Returns whether the running code was called by an import inside the decorated function."""
    outermost, frame = _frame(), sys._getframe(1)
    while frame is not None and frame is not outermost:
        if frame.f_code.co_filename.startswith(_IMPORT):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _replace(original: object, replacement: object) -> None:
    """Binds all names of ``original`` in the libraries' modules to ``replacement``."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _LIBRARIES:
            for key in [key for key, value in vars(module).items() if value is original]:
                setattr(module, key, replacement)


def _parse_expr(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_expr(s: str, *arguments: Any, evaluate: bool | None = True, **options: Any) -> Any:
        if _frame() is None or _imports():
            return original(s, *arguments, evaluate=evaluate, **options)
        try:
            if evaluate is None or evaluate:
                return expression(s).doit()
            return expression(s, evaluate=False)
        except ExpressionError as error:
            raise SyntaxError(str(error)) from error  # sympify handles this error of parse_expr

    return parse_expr


def _lambdify(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lambdify(args: Any, expr: Any, *arguments: Any, **options: Any) -> Any:
        if _frame() is None or _imports():
            return original(args, expr, *arguments, **options)
        return _polynomial(args, expr)

    return lambdify


def _polynomial(variable: Any, value: Any) -> Callable[[Any], Any]:
    """Returns a polynomial as a function of numbers. Raises NotImplementedError for any other expression.

    sympy calls ``lambdify`` in two cases. For a series, it evaluates the ratio of terms at integers. For a root of a
    polynomial, it evaluates the polynomial at mpmath numbers to refine the root.
    """
    import mpmath  # type: ignore[import-untyped]
    import sympy

    if not getattr(variable, "is_Symbol", False) or not value.is_polynomial(variable):
        raise NotImplementedError("not a polynomial in one unknown")
    parts = [coefficient.as_real_imag() for coefficient in sympy.Poly(value, variable).all_coeffs()]
    if not all(part.is_Rational for pair in parts for part in pair):
        raise NotImplementedError("a polynomial with coefficients that are not rational numbers")
    whole = all(real.is_Integer and not imaginary for real, imaginary in parts)

    def computed(at: Any) -> Any:
        total: Any = 0
        for real, imaginary in parts:
            number = int(real) if whole else mpmath.mpc(*(mpmath.mpf(ratio.p) / ratio.q for ratio in (real, imaginary)))
            total = total * at + number
        return total

    return computed
