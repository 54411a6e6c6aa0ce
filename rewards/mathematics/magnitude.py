"""Compares numbers by their logarithms, to detect relative differences without computing huge values."""

from __future__ import annotations

import math
from typing import Any

_DIGITS = 60
_HUGE = 1e5  # bound of a natural logarithm; larger values are never computed
_TOLERANCE, _FLOAT_TOLERANCE = 1e-20, 2e-3  # relative tolerances; math-verify rounds a decimal number to six decimals


def same_size(wanted: Any, found: Any) -> bool | None:
    """Returns False if two sympy expressions differ relatively, True if they are equal and too large to compute.

    Returns None if another comparison must decide: for unknowns, functions, and values of usual size that look equal.
    """
    import mpmath  # type: ignore[import-untyped]
    import sympy

    wanted, found = [value.rhs if isinstance(value, sympy.Eq) else value for value in (wanted, found)]
    if all(isinstance(value, sympy.FiniteSet | sympy.Tuple) for value in (wanted, found)):
        return _same_elements(wanted, found)
    with mpmath.workdps(_DIGITS):
        logs = [_log_size(wanted), _log_size(found)]
        if None in logs:
            return None
        exact = not (wanted.has(sympy.Float) or found.has(sympy.Float))
        tolerance = _TOLERANCE if exact else _FLOAT_TOLERANCE
        differ = logs[0] != logs[1] and abs(logs[0] - logs[1]) > tolerance  # both values may be the logarithm of 0
        huge = max(map(abs, logs)) > _HUGE and not any(map(mpmath.isinf, logs))
    if differ:
        return False
    return _sign(wanted) == _sign(found) if huge else None


def _same_elements(wanted: Any, found: Any) -> bool | None:
    """Orders the elements by size. Returns False if they differ relatively, else None."""
    import mpmath

    with mpmath.workdps(_DIGITS):
        logs = [[(_log_size(element), element) for element in values.args] for values in (wanted, found)]
    if any(log is None for values in logs for log, _ in values) or len(logs[0]) != len(logs[1]):
        return None
    ordered = [[element for _, element in sorted(values, key=lambda pair: pair[0])] for values in logs]
    return False if any(same_size(*pair) is False for pair in zip(*ordered, strict=True)) else None


def _log_size(value: Any) -> Any:
    """Returns the natural logarithm of a value's size as an mpmath number, or None if unknown."""
    import mpmath
    import sympy

    if value.is_Rational:
        return mpmath.log(abs(value.p)) - mpmath.log(value.q) if value.p else mpmath.ninf
    if value.is_Float:
        return mpmath.log(abs(mpmath.mpf(value._mpf_))) if value else mpmath.ninf
    if value.is_NumberSymbol:
        return mpmath.log(mpmath.mpf(value.evalf(_DIGITS)._mpf_))
    if isinstance(value, sympy.UnevaluatedExpr):
        return _log_size(value.args[0])
    if value.is_Mul:
        logs = [_log_size(arg) for arg in value.args]
        return None if None in logs or any(map(mpmath.isinf, logs)) else mpmath.fsum(logs)
    if value.is_Add:
        terms = [_computed(arg) for arg in value.args]
        if None in terms or abs(total := mpmath.fsum(terms)) <= _TOLERANCE * max(map(abs, terms)):
            return None
        return mpmath.log(abs(total))
    if value.is_Pow:
        base, exponent = _log_size(value.base), _computed(value.exp)
        return None if base is None or exponent is None or mpmath.isinf(base) else base * exponent
    if isinstance(value, sympy.exp):
        return _computed(value.args[0])
    if isinstance(value, sympy.factorial):
        number = _computed(value.args[0])
        return None if number is None or number < 0 else mpmath.loggamma(number + 1)
    return None


def _computed(value: Any) -> Any:
    """Returns the value of a real number of limited size as an mpmath number, or None for any other value."""
    import mpmath

    log = _log_size(value)
    if log is None or (sign := _sign(value)) is None:
        return None
    if log == mpmath.ninf:
        return mpmath.mpf(0)
    if log > math.log(10) * _DIGITS / 2:  # the logarithm of the result would have too few correct digits
        return None
    if value.is_Integer:
        return mpmath.mpf(value.p)
    return sign * mpmath.exp(log)


def _sign(value: Any) -> int | None:
    """Returns the sign of an expression that `_log_size` supports, or None if unknown. The sign of 0 is 1."""
    if value.is_Rational or value.is_Float:
        return -1 if value < 0 else 1
    if value.is_Mul:
        signs = [_sign(arg) for arg in value.args]
        return None if None in signs else math.prod(sign for sign in signs if sign is not None)
    if value.is_Add:
        terms = [_computed(arg) for arg in value.args]
        return None if None in terms else -1 if sum(terms) < 0 else 1
    if value.is_Pow and _sign(value.base) == -1:
        return (-1 if value.exp.p % 2 else 1) if value.exp.is_Integer else None
    return 1
