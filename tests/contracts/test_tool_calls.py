"""Tests the errors of `tool_schema` for functions that cannot be a tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_core.contracts.tool_calls import tool_schema


def without_docstring(number: int) -> int:
    return number


def without_a_type(number) -> int:  # type: ignore[no-untyped-def]
    """Returns the number."""
    return int(number)


def with_an_unknown_type(number: Unknown) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Returns the number."""
    return int(number)


def with_a_type_that_json_lacks(number: complex) -> float:
    """Returns the real part."""
    return number.real


def with_any_number_of_numbers(*numbers: int) -> int:
    """Returns the sum."""
    return sum(numbers)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (without_docstring, "docstring"),
        (without_a_type, "number has no type"),
        (with_an_unknown_type, "'Unknown' is not defined"),
        (with_a_type_that_json_lacks, "JSON"),
        (with_any_number_of_numbers, "numbers cannot be passed by name"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_named_with_the_cause(function: Callable[..., Any], cause: str) -> None:
    with pytest.raises(ValueError, match=f"tool {function.__name__}: .*{cause}"):
        tool_schema(function)
